"""What raydl is compared with: plain PyTorch, DistributedDataParallel, Ray Train.

All three run the loop of ``loop.py``; what they differ in is who sums the gradients, and how.
"""
