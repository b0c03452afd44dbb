"""Settles `--data.micro_batch auto`: the largest part of a rank's batch that its memory takes."""

import math
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import distributed

from app.data.module import ImageData
from app.errors import UserError
from app.launch.agree import gather_objects, host_group
from app.launch.rendezvous import NodeRendezvous
from app.launch.spawn import SpawnLauncher
from app.runs import run_fit
from app.system.machine import GIB, free_memory

SPARE = 0.9  # share of the free memory, because other programs may take more
CAREFUL = 0.97  # of the way that is left, as it is not quite linear
TRIES = 5
LIMIT = 300.0  # seconds of a try
LONGEST = (TRIES + 2) * LIMIT  # seconds
BYTES = 9  # of a value of an image while it is prepared: as uint8, as float32, and as a copy of that


def room(device: torch.device, ranks: int, world_size: int, module: LightningModule) -> float:
    """Return the GiB that a rank may take without `--data.memory_limit`.

    Args:
        device: This rank's device.
        ranks: Ranks of this node; on the CPU they share its memory.
        world_size: Ranks of all nodes; DDP keeps a second copy of the gradients for more than one.
        module: The module that is trained.
    """
    free = SPARE * free_memory(device) / (1 if device.type == "cuda" else ranks)
    copies = sum(each.numel() * each.element_size() for each in module.parameters() if each.requires_grad)
    return (free - (copies if world_size > 1 else 0)) / GIB


def agree_micro_batch(
    config: str,
    trainer: Trainer,
    module: LightningModule,
    data: ImageData,
    rendezvous: NodeRendezvous | None,
    timeout: float,
) -> int:
    """Find on each node the size of a micro-batch that fits, and return the smallest. Collective.

    Args:
        config: Text of the run's config, with all settings.
        trainer: The trainer of this rank.
        module: The module to train.
        data: The data to train on.
        rendezvous: Rendezvous of nodes whose first processes start the others.
        timeout: Seconds to wait for another rank, in addition to the trial runs.

    Raises:
        UserError: On all ranks, when one of them finds no size.
    """
    device, group, found, wrong = trainer.strategy.root_device, None, None, None
    if isinstance(trainer.strategy.launcher, SpawnLauncher) and device.type == "cuda":
        raise UserError("--data.micro_batch auto would use a GPU before its processes start: take ddp, or give a count")
    if distributed.is_initialized():  # the others wait until it is found
        group = host_group(timedelta(seconds=timeout + LONGEST))
    ranks = max(trainer.world_size // trainer.num_nodes, 1)
    most = data.memory_limit or min(
        gather_objects(room(device, ranks, trainer.world_size, module))
    )  # before one takes its part
    if trainer.local_rank == 0:
        share = math.ceil(data.global_batch_size / trainer.world_size)
        try:
            found = settle_micro_batch(config, share, math.prod(data.image_shape), device, most)
        except UserError as error:
            wrong = str(error)
    mine = found, wrong
    answers = rendezvous.gather(mine, timeout + LONGEST) if rendezvous else gather_objects(mine, group)
    if wrong := next(filter(None, (wrong for _, wrong in answers)), None):
        raise UserError(wrong)
    return min(count for count, _ in answers if count is not None)


def settle_micro_batch(config: str, share: int, pixels: int, device: torch.device, most: float) -> int:
    """Find the largest micro-batch that fits into memory, from runs of two steps with several sizes.

    Memory grows linearly with the images, except for algorithms that libraries choose by size; so the result is always
    a size that was tried. Each trial takes two micro-batches, because the network never sees more at once.

    Args:
        config: Text of the run's config, with all settings.
        share: Images of a global batch that each rank takes.
        pixels: Values of an image.
        device: Device of this rank.
        most: GiB that a rank may use.

    Raises:
        UserError: When not even one image fits, or the run fails for another reason.
    """
    cuda = device.type == "cuda"
    tried: dict[int, float] = {}

    def takes(count: int) -> float:
        """Return the GiB of a trial; infinity if it runs out of memory."""
        batch = min(2 * count, share)
        flags = {
            "trainer.devices": f"[{device.index}]" if cuda else 1,
            "trainer.num_nodes": 1,
            "trainer.strategy": "auto",
            "trainer.max_epochs": -1,
            "trainer.max_steps": 2,
            "trainer.limit_val_batches": 0,
            "trainer.callbacks": "null",
            "trainer.enable_checkpointing": "false",
            "data.batch_size": batch,
            "data.micro_batch": count,
            "data.memory_limit": "null",
            "run.wandb": "false",
        }
        record = run_fit(["--config", str(file), *(f"--{flag}={value}" for flag, value in flags.items())], LIMIT)
        if record.status != "completed":
            if count > 1 and any(word in str(record.error) for word in ("out of memory", "exit code -9")):
                return math.inf
            raise UserError(f"--data.micro_batch auto: {record.error}, or give a count")
        used = max((row.reserved_gib if cuda else row.host_rss_gib) or 0.0 for row in record.peak_memory)
        tried[count] = used + (share - batch) * pixels * BYTES / GIB
        return tried[count]

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.yaml")
        file.write_text(config)
        found = largest(takes, share, most)
    if not found:
        raise UserError(
            f"--data.micro_batch auto: one image at a time takes {tried[1]:.2f} GiB of {most:.2f}: "
            "give more memory, or a smaller model"
        )
    rank_zero_info(f"micro-batch: {found:,} of {share:,} images, {tried[found]:.2f} GiB of {most:.2f}")
    return found


def largest(takes: Callable[[int], float], share: int, most: float) -> int:
    """Find the largest equal part of a share that fits; 0 if one image is too many.

    Args:
        takes: Measures the need of a part; about linear.
        share: The whole, which is divided into equal parts.
        most: The limit, in the same unit.
    """

    def part(count: int) -> int:
        """Return the size of equal parts that are no larger than a count."""
        return math.ceil(share / math.ceil(share / max(count, 1)))

    fits, beyond = part(share // 64), share + 1
    low = takes(fits)
    if low > most:
        if fits == 1 or (one := takes(1)) > most:
            return 0
        fits, low, beyond = 1, one, fits
    count = part(min(4 * fits, beyond - 1))
    for _ in range(TRIES):
        if count <= fits:
            break
        needed = takes(count)
        if math.isinf(needed):
            beyond, count = count, part((fits + count) // 2)
            continue
        room = fits + int(CAREFUL * (most - low) * (count - fits) / max(needed - low, 1e-9))
        if needed > most:
            beyond = count
        else:
            fits, low = count, needed
        count = part(min(room, beyond - 1, share))
    return fits
