"""Where a run is kept, what it tells of itself while it goes on, and what it is asked for."""
