"""Random streams derived from a key, independent of the global random state."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_of(*key: int) -> int:
    """Derive a seed below 2^63 from a key, such as (the run's seed, purpose, epoch, step)."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_host(number: int) -> None:
    """Seed the global random states of torch, NumPy and `random`."""
    torch.default_generator.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)


@contextmanager
def own_streams(device: torch.device | None = None) -> Iterator[Callable[[int], None]]:
    """Yield a function that seeds torch, NumPy and `random`; restore their states at the end.

    Args:
        device: Device whose random state is included; None for the host only.
    """
    gpu = None
    if device is not None and device.type != "cpu":
        gpu = torch.get_device_module(device)
        before_on_gpu = gpu.get_rng_state(device)
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()

    def seed(number: int) -> None:
        seed_host(number)
        if gpu:
            gpu.manual_seed(number)

    try:
        yield seed
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
        if gpu:
            gpu.set_rng_state(before_on_gpu, device)
