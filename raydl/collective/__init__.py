"""The synchronous methods: all ranks exchange at once, by one all-reduce."""
