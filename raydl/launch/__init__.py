"""Submission of runs as Ray jobs, and notices of spot machines that will be preempted."""
