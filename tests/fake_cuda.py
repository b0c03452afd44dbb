"""Fake `cuda:0` for a machine without a GPU. It computes on FakeTensors, and counts what makes the host wait."""

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # FakeTensors need the real module; app.cli would defer its import
from lightning.pytorch.trainer import call
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves, tree_map_only

from app.data import batches
from app.data.module import ImageData
from app.fit.checkpoint_file import CheckpointFiles
from app.loop.straight_step import Step
from app.monitor.step_clock import StepClock
from app.training_sums import log_window

META, CUDA = torch.device("meta"), torch.device("cuda", 0)
aten = torch.ops.aten
SIZES: dict[Any, Callable[..., list[int]]] = {  # fake output sizes of operations whose output size depends on values
    aten.bincount.default: lambda values, weights=None, minlength=0: [minlength],
    aten.nonzero.default: lambda values: [0, values.ndim],
}


class FakeCUDA:
    """Record of the operations that make the host wait for the device.

    Attributes:
        notes: Number of operations that make the host wait. Each key has three parts: the place in the training,
            `file:line`, and the kind of operation.
        counts: Number of steps in each place.
        place: Current place: `step`, `window` (the last step of a logging window), `profiled` (a step that the step
            clock times), `between` (after a step), or `set-up`.
    """

    def __init__(self) -> None:
        self.notes: Counter[tuple[str, str, str]] = Counter()
        self.counts: Counter[str] = Counter()
        self.place = "set-up"

    def note(self, kind: str) -> None:
        """Count an operation that makes the host wait, under the line of code that started it."""
        frames = [f for f in traceback.extract_stack() if "/app/" in f.filename or "/lightning/" in f.filename]
        relevant = [f for f in frames if "site-packages" not in f.filename] or frames
        self.notes[self.place, f"{Path(relevant[-1].filename).name}:{relevant[-1].lineno}", kind] += 1

    def at(self, place: str) -> dict[tuple[str, str], int]:
        """Return the counts of one place in the training, by line and kind."""
        return {(line, kind): count for (where, line, kind), count in sorted(self.notes.items()) if where == place}


def is_on_cuda(value: Any) -> bool:
    return isinstance(value, FakeTensor) and value.fake_device.type == "cuda"


