"""The worker's training loop, the user's own loop, and the evaluator."""
