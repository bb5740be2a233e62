"""Benchmarks: measurements of raydl beside its alternatives."""
