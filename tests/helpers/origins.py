"""A model that stores the id of the process in which it first trained.

Its steps sleep, so that a run lasts long enough and leaves the cores to others.
"""

import os
import time

import torch

STEP_S = 0.01


class Origin(torch.nn.Module):
    """A perceptron with a buffer for a process id."""

    def __init__(self, num_pixels, num_classes):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(num_pixels, 64), torch.nn.ReLU(), torch.nn.Linear(64, num_classes)
        )
        self.register_buffer("process", torch.zeros((), dtype=torch.int64))

    def forward(self, images):
        if self.training:
            time.sleep(STEP_S)
            if not self.process:
                self.process.fill_(os.getpid())
        return self.layers(images.flatten(1))


def model(image_shape, num_classes):
    return Origin(image_shape[0] * image_shape[1] * image_shape[2], num_classes)
