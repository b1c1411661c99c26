"""The generators of random numbers that a training loop draws from, as they stand at one point."""

import random

import numpy as np
import torch


class Generators:
    """The states, at the time this is made, of what transformers keeps in a checkpoint for this rank."""

    def __init__(self) -> None:
        self._python, self._numpy, self._torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
