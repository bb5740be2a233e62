"""The worker group as Ray actors: what is started where, called, watched, and given up."""
