"""Training steps as CUDA graphs, on tapes that stand in for them, and on a GPU."""

from pathlib import Path

import numpy as np
import pytest
from graph_tape import Graph, tapes
from harness import App, difference, error_of, losses, on_gpu, options, output_of, record_of, tiny

from app.fit import rules

__all__ = ["tapes"]

# 203 images less 20 for validation: 9 full batches per epoch, and one of 3
SMALL = tiny(203, 20, flip=True, crop_padding=2)
STEPS = options(max_epochs=3, log_every_n_steps=1, test=False, placement="device")
EVERY = ["--last_checkpoint.save_top_k", "-1", "--last_checkpoint.filename", "{step}"]
EVERY += ["--last_checkpoint.every_n_train_steps", "7"]
GRAPH = ["--model.cuda_graph", "true"]
FUSED = ["--model.optimizer.fused", "true"]
# float32 holds these rates without rounding
SGD = ["--model.optimizer", "SGD", "--model.optimizer.lr", "0.0078125", "--model.optimizer.momentum", "0.9", *FUSED]
ADAMW = ["--model.optimizer", "AdamW", "--model.optimizer.lr", "0.0078125", *FUSED]
HALVED = ["--model.scheduler", "ExponentialLR", "--model.scheduler.gamma", "0.5"]


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow graphs on the CPU."""
    monkeypatch.setattr(rules, "needs_cuda", lambda resolved: ())


RUNS = {
    "sgd": SGD,
    "adamw_halved": [*ADAMW, *HALVED],
    "halved_at_each_step": [*SGD, *HALVED, "--model.scheduler_interval", "step"],
    "clipped": [*SGD, "--trainer.gradient_clip_val", "0.5"],
    "averaged": [*SGD, "--model.ema", "0.9"],
    "bf16": [*SGD, "--trainer.precision", "bf16-mixed"],
    "from_host_memory": [*SGD, "--data.placement", "memory"],
    "mixed": [*SGD, "--data.mixup", "0.5", "--data.cutmix", "1.0"],
}


@pytest.mark.parametrize("flags", RUNS.values(), ids=RUNS)
def test_a_graph_computes_the_same(flags: list[str], tapes: list[Graph], app: App, tmp_path: Path) -> None:
    """Bits are the same. The first three steps and each epoch's last batch run as usual; the others are replayed."""
    for name, more in (("plain", []), ("graph", GRAPH)):
        output_of(*app("fit", *SMALL, *STEPS, *EVERY, *flags, *more, "--run.name", name))
    plain, graph = (tmp_path / "runs" / name / "version_0" for name in ("plain", "graph"))
    assert [tape.replays for tape in tapes] == [24] * (1 if "--data.mixup" in flags else 2)
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
    """A run that resumes at an epoch's smaller last batch captures the full batches after it."""
    flags = ["fit", *SMALL, *STEPS, *EVERY, *SGD]
    output_of(*app(*flags, "--last_checkpoint.every_n_train_steps", "9", "--run.name", "plain"))
    saved = tmp_path / "runs" / "plain" / "version_0" / "checkpoints"
    output_of(*app(*flags, *GRAPH, "--run.name", "graph", "--ckpt_path", saved / "step=9.ckpt"))
    resumed = tmp_path / "runs" / "graph" / "version_0" / "checkpoints"
    assert [tape.replays for tape in tapes] == [15, 15]
    assert difference(saved / "step=27.ckpt", resumed / "step=28.ckpt") == 0