class Event:
    def __init__(self, **_: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def elapsed_time(self, _: "Event") -> float:
        return 1.0


def fake_device(args: Any) -> torch.device:
    """Return the device that `prim::device` reports to autograd's engine: `meta` for a tensor on the fake GPU.

    On `meta`, the engine runs the backward pass in this thread, and needs no driver for contexts and streams. Python
    code does not see `meta`, because it reads `FakeTensor.device`.
    """
    (tensor,) = args
    return META if tensor.fake_mode.in_kernel_invocation or is_on_cuda(tensor) else tensor.fake_device


def known(tensor: Tensor) -> Tensor | None:
    """Return a tensor's real values, or None if they are unknown. Values that the host created are known."""
    return getattr(tensor, "value", tensor.constant) if isinstance(tensor, FakeTensor) else tensor


def answer(tensor: Tensor) -> Tensor:
    """Return the values that a read of a tensor yields: its real values, if they are known.

    Unknown values read as True for booleans, 0 for other tensors on the device, and 1 for other tensors on the host.
    """
    with unset_fake_temporarily():
        made = torch.full(tensor.shape, tensor.dtype is torch.bool or not is_on_cuda(tensor), dtype=tensor.dtype)
        return made if (value := known(tensor)) is None else value


def dispatching(plain: Callable[..., Any], fake: FakeCUDA, of_mode: bool) -> Callable[..., Any]:
    """Wrap FakeTensor's dispatch: count operations that make the host wait, and let reads return `answer`.

    Args:
        plain: The original dispatch.
        fake: Record of the counts.
        of_mode: Whether this is the dispatch of FakeTensorMode, and not of FakeTensor.
    """

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.prim.device.default:
            return fake_device(args)
        if kwargs.get("device") == META:  # the backward pass asks for `meta`; see `fake_device`
            kwargs["device"] = CUDA
        if not of_mode:
            return plain(self, func, types, args, kwargs)
        if func._schema.name == "aten::to":  # only inference mode dispatches it as one operation
            with self:
                return func.decompose(*args, **kwargs)
        pins = kwargs.pop("pin_memory", False)
        on_cuda = any(map(is_on_cuda, tree_leaves(args)))
        if func in (aten._local_scalar_dense.default, aten.equal.default):
            if on_cuda:
                fake.note("read")
            return answer(args[0]).item()
        if func in SIZES:
            fake.note("read")
            size = SIZES[func](args[0], *args[1:], **kwargs)
            func, args, kwargs = aten.new_zeros.default, (args[0], size), {"dtype": torch.int64}
        if func is aten._pin_memory.default:
            func, pins = aten.clone.default, True
        source = args[1] if func is aten.copy_.default else args[0] if func is aten._to_copy.default else None
        if isinstance(source, Tensor) and source.numel():
            target = (
                args[0].device.type if func is aten.copy_.default else torch.device(kwargs.get("device") or "cpu").type
            )
            waits = not (kwargs.get("non_blocking") or args[2:])
            if is_on_cuda(source) and target == "cpu" and (func is aten.copy_.default or kwargs.get("device")):
                fake.note("copy to the host")
            elif not is_on_cuda(source) and target == "cuda" and (waits or not getattr(source, "pinned", False)):
                fake.note("blocking copy to the device" if waits else "copy of pageable memory")
        value = known(args[0]) if func in (aten._to_copy.default, aten.lift_fresh.default) else None
        if isinstance(source, FakeTensor):
            source.constant = None  # because torch would copy the constant to a real device
        result = plain(self, func, types, args, kwargs)
        if value is not None:
            result.value = value
        for leaf in tree_leaves(args) if func._schema.is_mutable else ():
            if isinstance(leaf, FakeTensor):
                vars(leaf).pop("value", None)
        if pins or (func.is_view and getattr(args[0], "pinned", False)):
            for leaf in tree_leaves(result):
                leaf.pinned = True
        return result

    return dispatch if of_mode else classmethod(dispatch)  # type: ignore[return-value]


def outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it runs on real tensors."""

    def called(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return called


def convert(module: torch.nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> torch.nn.Module:
    """Replacement for `Module._apply`, because the original fails to swap fake parameters."""
    for child in module.children():
        child._apply(function)
    for kept in (module._parameters, module._buffers):
        for name, value in kept.items():
            if value is not None:
                moved = function(value.detach())
                kept[name] = Parameter(moved, value.requires_grad) if isinstance(value, Parameter) else moved
    return module


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCUDA]:
    """Make a fake `cuda:0` available to the Trainer. Images and checkpoint files are real."""
    if not torch.backends.cuda.is_built():
        pytest.skip("needs torch's CUDA build, such as the default wheel for Linux")
    fake, patch = FakeCUDA(), monkeypatch.setattr
    torch._C._ensureCUDADeviceGuardSet()  # if there is no GPU, install a device guard that does nothing
    library = torch.library.Library("aten", "IMPL", "Meta")
    library.impl("_fused_sgd_", lambda *_, **__: None)
    monkeypatch.setitem(fake_tensor._DISPATCH_META_HANDLERS, torch.ops.prim.device.default, fake_device)
    patch(FakeTensorMode, "avoid_device_init", True)
    patch(fake_tensor, "init_gpu_context", lambda device: None)
    patch(FakeTensorMode, "__torch_dispatch__", dispatching(FakeTensorMode.__torch_dispatch__, fake, True))
    patch(FakeTensor, "__torch_dispatch__", dispatching(FakeTensor.__torch_dispatch__.__func__, fake, False))
    patch(Tensor, "__deepcopy__", lambda tensor, memo: tensor.detach().clone())
    patch(Parameter, "__deepcopy__", lambda tensor, memo: Parameter(tensor.detach().clone(), tensor.requires_grad))

    plain_list = outside(Tensor.tolist)

    def tolist(tensor: Tensor) -> Any:
        if is_on_cuda(tensor):
            fake.note("read")
        return plain_list(answer(tensor))

    def numpy(tensor: FakeTensor) -> Any:
        if is_on_cuda(tensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return outside(Tensor.numpy)(answer(tensor))

    patch(FakeTensor, "tolist", tolist)
    patch(Tensor, "tolist", tolist)
    patch(FakeTensor, "numpy", numpy, raising=False)
    patch(torch.nn.Module, "_apply", convert)
    patch(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    constants = {
        "is_available": True, "device_count": 1, "is_bf16_supported": True, "get_device_capability": (9, 0),
        "get_device_name": "a fake GPU", "mem_get_info": (2**37, 2**37), "max_memory_allocated": 0,
        "max_memory_reserved": 0, "memory_reserved": 0, "reset_peak_memory_stats": None, "empty_cache": None,
        "set_device": None, "is_current_stream_capturing": False, "manual_seed": None, "manual_seed_all": None,
        "get_rng_state": torch.get_rng_state(), "set_rng_state": None, "get_rng_state_all": [],
        "set_rng_state_all": None,
    }  # fmt: skip
    for name, value in constants.items():
        patch(torch.cuda, name, lambda *_, value=value, **__: value)
    patch(torch.cuda, "synchronize", lambda *_: fake.note("synchronize"))
    patch(torch.cuda, "Event", Event)

    train, take_step = call._call_and_handle_interrupt, Step.__call__

    def on_fakes(*args: Any, **kwargs: Any) -> Any:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return train(*args, **kwargs)

    def noting(step: Step, fetcher: Any) -> None:
        clock = next(callback for callback in step.callbacks if isinstance(callback, StepClock))
        ends = (step.trainer.global_step + 1) % log_window(step.trainer) == 0
        fake.place = "profiled" if clock.timing else "window" if ends else "step"
        fake.counts[fake.place] += 1
        take_step(step, fetcher)
        fake.place = "between"

    patch(call, "_call_and_handle_interrupt", on_fakes)
    patch(Step, "__call__", noting)
    patch(StepClock, "skipped", 1)
    patch(StepClock, "window", 2)
    patch(ImageData, "_load", outside(ImageData._load))
    patch(ImageData, "_load_training", outside(ImageData._load_training))
    save = outside(CheckpointFiles.save_checkpoint)

    def save_checkpoint(files: CheckpointFiles, checkpoint: Any, *args: Any, **options: Any) -> None:
        save(files, tree_map_only(FakeTensor, answer, checkpoint), *args, **options)

    patch(CheckpointFiles, "save_checkpoint", save_checkpoint)
    patch(CheckpointFiles, "load_checkpoint", outside(CheckpointFiles.load_checkpoint))
    patch(batches, "one_ahead", iter)  # prepare batches in this thread, because another one has no FakeTensorMode
    yield fake
    library._destroy()
