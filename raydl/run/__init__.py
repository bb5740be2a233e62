"""One run on the driver: its start, its folder, its records and its end."""
