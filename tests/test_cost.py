"""Cost of a step in counts equal on every machine: Python calls, operations, device reads.

`tests/benchmarks` measures times. Every count covers the second epoch, from its first step to its
last.
"""

import gc
import itertools
import json
import sys
from collections import Counter
from functools import wraps
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from forked import fork_fit
from harness import QUIET, RECIPE, SLOW, options
from torch.utils._python_dispatch import TorchDispatchMode

from app.data.batches import GlobalBatches
from app.launch import signals
from app.modules import CIFARCNN, ImageClassifier
from app.modules.networks import LeNet

# 1,800 training images: 113 steps and two logging windows per epoch
MLP = ["--model=FashionMLP", "--model.repeats=1", "--model.hidden=[4]", "--data=Synthetic"]
MLP += options(like="FashionMNIST", images=2000, batch_size=16)
LENET = ["--model=CIFARCNN", "--data=Synthetic", *options(images=1280, batch_size=16)]
AUGMENTED = options(crop_padding=4, flip=True, cutout=8, images=640)
TWO_EPOCHS = options(max_epochs=2, accelerator="cpu", test=False)
STEP = ImageClassifier.training_step.__code__


class Counting(TorchDispatchMode):
    """Counter of operations by name, without views and empty tensors, which launch no kernel."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and not func._schema.name.startswith("aten::empty"):
            self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def in_second_epoch(patch, begin):
    """Patch the training loader so that it calls a function right before the second epoch."""
    set_epoch = GlobalBatches.set_epoch

    def replacement(self, epoch):
        set_epoch(self, epoch)
        if epoch == 1 and self.shuffle:
            begin()

    patch.setattr(GlobalBatches, "set_epoch", replacement)


@pytest.fixture
def calls_per_step(fit, monkeypatch):
    """Return a function that counts the Python calls per step of a run's second epoch.

    `training_step` begins a step. `counts` says for a function's code whether its calls count,
    those of C functions included.
    """

    def count(*flags, counts=lambda code: True):
        calls = 0
        marks = []

        def profile(frame, event, arg):
            nonlocal calls
            if event in ("call", "c_call"):
                if event == "call" and frame.f_code is STEP:
                    marks.append(calls)
                calls += counts(frame.f_code)

        in_second_epoch(monkeypatch, lambda: sys.setprofile(profile))
        gc.disable()  # otherwise, calls of hypothesis's callback would be counted
        try:
            fit(*TWO_EPOCHS, *flags)
        finally:
            sys.setprofile(None)
            gc.enable()
        return [after - before for before, after in itertools.pairwise(marks)]

    return count


@pytest.fixture
def operations_per_step(fit, monkeypatch):
    """Return a function that counts the tensor operations per step of a run's second epoch."""
    training_step = ImageClassifier.training_step

    def count(*flags):
        mode = Counting()
        marks = []

        # keeps the module's name: Lightning copies the loss of a user's training step
        @wraps(training_step)
        def step(self, batch, batch_idx):
            marks.append(mode.counts.copy())
            return training_step(self, batch, batch_idx)

        def counting(read):
            def counted(self, *args, **kwargs):
                mode.counts["_local_scalar_dense"] += 1
                return read(self, *args, **kwargs)

            return counted

        with monkeypatch.context() as patch:  # undone at the end, so that a test can count twice
            # patched, because on a CPU they dispatch no operation
            for name in ("tolist", "cpu", "numpy"):
                patch.setattr(torch.Tensor, name, counting(getattr(torch.Tensor, name)))
            patch.setattr(ImageClassifier, "training_step", step)
            in_second_epoch(patch, lambda: (marks.clear(), mode.__enter__()))
            try:
                fit(*TWO_EPOCHS, *flags)
            finally:
                mode.__exit__(None, None, None)
        return [after - before for before, after in itertools.pairwise(marks)]

    return count


def raw_operations():
    """Count the operations of a hand-written LeNet step with uint8 images, mean loss and SGD."""
    images = torch.zeros(64, 3, 32, 32, dtype=torch.uint8)
    labels = torch.zeros(64, dtype=torch.long)
    order = torch.arange(64)
    mean = std = torch.full((3, 1, 1), 127.5)
    network = LeNet().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.001, momentum=0.9, fused=True)

    def step():
        share = order[:16]
        batch = (
            images[share].float().sub_(mean).div_(std).contiguous(memory_format=torch.channels_last)
        )
        loss = F.cross_entropy(network(batch), labels[share])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step()  # the first step creates the momentum
    with Counting() as mode:
        step()
    return mode.counts.total()


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Stop the progress bar's clock, because redraws would read logged values from the device."""
    monkeypatch.setattr("app.monitor.progress_bar.time", SimpleNamespace(perf_counter=lambda: 0.0))


