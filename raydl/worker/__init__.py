"""The training loop of one worker, or of a user who keeps their own; and the evaluator."""
