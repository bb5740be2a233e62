"""What is made of runs and data beside the training; nothing above needs these."""
