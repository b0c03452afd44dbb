"""Training steps as CUDA graphs. On the CPU, tapes that record and replay a step's operations stand in for graphs."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graph_tape import Graph, tapes
from harness import App, difference, error_of, losses, on_gpu, options, output_of, record_of, tiny
from lightning.pytorch import Trainer

from app.data import Synthetic
from app.errors import UserError
from app.fit import rules
from app.loop import graph_step
from app.modules import CIFARCNN
from app.monitor.step_clock import StepClock
from app.system.lightning_patches import signal_connector

__all__ = ["tapes"]

# 203 images, 20 of them for validation: an epoch has 9 full batches of 20 images, and a last one of 3
SMALL = tiny(203, 20, flip=True, crop_padding=2)
STEPS = options(max_epochs=3, log_every_n_steps=1, test=False, placement="device")
EVERY = ["--last_checkpoint.save_top_k", "-1", "--last_checkpoint.filename", "{step}"]
EVERY += ["--last_checkpoint.every_n_train_steps", "7"]
GRAPH = ["--model.cuda_graph", "true"]
FUSED = ["--model.optimizer.fused", "true"]
# float32 represents this learning rate, a power of two, exactly
SGD = ["--model.optimizer", "SGD", "--model.optimizer.lr", "0.0078125", "--model.optimizer.momentum", "0.9", *FUSED]
ADAMW = ["--model.optimizer", "AdamW", "--model.optimizer.lr", "0.0078125", *FUSED]
HALVED = ["--model.scheduler", "ExponentialLR", "--model.scheduler.gamma", "0.5"]

ONE_CYCLE = ["--model.scheduler", "OneCycleLR", "--model.scheduler.max_lr", "0.1"]
ONE_CYCLE += ["--model.scheduler.total_steps", "40", "--model.scheduler_interval", "step"]


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow graphs on the CPU, and allow graphs of several steps from the first step on."""
    monkeypatch.setattr(rules, "needs_cuda", lambda resolved: ())
    for name in ("skipped", "window"):
        monkeypatch.setattr(StepClock, name, 0)


# with these flags, a four-step graph is replayed four times, and a one-step graph eight times: 24 steps
BLOCKS = [*options(log_every_n_steps=4), "--last_checkpoint.every_n_train_steps", "8"]

RUNS = {
    "sgd": SGD,
    "adamw_halved": [*ADAMW, *HALVED],
    "halved_at_each_step": [*SGD, *HALVED, "--model.scheduler_interval", "step"],
    "clipped": [*SGD, "--trainer.gradient_clip_val", "0.5"],
    "averaged": [*SGD, "--model.ema", "0.9"],
    "bf16": [*SGD, "--trainer.precision", "bf16-mixed"],
    "from_host_memory": [*SGD, "--data.placement", "memory"],
    "mixed": [*SGD, "--data.mixup", "0.5", "--data.cutmix", "1.0"],
    "blocks": [*SGD, *BLOCKS, "--model.schedule", "cosine"],
    "blocks_clipped": [*ADAMW, *BLOCKS, *HALVED, "--trainer.gradient_clip_val", "0.5"],
}


@pytest.mark.parametrize("flags", RUNS.values(), ids=RUNS)
def test_a_graph_computes_the_same(flags: list[str], tapes: list[Graph], app: App, tmp_path: Path) -> None:
    """A run with graphs has the losses, weights and epoch results of a run without graphs, bit for bit.

    The first three steps and each epoch's smaller last batch run without a graph; the other steps are replayed.
    """
    for name, more in (("plain", []), ("graph", GRAPH)):
        output_of(*app("fit", *SMALL, *STEPS, *EVERY, *flags, *more, "--run.name", name))
    plain, graph = (tmp_path / "runs" / name / "version_0" for name in ("plain", "graph"))
    replays = [8, 8, 4, 4] if "8" in flags else [24] * (1 if "--data.mixup" in flags else 2)
    assert [tape.replays for tape in tapes] == replays
    np.testing.assert_array_equal(losses(graph), losses(plain))
    files = [sorted((run / "checkpoints").glob("step=*.ckpt")) for run in (plain, graph)]
    assert [path.name for path in files[0]] == [path.name for path in files[1]]
    for pair in zip(*files, strict=True):
        assert difference(*pair) == 0
    rows = [record_of(run)["epochs"] for run in (plain, graph)]
    for row in (*rows[0], *rows[1]):
        del row["seconds"], row["samples_per_s"]
    assert rows[0] == rows[1]
    assert record_of(graph)["cuda_graph"] is True


