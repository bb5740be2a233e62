"""Reports, comparisons, trials of Ray Tune, plans, data conversion; no run needs them."""