# for comparison, calls per step: stock Trainer 3,750, or 4,169 with bar, CSV and checkpoints;
# hand-written loop 209
def test_python_calls(calls_per_step):
    """A step averages at most 600 Python calls. Callbacks that override nothing add none."""
    calls = calls_per_step(*MLP)
    assert mean(calls) <= 600
    idle = "--trainer.callbacks+=lightning.pytorch.Callback"
    assert calls_per_step(*MLP, idle, idle) == calls


def test_timing_a_rank_is_a_percent(calls_per_step):
    """The step clock takes at most 1 % of a step's Python calls, its epoch-end calls excepted."""

    def ours(code):
        is_clock = code.co_filename.endswith(("step_clock.py", "rank_times.py"))
        return is_clock and code.co_name.startswith("on_train_batch")

    assert 0 < mean(calls_per_step(*MLP, counts=ours)) <= 0.01 * 560


def check_reads(steps):
    """Check that only the last step of a logging window reads the device."""
    reading = [index for index, step in enumerate(steps) if step["_local_scalar_dense"]]
    assert reading == [100 - 72 - 1], "72 steps of the first epoch; a window is 50"


def test_operations(operations_per_step):
    """LeNet's step has at most 8 operations more than a hand-written one.

    Crop, flip and cutout add at most 14. Only the last step of a logging window reads the device.
    """
    steps = operations_per_step(*LENET)
    check_reads(steps)
    plain = median(step.total() for step in steps)
    assert plain - raw_operations() <= 8
    augmented = operations_per_step(*LENET, *AUGMENTED)
    assert median(step.total() for step in augmented) - plain <= 14


FLOAT16 = ["--trainer.plugins=user_code.Float16", *options(images=160, batch_size=2)]


@pytest.mark.parametrize(
    "flags", [options(strategy="dp", devices=2), FLOAT16], ids=["dp", "float16"]
)
def test_reads_of_the_device(flags, operations_per_step):
    check_reads(operations_per_step(*LENET, *flags))


class CountsReads(CIFARCNN):
    """Model that counts tensor reads and all-reduces in the second epoch.

    Each rank writes the reads before each step, and all all-reduces, into a file.
    """

    def on_train_epoch_start(self):
        signals.PERIOD = 1e9  # no step is slow
        self.reads, self.mode = [], Counting()
        if self.current_epoch == 1:
            self.mode.__enter__()

    def training_step(self, batch, batch_idx):
        self.reads.append(self.mode.counts["_local_scalar_dense"])
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        if self.current_epoch == 1:
            self.mode.__exit__(None, None, None)
            file = Path(self.trainer.log_dir, f"reads{self.global_rank}.json")
            file.write_text(json.dumps([*self.reads, self.mode.counts["c10d::allreduce_"]]))
        super().on_train_epoch_end()


@SLOW
def test_reads_of_the_device_by_two_processes(tmp_path):
    """Only a logging window's last step reads the device, although ranks must agree on stopping.

    They agree after each 16th step. DDP reduces the gradients of each of 72 steps.
    """
    ddp = ["--trainer.strategy=ddp", "--trainer.devices=2", "--model=test_cost.CountsReads", *QUIET]
    run = fork_fit(tmp_path, *LENET, *TWO_EPOCHS, *ddp)
    for rank in range(2):
        *reads, reductions = json.loads((run / f"reads{rank}.json").read_text())
        assert len(reads) == 72
        assert reads[27] == 0, "until the window ends with the hundredth step"
        assert reads[28] == reads[-1], "and after it"
        assert reductions <= 81


@SLOW
def test_a_recipe_adds_400_calls_at_most(calls_per_step, operations_per_step):
    plain = calls_per_step(*LENET, *AUGMENTED)
    rich = calls_per_step(*LENET, *AUGMENTED, *RECIPE)
    assert median(rich) - median(plain) <= 400
    steps = operations_per_step(*LENET, *AUGMENTED, *RECIPE)
    assert median(step["_local_scalar_dense"] for step in steps) == 0
