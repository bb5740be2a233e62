"""Runs as Ray jobs, and the end of spot machines, told to Ray in time."""
