"""Methods with messages: each worker exchanges with the center alone."""
