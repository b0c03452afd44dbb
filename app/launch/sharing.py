"""Objects that ranks exchange."""

from typing import Any

import torch


def gather_objects(mine: Any) -> list[Any]:
    """One picklable object of each rank, in order of rank, on every rank. Collective."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return [mine]
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    return everyone
