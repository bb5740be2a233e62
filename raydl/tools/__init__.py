"""Reports, comparisons, plans and data conversion; training does not need them."""
