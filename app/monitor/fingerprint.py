"""Values that must be equal on all ranks, so that ranks that drift apart are caught."""

import math
from collections.abc import Sequence

import torch
from lightning import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from app.launch.agree import gather_objects
from app.system.patches import expects

# relative; ranks on unequal processors round differently
TOLERANCE = 1e-5
SAMPLE = 1024  # number of a weight's first elements in its checksum
RATES = "learning rates"
SCALE = "loss scale"


@expects("torch.amp:GradScaler._scale")
class Fingerprint:
    """Learning rates, loss scale, and a checksum of each weight, which DDP keeps equal.

    A weight's checksum is twice its norm, plus the product of its first elements with a fixed
    vector of norm 1.

    Buffers count only where DDP does not broadcast them, because a broadcast makes them equal at
    the next step.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        # a constant, because all ranks must reduce equally many values
        self._count = len(self._weights())
        vector = torch.randn(SAMPLE, generator=torch.Generator().manual_seed(0))
        self._vector = (vector / vector.norm()).to(trainer.strategy.root_device)

    def _rates(self) -> list[float | Tensor]:
        rates = []
        for optimizer in self._trainer.optimizers:
            for group in optimizer.param_groups:
                rates.append(group["lr"])
        return rates

    def _weights(self) -> dict[str, Tensor]:
        """Return the tensors that must be equal, by name."""
        trainer = self._trainer
        if not isinstance(trainer.strategy, DDPStrategy):  # others may shard the weights
            return {}
        module = trainer.lightning_module
        weights: dict[str, Tensor] = dict(module.named_parameters())
        model = trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            if not model.broadcast_buffers:
                weights |= dict(module.named_buffers())
            for name in model.parameters_to_ignore:
                weights.pop(name.removeprefix("module."), None)
        return {name: value for name, value in weights.items() if value.is_floating_point()}

    def values(self) -> Tensor:
        """Return this rank's values on the device, float64 (n,); n is the same on all ranks."""
        trainer = self._trainer
        rates: float | Tensor = 0.0
        for place, rate in enumerate(self._rates(), 1):
            rates = rates + math.sqrt(place) * rate
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = getattr(scaler, "_scale", None)
        values = [rates, 1.0 if scale is None else scale]
        for weight in list(self._weights().values())[: self._count]:
            flat = weight.detach().flatten().float()
            sample = flat[:SAMPLE]
            product = torch.dot(sample, self._vector[: len(sample)])
            values.append(2 * torch.linalg.vector_norm(flat) + product)
        values += [0.0] * (2 + self._count - len(values))
        device = trainer.strategy.root_device
        return torch.stack(
            [torch.as_tensor(value, dtype=torch.float64, device=device) for value in values]
        )

    def difference(self, values: Tensor) -> str:
        """Describe what differs first between the ranks, with the likely cause. Collective.

        Args:
            values: This rank's values, which differ between the ranks.
        """
        rates = ", ".join(f"{float(rate):g}" for rate in dict.fromkeys(self._rates()))
        ranks = gather_objects((values.tolist(), rates))
        names = [RATES, SCALE, *self._weights()]
        for place, name in enumerate(names[: len(values)]):
            column = [others[place] for others, _ in ranks]
            if alike([min(column)], [max(column)]):
                continue
            ends = [column.index(min(column)), column.index(max(column))]
            low = min(ends)
            high = max(ends)
            text = f"{name} differs between rank {low} and rank {high}"
            if name == RATES:
                text = f"{name} {ranks[low][1]} on rank {low}, {ranks[high][1]} on rank {high}"
            return f"{text}: {self._cause(name)}"
        raise AssertionError("the ranks' values are alike")

    def _cause(self, name: str) -> str:
        if name == RATES:
            for config in self._trainer.lr_scheduler_configs:
                if config.reduce_on_plateau:
                    scheduler = type(config.scheduler).__name__
                    return (
                        f"{scheduler} follows {config.monitor}, which is logged without "
                        "sync_dist=True"
                    )
            return "set the same rates on all ranks"
        if name in dict(self._trainer.lightning_module.named_buffers()):
            return (
                "each rank computes it from its own samples, without broadcast_buffers: leave "
                "broadcast_buffers on, or give --trainer.sync_batchnorm true"
            )
        return (
            "a hook changes or draws it on each rank for itself: do the same on all ranks, or "
            "broadcast it from rank zero"
        )


def alike(lowest: Sequence[float], highest: Sequence[float]) -> bool:
    """Return whether the ranks' lowest and highest values are alike; NaN is like anything."""
    for low, high in zip(lowest, highest, strict=True):
        if math.isnan(low) or math.isnan(high):
            continue
        if not math.isclose(low, high, rel_tol=TOLERANCE, abs_tol=1e-9):
            return False
    return True