def test_a_graph_goes_on_from_a_step_without_one(tapes: list[Graph], app: App, tmp_path: Path) -> None:
    """A run that resumes at an epoch's smaller last batch captures graphs after it. They do not change the weights."""
    flags = ["fit", *SMALL, *STEPS, *EVERY, "--last_checkpoint.every_n_train_steps", "9", *SGD]
    output_of(*app(*flags, "--run.name", "plain"))
    saved = tmp_path / "runs" / "plain" / "version_0" / "checkpoints"
    output_of(*app(*flags, *GRAPH, "--run.name", "graph", "--ckpt_path", saved / "step=9.ckpt"))
    resumed = tmp_path / "runs" / "graph" / "version_0" / "checkpoints"
    assert [tape.replays for tape in tapes] == [15, 15]
    assert difference(saved / "step=27.ckpt", resumed / "step=27.ckpt") == 0


def test_a_stop_waits_for_the_end_of_a_block(
    tapes: list[Graph], app: App, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A signal in the second step of a four-step graph stops training after the fourth.

    The weights are then those of a run without graphs.
    """
    flags, train = ["fit", *SMALL, *STEPS, *EVERY, *SGD, *BLOCKS], graph_step.Graphs.train
    output_of(*app(*flags, "--run.name", "plain"))

    def signalled(graphs: graph_step.Graphs) -> torch.Tensor:
        if graphs._step.trainer.global_step == 21:
            signal_connector(graphs._step.trainer).noted = signal.SIGINT
        return train(graphs)

    monkeypatch.setattr(graph_step.Graphs, "train", signalled)
    code, out = app(*flags, *GRAPH, "--run.name", "graph")
    assert code == 130, out
    saved, stopped = (tmp_path / "runs" / name / "version_0" / "checkpoints" for name in ("plain", "graph"))
    assert max(stopped.glob("step=*.ckpt"), key=lambda path: int(path.stem[5:])).stem == "step=24"
    assert difference(saved / "step=24.ckpt", stopped / "step=24.ckpt") == 0


AVERAGING = ["--trainer.callbacks+=StochasticWeightAveraging", "--trainer.callbacks.swa_lrs", "0.1"]
REFUSED = [
    (["--model.optimizer", "LBFGS"], ": LBFGS cannot be captured: use SGD, Adam or AdamW"),
    (["--model.optimizer.fused", "false"], " captures only SGD's fused update: leave foreach and fused out"),
    (AVERAGING, " does not work with StochasticWeightAveraging: leave one of them out"),
    (["--trainer.profiler", "simple"], " does not work with a profiler: leave one of them out"),
    (["--run.loop", "lightning"], " with --run.loop lightning: only the straight loop has graphs: leave one of them"),
    ([*SGD, *ONE_CYCLE], ": the scheduler changes more than the learning rate, such as the momentum, at each step"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_requests_that_a_graph_cannot_serve(flags: list[str], message: str, tapes: list[Graph], app: App) -> None:
    assert f"error: --model.cuda_graph true{message}" in error_of(*app("fit", *SMALL, *STEPS, *GRAPH, *flags))


def test_a_trainer_without_graphs() -> None:
    """With a plain Trainer, the error names the required loop."""
    trainer = Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, barebones=True)
    with pytest.raises(UserError, match=r"GraphLoop\.put_into\(trainer\)"):
        trainer.fit(CIFARCNN(cuda_graph=True), datamodule=Synthetic(images=32, val_size=0, batch_size=16))


def test_the_cause_of_a_failed_capture_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's error is raised, although the end of the failed capture raises another error."""

    @contextmanager
    def invalidated(*args: Any, **kwargs: Any) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    overrides: list[bool] = []
    monkeypatch.setattr(torch.autograd.graph, "set_override_stale_capture_stream", overrides.append, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", invalidated)
    with pytest.raises(torch.OutOfMemoryError):
        graph_step.Graph(full)
    assert overrides == [True, False]


@on_gpu
@pytest.mark.parametrize("optimizer", [[], ["--model.optimizer", "AdamW"]], ids=["sgd", "adamw"])
@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])  # not float32: Adam amplifies its rounding
@pytest.mark.parametrize("scheduler", [[], HALVED], ids=["constant", "halved"])
def test_a_graph_on_cuda(optimizer: list[str], precision: str, scheduler: list[str], app: App, tmp_path: Path) -> None:
    flags = ["fit", *SMALL, *STEPS, *optimizer, *scheduler, "--trainer.precision", precision]
    for name, more in (("plain", []), ("graph", GRAPH)):
        output_of(*app(*flags, *more, "--trainer.accelerator", "cuda", "--run.name", name))
    plain, graph = (tmp_path / "runs" / name / "version_0" for name in ("plain", "graph"))
    np.testing.assert_allclose(losses(graph), losses(plain), rtol=0, atol=1e-5 if precision == "64-true" else 1e-2)
