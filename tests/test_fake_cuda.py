"""CUDA code without a GPU: CUDA graphs as tapes, whole runs on fake tensors, and ranks of large worlds."""

from pathlib import Path

import numpy as np
import pytest
import torch
from graph_tape import Graph, tapes
from harness import App, difference, last_of, losses, options, output_of, tiny

from app.fit import rules

__all__ = ["tapes"]

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
