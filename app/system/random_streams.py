"""Random streams derived from a key, independent of the global random state."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng


def seed_of(*key: int) -> int:
    """Derive a seed below 2^63 from a key, such as (the run's seed, purpose, epoch, step)."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))


@contextmanager
def own_streams(device: torch.device | None = None) -> Iterator[Callable[[int], None]]:
    """Yield a function that seeds torch, NumPy and `random`; restore their states at the end.

    Args:
        device: Device whose random state is included; None for the host only.
    """
    gpu = None
    if device is not None and device.type != "cpu":
        gpu = torch.get_device_module(device)
        before = gpu.get_rng_state(device)

    def seed(number: int) -> None:
        torch.default_generator.manual_seed(number)
        np.random.seed(number % 2**32)
        random.seed(number)
        if gpu:
            gpu.manual_seed(number)

    with isolate_rng(include_cuda=False):
        yield seed
    if gpu:
        gpu.set_rng_state(before, device)
