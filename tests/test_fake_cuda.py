"""CUDA code without a GPU: CUDA graphs as tapes, whole runs on fake tensors, and ranks of large worlds."""

from pathlib import Path

import numpy as np
import pytest
import torch
from fake_cuda import FakeCUDA, fake_cuda
from graph_tape import Graph, tapes
from harness import RECIPE, App, difference, last_of, losses, options, output_of, record_of, tiny

from app.fit import rules

__all__ = ["fake_cuda", "tapes"]

# 10 batches per epoch, of which the first three run without a graph
CAPTURED = tiny(180, 16, val_size=20, max_epochs=2, log_every_n_steps=1, flip=True, model="CIFARCNN")
FUSED = ["--model.optimizer.fused", "true"]
SGD, ADAMW = (["--model.optimizer", name, "--model.optimizer.lr", "0.01", *FUSED] for name in ("SGD", "AdamW"))
HALVED = ["--model.scheduler", "ExponentialLR", "--model.scheduler.gamma", "0.5"]


@pytest.mark.parametrize(
    "flags",
    [SGD, [*ADAMW, *HALVED], [*SGD, "--model.ema", "0.9", *HALVED], [*ADAMW, *options(precision="bf16-mixed")]],
    ids=["sgd", "adamw-scheduler", "ema", "bf16"],
)
def test_a_captured_step_computes_the_same(
    flags: list[str], tapes: list[Graph], app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and weights have the same bits although Python does not run again."""
    monkeypatch.setattr(rules, "needs_cuda", lambda resolved: ())
    for name in ("eager", "graph"):
        graph = ["--model.cuda_graph", str(name == "graph").lower()]
        output_of(*app("fit", *CAPTURED, *flags, *graph, "--run.name", name))
    eager, graph = (tmp_path / "runs" / name / "version_0" for name in ("eager", "graph"))
    assert sum(tape.replays for tape in tapes) == 20 - 3
    np.testing.assert_array_equal(losses(graph), losses(eager))
    assert difference(last_of(graph), last_of(eager)) == 0


def test_a_tape_is_as_strict_as_a_graph(tapes: list[Graph]) -> None:
    """It computes nothing while it captures, repeats Python's numbers, and forbids reads."""
    total, step = torch.zeros(1), 1.0
    with torch.cuda.graph(tape := torch.cuda.CUDAGraph()):
        total.add_(step)
        doubled = total * 2
    assert total.item() == 0
    step = 5.0
    for _ in range(2):
        tape.replay()
    assert (total.item(), doubled.item(), tapes[0].operations) == (2, 4, ["add_", "mul"])
    for read in ("item", "tolist"):
        with pytest.raises(RuntimeError, match="not permitted"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            getattr(total, read)()


# 6 batches per epoch, the last one smaller, and two logging windows
ON_FAKE = tiny(92, 16, val_size=4, max_epochs=2, log_every_n_steps=3, accelerator="cuda", devices=1, test=False)
AUGMENTED = options(flip=True, crop_padding=4, cutout=8)
MIXED = options(mixup=0.4, cutmix=1.0)
CLIPPED, GRAPH = options(gradient_clip_val=1), ["--model.cuda_graph", "true"]
UNFUSED = {name: ["--model.optimizer", name, "--model.optimizer.lr", "0.1"] for name in ("SGD", "AdamW")}
UNFUSED = {name: [*words, "--model.optimizer.fused", "false"] for name, words in UNFUSED.items()}
VIRTUAL = options(virtual_devices=4)
ADAMW = UNFUSED["AdamW"][:4]

CASES = {
    "32-true SGD device": AUGMENTED,
    "32-true AdamW memory": [*ADAMW, *CLIPPED, *MIXED],
    "16-mixed SGD memory": AUGMENTED,
    "16-mixed AdamW device": [*ADAMW, *CLIPPED, *MIXED],
    "bf16-mixed SGD device": [*GRAPH, *AUGMENTED, *MIXED],
    "bf16-mixed AdamW memory": [*ADAMW, *GRAPH],
    "bf16-true SGD memory": [*UNFUSED["SGD"], *CLIPPED, *AUGMENTED],
    "bf16-true AdamW device": [*UNFUSED["AdamW"], *MIXED],
    "32-true AdamW device": [*ADAMW, *VIRTUAL, *AUGMENTED],
    "bf16-mixed AdamW device": [*RECIPE, *AUGMENTED],
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_never_waits_for_the_gpu(case: str, fake_cuda: FakeCUDA, app: App, tmp_path: Path) -> None:
    """At most five reads, copies and synchronizations per logging window, and none in between."""
    precision, _, placement = case.split()
    flags = [*CASES[case], *options(precision=precision, placement=placement), "--run.name", "x"]
    output_of(*app("fit", *ON_FAKE, *flags))
    record = record_of(tmp_path / "runs" / "x" / "version_0")
    assert (record["peak_memory"][0]["device"], record["placement"]) == ("cuda:0", placement)
    assert fake_cuda.counts["captures"] == ("--model.cuda_graph" in flags)
    reads_of_scaler = fake_cuda.counts["step"] * (precision == "16-mixed" and CLIPPED[0] in flags)
    assert sum(fake_cuda.at("step").values()) == reads_of_scaler, fake_cuda.at("step")
    assert sum(fake_cuda.at("window").values()) <= 5 * fake_cuda.counts["window"], fake_cuda.at("window")


def test_evaluation_on_a_gpu(fake_cuda: FakeCUDA, app: App, tmp_path: Path) -> None:
    """The test's matrix and the predictions reach the host."""
    output_of(*app("fit", *ON_FAKE, *options(test=True), "--run.name", "x"))
    run = tmp_path / "runs" / "x" / "version_0"
    assert record_of(run)["test"] is not None
    assert (run / "confusion_matrix.png").exists()
    same = ["--config", run / "config.yaml", "--ckpt_path", last_of(run), "--run.name", "y"]
    output_of(*app("predict", *same))
    (predictions,) = (tmp_path / "runs" / "y").glob("*/predictions.csv")
    assert len(predictions.read_text().splitlines()) > 1
