"""Checkpoints: whole or absent, for any number of workers."""
