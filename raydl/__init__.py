"""raydl: elastic deep-learning training on Ray."""
