"""Reports, comparisons, searches, plans and data conversion; training does not need them."""
