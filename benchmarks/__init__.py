"""Measurements that need more than a test, beside what one would take instead of raydl."""
