"""The peers that raydl is compared with: plain PyTorch, DistributedDataParallel and Ray Train.

All three run the loop of ``loop.py`` and differ only in how gradients are summed.
"""
