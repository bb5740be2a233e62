"""Synchronous methods: all ranks exchange together, by one all-reduce."""
