"""One run on its driver: start, folder, records and end."""
