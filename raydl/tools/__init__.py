"""Tools beside the training: reports, comparisons, plans, data conversion."""
