"""Flags that change how a model is executed. They may change its results only by rounding."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness import (
    App,
    assert_same,
    error_of,
    last_of,
    losses,
    on_gpu,
    options,
    output_of,
    record_of,
    tiny,
)
from torch import nn

from app.command import rules
from app.data import Synthetic
from app.errors import UserError
from app.modules.execution import Execution, fastest
from app.modules.networks import MLP, LeNet, make_network

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = tiny(203, 20)
STEPS = options(max_epochs=3, log_every_n_steps=1, test=False)
CNN = ["--model", "CIFARCNN"]
MLP_FLAGS = ["--model", "FashionMLP", "--model.repeats", "2", "--data.like", "FashionMNIST"]
# in float64, because BatchNorm over few images amplifies rounding
RESNET = [
    *CNN,
    "--model.network=resnet18_cifar",
    *options(images=14, batch_size=4, drop_last=True, precision="64-true"),
]
SLOW = pytest.mark.slow


def recorded(run: Path) -> dict[str, Any]:
    names = ("channels_last", "compile", "matmul_precision", "benchmark", "fused")
    return {name: value for name, value in record_of(run).items() if name in names}


ALIKE = [
    (CNN, ["--model.channels_last", "false"], ("channels_last", True, False)),
    pytest.param(
        RESNET, ["--model.channels_last", "false"], ("channels_last", True, False), marks=SLOW
    ),
    pytest.param(CNN, ["--model.compile", "default"], ("compile", "off", "default"), marks=SLOW),
    (
        MLP_FLAGS,
        ["--model.optimizer", "Adam", "--model.optimizer.fused", "true"],
        ("fused", False, True),
    ),
]


@pytest.mark.parametrize(
    ("flags", "other", "expected"),
    ALIKE,
    ids=["channels-last", "channels-last-resnet", "compile", "fused"],
)
def test_execution_does_not_change_training(
    flags: list[str], other: list[str], expected: tuple[str, Any, Any], app: App, tmp_path: Path
) -> None:
    if "default" in other and not shutil.which("g++"):
        pytest.skip("needs g++")
    for name, more in (("plain", []), ("other", other)):
        output_of(*app("fit", *SMALL, *flags, *STEPS, *more, "--run.name", name))
    plain, changed = (tmp_path / "runs" / name / "version_0" for name in ("plain", "other"))
    assert_same(changed, plain)
    name, before, after = expected
    assert (recorded(plain)[name], recorded(changed)[name]) == (before, after)
    assert recorded(plain)["matmul_precision"] is None, "it does not act on a CPU"


@pytest.mark.parametrize("before", ["true", "false"])
def test_resume_converts_momentum_to_the_layout(before: str, app: App, tmp_path: Path) -> None:
    """On resume, the checkpoint's momentum takes the memory layout of the new run's weights."""
    flags = ["fit", *SMALL, *CNN, *STEPS, "--run.name", "x"]
    output_of(*app(*flags, "--trainer.max_epochs", "1", "--model.channels_last", before))
    after = "false" if before == "true" else "true"
    output_of(*app(*flags, "--model.channels_last", after, "--ckpt_path", "last"))
    last = torch.load(last_of(tmp_path / "runs" / "x" / "version_0"), weights_only=True)
    momenta = [state["momentum_buffer"] for state in last["optimizer_states"][0]["state"].values()]
    convolution = next(momentum for momentum in momenta if momentum.shape == (16, 6, 5, 5))
    assert convolution.is_contiguous(memory_format=torch.channels_last) == (after == "true")


def test_default_layout() -> None:
    for network, device, precision, channels_last in (
        (LeNet(), CPU, "32-true", True),
        (LeNet(), torch.device("mps"), "32-true", False),
        (MLP(1, [8], 10), CPU, "32-true", False),
    ):
        execution = Execution("auto", "off", "highest")
        for _ in range(2):  # as `fit` does it: for training, and again for the final test
            assert execution.prepare(network, device, precision)["channels_last"] is channels_last
        assert len(network._forward_pre_hooks) == channels_last


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A fake GPU, which records torch's settings."""
    gpu = SimpleNamespace(capability=(8, 0), precision=None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpu.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old GPU")
    monkeypatch.setattr(
        torch, "set_float32_matmul_precision", lambda name: setattr(gpu, "precision", name)
    )
    monkeypatch.setattr(torch.backends, "cudnn", gpu)
    gpu.benchmark = False
    return gpu


def test_precision_on_a_gpu(ampere: SimpleNamespace) -> None:
    for name, tf32 in (("highest", False), ("high", True), ("medium", True)):
        settled = Execution("auto", "off", name).prepare(LeNet(), CUDA, "32-true")  # type: ignore[arg-type]
        assert (settled["matmul_precision"], settled["channels_last"], settled["benchmark"]) == (
            name,
            False,
            False,
        )
        assert (ampere.precision, ampere.allow_tf32) == (name, tf32), "convolutions follow"
    for network, channels_last in ((LeNet(), False), (make_network("resnet18_cifar", 10), True)):
        settled = Execution("auto", "off", "highest").prepare(network, CUDA, "bf16-mixed")
        assert settled["channels_last"] is channels_last
    ampere.capability = (7, 5)
    Execution("auto", "off", "highest").prepare(LeNet(), CUDA, "32-true")
    with pytest.raises(UserError, match="an old GPU has no TF32: leave it out"):
        Execution("auto", "off", "high").prepare(LeNet(), CUDA, "32-true")


@pytest.mark.parametrize("cls", ["SGD", "Adam", "AdamW"])
def test_fused_by_default_on_a_gpu(cls: str) -> None:
    """On a GPU, the optimizer is fused, and its other settings are kept.

    It is not fused in three cases: on a CPU; if the user chose another implementation; if gradients
    are clipped under float16's loss scaler.
    """
    model = nn.Linear(2, 2)

    def make(**options: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, cls)(model.parameters(), lr=0.25, weight_decay=0.5, **options)

    (plain,), (fused,) = make().param_groups, fastest(make(), CUDA, False).param_groups
    assert (plain["fused"], fused["fused"]) == (None, True)
    others = plain.keys() - {"fused", "foreach"}
    assert {name: fused[name] for name in others} == {name: plain[name] for name in others}
    for made in (
        fastest(make(), CPU, False),
        fastest(make(), CUDA, True),
        fastest(make(fused=False), CUDA, False),
        fastest(make(foreach=True), CUDA, False),
    ):
        assert not made.param_groups[0]["fused"]
    for other in (
        torch.optim.RMSprop,
        torch.optim.Adagrad,
    ):  # these have no fused implementation for GPUs
        assert not fastest(other(model.parameters()), CUDA, False).param_groups[0].get("fused")


@pytest.mark.parametrize("fused", [False, True])
def test_a_checkpoint_of_another_implementation(fused: bool) -> None:
    """A resumed run uses its own kind of update, fused or not, whatever the checkpoint used."""
    model = nn.Linear(2, 2)
    saved = torch.optim.Adam(model.parameters(), lr=0.25, fused=not fused)
    model(torch.ones(1, 2)).sum().backward()
    saved.step()
    resumed = fastest(torch.optim.Adam(model.parameters(), fused=fused), CPU, False)
    resumed.load_state_dict(saved.state_dict())
    (group,) = resumed.param_groups
    assert (group["fused"], group["lr"]) == (fused, 0.25)
    resumed.step()
    assert all(state["step"] == 2 for state in resumed.state.values())


REFUSED = [
    (
        "--model.compile default --trainer.strategy dp",
        "--model.compile does not work with --trainer.strategy dp",
    ),
    (
        "--model.compile reduce-overhead --trainer.accumulate_grad_batches 2",
        "overwrites accumulated gradients",
    ),
    (
        "--model.optimizer SGD --model.optimizer.fused true --model.optimizer.foreach true",
        "SGD: `fused` and `foreach` cannot be `True` together.",
    ),
    ("--model.compile fast", "--model.compile fast"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_flags_without_effect_are_rejected(flags: str, message: str, app: App) -> None:
    assert message in error_of(*app("fit", *SMALL, "--trainer.accelerator", "cpu", *flags.split()))


def test_missing_compiler_is_reported(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules.shutil, "which", lambda name: None)
    message = error_of(*app("fit", *SMALL, "--model.compile", "default"))
    assert "--model.compile: torch needs a compiler (" in message
    assert message.endswith("install it, or leave the flag out")


ROOM = 10 * 3072 * 1000  # free bytes: ten times the size of 1,000 images


PLACES = [("cuda", ROOM + 1, "device"), ("cuda", ROOM - 1, "memory"), ("cpu", 0, "memory")]


@pytest.mark.parametrize(("device", "free", "placement"), PLACES)
def test_placement_of_images(
    device: str, free: int, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
    strategy = SimpleNamespace(
        root_device=torch.device(device), reduce_boolean_decision=lambda fits, all: fits
    )
    data = Synthetic(images=1000, val_size=0)
    data.trainer = SimpleNamespace(strategy=strategy, world_size=1, num_nodes=1)  # type: ignore[assignment]
    data._load_training()
    assert data._place() == placement


@on_gpu
@pytest.mark.parametrize("compiled", ["default", "reduce-overhead"])
def test_compiled_on_cuda(compiled: str, app: App, tmp_path: Path) -> None:
    for name in ("off", compiled):
        flags = ["--trainer.accelerator", "cuda", "--model.compile", name, "--run.name", name]
        output_of(*app("fit", *SMALL, *STEPS, *flags))
    pair = (losses(tmp_path / "runs" / name / "version_0") for name in ("off", compiled))
    np.testing.assert_allclose(*pair, rtol=0, atol=1e-4)
