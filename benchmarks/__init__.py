"""Measurements that need more than a test: hosts with thin links, and what runs do on them."""
