"""Fake `cuda:0` for a machine without a GPU.

It computes on FakeTensors, and counts operations that make the host wait.

Streams that race fail the test: see `fake_streams`.
"""

import traceback
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._dynamo  # FakeTensors need the real module; app.cli would defer its import
from fake_streams import Event, Future, Stream, Streams, is_on_cuda
from lightning.pytorch.trainer import call
from torch import Tensor, distributed
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves, tree_map_only

from app.command.checkpoint_file import CheckpointFiles
from app.data import batches
from app.data.module import ImageData
from app.modules.sums import log_window
from app.monitor import results, run_record
from app.monitor.step_clock import StepClock
from app.training import virtual_devices
from app.training.step import StraightLoop

PACKAGE = str(Path(batches.__file__).parents[1])
META = torch.device("meta")
CUDA = torch.device("cuda", 0)
aten = torch.ops.aten
SIZES = {  # fake output sizes of operations whose output size depends on values
    aten.bincount.default: lambda values, weights=None, minlength=0: [minlength],
    aten.nonzero.default: lambda values: [0, values.ndim],
}


class FakeCUDA:
    """Record of the operations that make the host wait for the device.

    Attributes:
        notes: Number of operations that make the host wait. Each key has three parts: the place in
            the training, `file:line`, and the kind of operation.
        counts: Number of steps in each place.
        streams: The streams.
        place: Current place: `step`, `window` (the last step of a logging window), `profiled` (a
            step that the step clock times), `between` (after a step), or `set-up`.
    """

    def __init__(self):
        self.notes = Counter()
        self.counts = Counter()
        self.place = "set-up"
        self.streams = Streams()

    def note(self, kind):
        """Count an operation that makes the host wait, under the line of code that started it."""
        self.streams.host.wait_stream(self.streams.current)
        line = [frame for frame in traceback.extract_stack() if PACKAGE in frame.filename][-1]
        self.notes[self.place, f"{Path(line.filename).name}:{line.lineno}", kind] += 1

    def at(self, place):
        """Return the counts of one place in the training, by line and kind."""
        return {
            (line, kind): count
            for (where, line, kind), count in sorted(self.notes.items())
            if where == place
        }


def fake_device(args):
    """Return the device that `prim::device` reports to autograd: `meta` for a fake GPU's tensor.

    On `meta`, the engine runs the backward pass in this thread, and needs no driver for contexts
    and streams. Python code does not see `meta`, because it reads `FakeTensor.device`.
    """
    (tensor,) = args
    return (
        META if tensor.fake_mode.in_kernel_invocation or is_on_cuda(tensor) else tensor.fake_device
    )


def known(tensor):
    """Return a tensor's real values, or None if unknown. Values created by the host are known."""
    return getattr(tensor, "value", tensor.constant) if isinstance(tensor, FakeTensor) else tensor


def answer(tensor):
    """Return the values that a read of a tensor yields: its real values, if they are known.

    Unknown values read as True for booleans, 0 for other tensors on the device, and 1 for other
    tensors on the host.
    """
    with unset_fake_temporarily():
        value = known(tensor)
        if value is not None:
            return value
        is_one = tensor.dtype is torch.bool or not is_on_cuda(tensor)
        return torch.full(tensor.shape, is_one, dtype=tensor.dtype)


def dispatching(plain, fake, of_mode):
    """Wrap FakeTensor's dispatch: count operations that make the host wait; reads return `answer`.

    Args:
        plain: The original dispatch.
        fake: Record of the counts.
        of_mode: Whether this is the dispatch of FakeTensorMode, and not of FakeTensor.
    """

    def dispatch(self, func, types, args=(), kwargs=None):
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
                fake.streams.use(fake.streams.current, args, ())
                fake.note("read")
            return answer(args[0]).item()
        if func in SIZES:
            fake.note("read")
            size = SIZES[func](args[0], *args[1:], **kwargs)
            func = aten.new_zeros.default
            args = (args[0], size)
            kwargs = {"dtype": torch.int64}
        if func is aten._pin_memory.default:
            func = aten.clone.default
            pins = True
        blocks = False
        source = None
        target = None
        if func is aten.copy_.default:
            source = args[1]
            target = args[0].device.type
        elif func is aten._to_copy.default:
            source = args[0]
            target = torch.device(kwargs.get("device") or source.device).type
        if isinstance(source, Tensor) and source.numel():
            at_once = not (kwargs.get("non_blocking") or args[2:])
            if is_on_cuda(source) and target == "cpu":
                if at_once or not getattr(args[0], "pinned", False):
                    fake.note("copy to the host")
            elif (
                not is_on_cuda(source)
                and target == "cuda"
                and (at_once or not getattr(source, "pinned", False))
            ):
                fake.note("blocking copy to the device" if at_once else "copy of pageable memory")
                blocks = at_once
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
        if not func.is_view:
            names = [argument.name for argument in func._schema.arguments]
            values = dict(zip(names, args, strict=False)) | kwargs
            changed = [
                values.get(a.name)
                for a in func._schema.arguments
                if a.alias_info and a.alias_info.is_write
            ]
            runs_on_cuda = on_cuda or any(map(is_on_cuda, tree_leaves(result)))
            fake.streams.use(
                fake.streams.current if runs_on_cuda else fake.streams.host,
                read=values,
                written=(changed, result),
            )
        if blocks:
            fake.streams.host.wait_stream(fake.streams.current)
        return result

    return dispatch if of_mode else classmethod(dispatch)


def outside(function):
    """Wrap a function so that it runs on real tensors."""

    def called(*args, **kwargs):
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return called


