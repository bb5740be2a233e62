"""What people read: ``redaction`` removes credentials, ``formatting`` writes times and tables."""
