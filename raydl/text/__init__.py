"""Text for people: ``redaction`` removes credentials, ``formatting`` writes times and tables."""