def convert(module, function, recurse=True):
    """Replacement for `Module._apply`, because the original fails to swap fake parameters."""
    for child in module.children():
        child._apply(function)
    for kept in (module._parameters, module._buffers):
        for name, value in kept.items():
            if value is not None:
                moved = function(value.detach())
                kept[name] = (
                    Parameter(moved, value.requires_grad) if isinstance(value, Parameter) else moved
                )
    return module


@pytest.fixture
def fake_cuda(monkeypatch):
    """Make a fake `cuda:0` available to the Trainer. Images and checkpoint files are real."""
    if not torch.backends.cuda.is_built():
        pytest.skip("needs torch's CUDA build, such as the default wheel for Linux")
    fake = FakeCUDA()
    patch = monkeypatch.setattr
    # if there is no GPU, install a device guard that does nothing
    torch._C._ensureCUDADeviceGuardSet()
    library = torch.library.Library("aten", "IMPL", "Meta")
    library.impl("_fused_sgd_", lambda *_, **__: None)
    monkeypatch.setitem(
        fake_tensor._DISPATCH_META_HANDLERS, torch.ops.prim.device.default, fake_device
    )
    patch(FakeTensorMode, "avoid_device_init", True)
    patch(fake_tensor, "init_gpu_context", lambda device: None)
    patch(
        FakeTensorMode,
        "__torch_dispatch__",
        dispatching(FakeTensorMode.__torch_dispatch__, fake, True),
    )
    patch(
        FakeTensor,
        "__torch_dispatch__",
        dispatching(FakeTensor.__torch_dispatch__.__func__, fake, False),
    )
    patch(Tensor, "__deepcopy__", lambda tensor, memo: tensor.detach().clone())
    patch(
        Parameter,
        "__deepcopy__",
        lambda tensor, memo: Parameter(tensor.detach().clone(), tensor.requires_grad),
    )

    plain_list = outside(Tensor.tolist)

    def tolist(tensor):
        if is_on_cuda(tensor):
            fake.streams.use(fake.streams.current, tensor, ())
            fake.note("read")
        return plain_list(answer(tensor))

    def numpy(tensor):
        if is_on_cuda(tensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return outside(Tensor.numpy)(answer(tensor))

    patch(FakeTensor, "tolist", tolist)
    patch(Tensor, "tolist", tolist)
    patch(FakeTensor, "numpy", numpy, raising=False)
    patch(torch.nn.Module, "_apply", convert)
    patch(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    constants = {
        "is_available": True, "device_count": 1, "is_bf16_supported": True,
        "get_device_capability": (9, 0),
        "get_device_name": "a fake GPU", "mem_get_info": (2**37, 2**37), "max_memory_allocated": 0,
        "max_memory_reserved": 0, "memory_reserved": 0, "reset_peak_memory_stats": None,
        "empty_cache": None,
        "set_device": None, "is_current_stream_capturing": False,
        "manual_seed": None, "manual_seed_all": None,
        "get_rng_state": torch.get_rng_state(), "set_rng_state": None, "get_rng_state_all": [],
        "set_rng_state_all": None,
    }  # fmt: skip
    for name, value in constants.items():
        patch(torch.cuda, name, lambda *_, value=value, **__: value)
    patch(torch.accelerator, "synchronize", lambda *_: fake.note("synchronize"))
    patch(torch.cuda, "Event", partial(Event, fake.streams))
    patch(torch.cuda, "Stream", Stream)
    patch(torch.cuda, "current_stream", lambda *_: fake.streams.current)
    patch(torch.cuda, "stream", fake.streams.using)
    patch(Tensor, "record_stream", lambda *arguments: fake.streams.record(*arguments))
    for module in (torch.futures, virtual_devices):
        patch(module, "Future", partial(Future, fake.streams))
    patch(distributed, "batch_isend_irecv", fake.streams.exchange)

    train = call._call_and_handle_interrupt
    take_step = StraightLoop.advance

    def on_fakes(*args, **kwargs):
        with FakeTensorMode(allow_non_fake_inputs=True):
            return train(*args, **kwargs)

    def noting(loop, fetcher):
        trainer = loop.trainer
        clock = next(callback for callback in trainer.callbacks if isinstance(callback, StepClock))
        ends = (trainer.global_step + 1) % log_window(trainer) == 0
        fake.place = "step"
        if clock._seen <= clock.skipped + clock.window:
            fake.place = "profiled"
        elif ends:
            fake.place = "window"
        fake.counts[fake.place] += 1
        take_step(loop, fetcher)
        fake.place = "between"

    patch(call, "_call_and_handle_interrupt", on_fakes)
    patch(StraightLoop, "advance", noting)
    patch(StepClock, "skipped", 1)
    patch(StepClock, "window", 2)
    patch(ImageData, "_load", outside(ImageData._load))
    patch(ImageData, "_load_training", outside(ImageData._load_training))
    save = outside(CheckpointFiles.save_checkpoint)

    def save_checkpoint(files, checkpoint, *args, **options):
        for tensor in tree_leaves(checkpoint):
            is_here = not is_on_cuda(tensor)
            fake.streams.use(fake.streams.host if is_here else fake.streams.current, tensor, ())
        save(files, tree_map_only(FakeTensor, answer, checkpoint), *args, **options)

    patch(CheckpointFiles, "save_checkpoint", save_checkpoint)
    patch(CheckpointFiles, "load_checkpoint", outside(CheckpointFiles.load_checkpoint))
    for module in (run_record, results):
        patch(module, "draw_images", lambda rows: b"")
    patch(
        batches, "one_ahead", iter
    )  # prepare batches in this thread, because another one has no FakeTensorMode
    yield fake
    library._destroy()
