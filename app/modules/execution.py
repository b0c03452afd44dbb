"""Execution of a network: memory layout, matmul precision, compilation, fused updates.

These settings change results only by rounding.
"""

import inspect
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from app.errors import UserError

Compile = Literal["off", "default", "reduce-overhead"]
MatmulPrecision = Literal["highest", "high", "medium"]

# optimizer settings that select an implementation; a resumed run ignores the checkpoint's values
IMPLEMENTATION = {"fused", "foreach", "capturable"}

# convolutions with fewer channels, such as LeNet's, gain nothing from channels_last on a GPU
TENSOR_CORE_CHANNELS = 32


class Execution:
    """Execution settings of a model.

    Args:
        channels_last: Store images and convolution weights as (N, H, W, C). `auto` does so on a CPU
            if the network has convolutions, and on a GPU in 16 bits if a convolution has 32
            channels or more.
        compile: Mode of `torch.compile`, or `off`.
        matmul_precision: Precision of float32 matrix products and convolutions on a GPU: `highest`
            is float32, `high` is TF32, `medium` is bfloat16 or TF32.
    """

    def __init__(
        self,
        channels_last: bool | Literal["auto"],
        compile: Compile | bool,
        matmul_precision: MatmulPrecision,
    ) -> None:
        self.channels_last = channels_last
        if isinstance(compile, bool):  # YAML reads an unquoted `off` as false
            compile = "default" if compile else "off"
        self.compile = compile
        self.matmul_precision = matmul_precision
        self._is_prepared = False

    def prepare(self, network: nn.Module, device: torch.device, precision: str) -> dict[str, Any]:
        """Prepare a network, on any device, to compute on a device. Safe to call once per stage.

        Args:
            network: The network.
            device: Device of the computation.
            precision: The Trainer's precision, such as `bf16-mixed`.

        Returns:
            The settings for the run record; null for a setting without effect on the device.

        Raises:
            UserError: When `matmul_precision` is not `highest` and the GPU has no TF32.
        """
        cuda = device.type == "cuda"
        channels_last = self.channels_last
        if channels_last == "auto":
            kernels = [weight for weight in network.parameters() if weight.ndim == 4]
            channels = [min(kernel.shape[:2]) for kernel in kernels]
            wide = cuda and "16" in precision and max(channels, default=0) >= TENSOR_CORE_CHANNELS
            channels_last = wide or (device.type == "cpu" and bool(channels))
        if channels_last and not self._is_prepared:
            network.to(memory_format=torch.channels_last)
            network.register_forward_pre_hook(_to_channels_last)
        if cuda:
            is_rounded = self.matmul_precision != "highest"
            if is_rounded and torch.cuda.get_device_capability(device) < (8, 0):
                name = torch.cuda.get_device_name(device)
                raise UserError(
                    f"--model.matmul_precision {self.matmul_precision}: {name} has no TF32: leave "
                    "it out"
                )
            torch.set_float32_matmul_precision(self.matmul_precision)
            torch.backends.cudnn.allow_tf32 = is_rounded  # torch's own default is true
        if self.compile != "off" and not self._is_prepared:
            network.compile(mode=self.compile)
        self._is_prepared = True
        executed: dict[str, Any] = {
            "channels_last": channels_last,
            "compile": self.compile,
            "matmul_precision": None,
            "benchmark": None,
        }
        if cuda:
            executed["matmul_precision"] = self.matmul_precision
            executed["benchmark"] = torch.backends.cudnn.benchmark
        return executed


def _to_channels_last(network: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    images, *others = args
    if isinstance(images, Tensor) and images.ndim == 4:
        images = images.contiguous(memory_format=torch.channels_last)
    return images, *others


def fastest(optimizer: Optimizer, clips: bool) -> Optimizer:
    """Return the optimizer with its fastest update: fused for SGD, Adam and AdamW.

    Keep an implementation that the user chose. Lightning refuses a fused update if gradients are
    clipped under mixed precision. With any other update, float16's loss scaler synchronizes with
    the device once per step.

    Args:
        optimizer: An optimizer that has not stepped.
        clips: Whether gradients are clipped under mixed precision.
    """
    cls = type(optimizer)
    groups = [dict(group) for group in optimizer.param_groups]
    chosen = False
    for group in groups:
        for name in (*IMPLEMENTATION, "differentiable"):
            chosen = chosen or bool(group.get(name)) or group.get("fused") is False
            group.pop(name, None)
    # Adagrad is excluded, because its fused update is for CPUs only
    if cls in (SGD, Adam, AdamW) and not (chosen or clips):
        options = inspect.signature(cls).parameters
        defaults = {name: value for name, value in optimizer.defaults.items() if name in options}
        optimizer = cls(groups, **{**defaults, "foreach": None, "fused": True})
    optimizer.register_load_state_dict_pre_hook(_implemented_as_here)
    optimizer.register_load_state_dict_post_hook(_laid_out_as_here)
    return optimizer


def _implemented_as_here(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Replace a checkpoint's `fused`, `foreach` and `capturable` by this optimizer's values."""
    groups = [dict(group) for group in saved["param_groups"]]
    # torch raises a clear error if the numbers of groups differ
    for group, own in zip(groups, optimizer.param_groups, strict=False):
        for name in IMPLEMENTATION & own.keys():
            group[name] = own[name]
    return {**saved, "param_groups": groups}


def _laid_out_as_here(optimizer: Optimizer) -> None:
    """Copy optimizer states into the weights' memory layout, as a fused update requires."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if not isinstance(value, Tensor) or value.shape != parameter.shape:
                continue
            if value.stride() != parameter.stride():
                place = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                state[name] = place.copy_(value)
