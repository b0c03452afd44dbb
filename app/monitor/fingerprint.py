"""Values that must be equal on all ranks, so that ranks that drift apart are caught."""

from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from app.launch.agree import gather_objects
from app.system.patches import expects

TOLERANCE = 1e-6  # relative; ranks on unequal processors round differently


@expects("torch.amp:GradScaler._scale")
class Fingerprint:
    """Learning rates, loss scale, and the norm of the weights that DDP keeps equal.

    Buffers enter only where DDP does not broadcast them, because a broadcast makes them equal at
    the next step.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def _rates(self) -> list[Any]:
        rates = []
        for optimizer in self._trainer.optimizers:
            rates += [group["lr"] for group in optimizer.param_groups]
        return rates

    def _scale(self) -> list[Tensor]:
        scale = getattr(getattr(self._trainer.precision_plugin, "scaler", None), "_scale", None)
        return [] if scale is None else [scale]

    def _weights(self) -> dict[str, Tensor]:
        """Return the tensors that must be equal, by name."""
        module = self._trainer.lightning_module
        weights: dict[str, Tensor] = dict(module.named_parameters())
        model = self._trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            ignored = model.parameters_to_ignore
            for name, buffer in module.named_buffers():
                if name in ignored or not model.will_sync_module_buffers():
                    weights[name] = buffer
        return {name: value for name, value in weights.items() if value.is_floating_point()}

    def values(self) -> Tensor:
        """Return the rank's values on the device, float64 (n,)."""
        device = self._trainer.strategy.root_device
        norm = torch.nn.utils.get_total_norm([value.detach() for value in self._weights().values()])
        values = [*self._rates(), *self._scale(), norm]
        return torch.stack(
            [torch.as_tensor(value, dtype=torch.float64, device=device) for value in values]
        )

    def difference(self) -> str:
        """Describe what differs first between the ranks, with the likely cause. Collective."""
        mine: dict[str, list[float]] = {
            "learning rates": list(map(float, self._rates())),
            "loss scales": list(map(float, self._scale())),
        }
        for name, value in self._weights().items():
            mine[name] = [float(value.detach().double().norm())]
        ranks = gather_objects(mine)
        for name in mine:
            for rank, other in enumerate(ranks):
                if not _alike(other[name], ranks[0][name]):
                    text = f"{_text(ranks[0][name])} on rank 0, {_text(other[name])} on rank {rank}"
                    if name in ("learning rates", "loss scales"):
                        return f"{name} {text}: {self._cause(name)}"
                    return f"the norm of {name} is {text}: {self._cause(name)}"
        return "the weights differ between ranks"

    def _cause(self, name: str) -> str:
        if name == "learning rates":
            for config in self._trainer.lr_scheduler_configs:
                if config.reduce_on_plateau:
                    scheduler = type(config.scheduler).__name__
                    return (
                        f"{scheduler} follows {config.monitor}: log it with sync_dist=True, so "
                        "that all ranks see one value"
                    )
            return "set the same rates on all ranks"
        return (
            "a hook changes or draws it on each rank for itself: do the same on all ranks, or "
            "broadcast it from rank zero"
        )


def agree(lowest: Tensor, highest: Tensor) -> bool:
    """Return whether the ranks' lowest and highest values are alike."""
    return torch.allclose(lowest, highest, rtol=TOLERANCE, atol=0.0, equal_nan=True)


def _alike(values: list[float], others: list[float]) -> bool:
    return len(values) == len(others) and agree(torch.tensor(values), torch.tensor(others))


def _text(values: list[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in dict.fromkeys(values))
