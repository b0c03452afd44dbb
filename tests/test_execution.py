"""Flags that change how a model is executed. They may change its results only by rounding."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import assert_same, last_of, losses, on_gpu, options, record_of, refusals, slow, tiny
from torch import nn

from app.command import rules
from app.data import Synthetic
from app.errors import UserError
from app.modules.execution import Execution, fastest
from app.modules.networks import MLP, LeNet, make_network

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = tiny(203, 20)
STEPS = options(max_epochs=3, log_every_n_steps=1, test=False)
CNN = ["--model=CIFARCNN"]
MLP_FLAGS = ["--model=FashionMLP", "--model.repeats=2", "--data.like=FashionMNIST"]
# in float64, because BatchNorm over few images amplifies rounding
RESNET = [
    *CNN,
    "--model.network=resnet18_cifar",
    *options(images=14, batch_size=4, drop_last=True, precision="64-true"),
]


CHANNELS_LAST = ("channels_last", True, False)
UNFUSED = ["--model.optimizer=Adam", "--model.optimizer.fused=false"]
ALIKE = [
    (CNN, ["--model.channels_last=false"], CHANNELS_LAST),
    slow(RESNET, ["--model.channels_last=false"], CHANNELS_LAST),
    slow(CNN, ["--model.compile=default"], ("compile", "off", "default")),
    (MLP_FLAGS, UNFUSED, ("fused", True, False)),
]


@pytest.mark.parametrize(("flags", "other", "expected"), ALIKE)
def test_execution_does_not_change_training(flags, other, expected, fit):
    name, before, after = expected
    if name == "compile" and not shutil.which("g++"):
        pytest.skip("needs g++")
    plain = fit(*SMALL, *flags, *STEPS)
    changed = fit(*SMALL, *flags, *STEPS, *other)
    assert_same(changed, plain)
    assert (record_of(plain)[name], record_of(changed)[name]) == (before, after)
    assert record_of(plain)["matmul_precision"] is None, "it does not act on a CPU"


@pytest.mark.parametrize("before", [True, False])
def test_resume_converts_momentum_to_the_layout(before, fit):
    """On resume, the checkpoint's momentum takes the memory layout of the new run's weights."""
    flags = [*SMALL, *CNN, *STEPS]
    fit(*flags, *options(max_epochs=1), f"--model.channels_last={before}")
    run = fit(*flags, f"--model.channels_last={not before}", "--ckpt_path=last")
    last = torch.load(last_of(run), weights_only=True)
    momenta = [state["momentum_buffer"] for state in last["optimizer_states"][0]["state"].values()]
    convolution = next(momentum for momentum in momenta if momentum.shape == (16, 6, 5, 5))
    assert convolution.is_contiguous(memory_format=torch.channels_last) != before


def test_default_layout():
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
def ampere(monkeypatch):
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


def test_precision_on_a_gpu(ampere):
    for name, tf32 in (("highest", False), ("high", True), ("medium", True)):
        settled = Execution("auto", "off", name).prepare(LeNet(), CUDA, "32-true")
        expected = {"matmul_precision": name, "channels_last": False, "benchmark": False}
        assert expected.items() <= settled.items()
        assert (ampere.precision, ampere.allow_tf32) == (name, tf32), "convolutions follow"
    for network, channels_last in ((LeNet(), False), (make_network("resnet18_cifar", 10), True)):
        settled = Execution("auto", "off", "highest").prepare(network, CUDA, "bf16-mixed")
        assert settled["channels_last"] is channels_last
    ampere.capability = (7, 5)
    Execution("auto", "off", "highest").prepare(LeNet(), CUDA, "32-true")
    with pytest.raises(UserError, match="an old GPU has no TF32: leave it out"):
        Execution("auto", "off", "high").prepare(LeNet(), CUDA, "32-true")


@pytest.mark.parametrize("cls", ["SGD", "Adam", "AdamW"])
def test_fused_by_default(cls):
    """The optimizer is fused, and its other settings are kept.

    It is not fused in two cases: if the user chose another implementation; if gradients are clipped
    under mixed precision.
    """
    model = nn.Linear(2, 2)

    def make(**options):
        return getattr(torch.optim, cls)(model.parameters(), lr=0.25, weight_decay=0.5, **options)

    plain = make().param_groups[0]
    fused = fastest(make(), False).param_groups[0]
    assert plain["fused"] is None
    assert fused == plain | {"fused": True, "foreach": fused["foreach"]}
    others = [
        fastest(make(), True),
        fastest(make(fused=False), False),
        fastest(make(foreach=True), False),
        # these have no fused implementation for GPUs
        fastest(torch.optim.RMSprop(model.parameters()), False),
        fastest(torch.optim.Adagrad(model.parameters()), False),
    ]
    assert not any(optimizer.param_groups[0].get("fused") for optimizer in others)


@pytest.mark.parametrize("fused", [False, True])
def test_a_checkpoint_of_another_implementation(fused):
    """A resumed run uses its own kind of update, fused or not, whatever the checkpoint used."""
    model = nn.Linear(2, 2)
    saved = torch.optim.Adam(model.parameters(), lr=0.25, fused=not fused)
    model(torch.ones(1, 2)).sum().backward()
    saved.step()
    resumed = fastest(torch.optim.Adam(model.parameters(), fused=fused), False)
    resumed.load_state_dict(saved.state_dict())
    (group,) = resumed.param_groups
    assert (group["fused"], group["lr"]) == (fused, 0.25)
    resumed.step()
    assert all(state["step"] == 2 for state in resumed.state.values())


ON_CPU = "has no effect on the cpu accelerator"
REFUSED = {
    "--trainer.benchmark true": f"--trainer.benchmark {ON_CPU}: leave it out",
    "--model.matmul_precision high": f"--model.matmul_precision {ON_CPU}",
    "--model.compile reduce-overhead": f"--model.compile reduce-overhead {ON_CPU}",
    "--model.compile default --trainer.strategy dp": (
        "--model.compile does not work with --trainer.strategy dp"
    ),
    "--model.compile reduce-overhead --trainer.accumulate_grad_batches 2": (
        "overwrites accumulated gradients"
    ),
    "--model.optimizer SGD --model.optimizer.fused true --model.optimizer.foreach true": (
        "SGD: `fused` and `foreach` cannot be `True` together."
    ),
    "--model.optimizer SGD --model.optimizer.fused true --trainer.gradient_clip_val 1 "
    "--trainer.precision bf16-mixed": "a fused optimizer cannot clip gradients under mixed",
    "--model.compile fast": "--model.compile fast",
}


test_flags_without_effect_are_rejected = refusals(REFUSED, *SMALL, "--trainer.accelerator=cpu")


def test_missing_compiler_is_reported(app, monkeypatch):
    monkeypatch.setattr(rules.shutil, "which", lambda name: None)
    message = app.error("fit", *SMALL, "--model.compile=default")
    assert "--model.compile: torch needs a compiler (" in message
    assert message.endswith("install it, or leave the flag out")


ROOM = 10 * 3072 * 1000  # free bytes: ten times the size of 1,000 images


PLACES = [("cuda", ROOM + 1, "device"), ("cuda", ROOM - 1, "memory"), ("cpu", 0, "memory")]


@pytest.mark.parametrize(("device", "free", "placement"), PLACES)
def test_placement_of_images(device, free, placement, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
    strategy = SimpleNamespace(
        root_device=torch.device(device), reduce_boolean_decision=lambda fits, all: fits
    )
    data = Synthetic(images=1000, val_size=0)
    data.trainer = SimpleNamespace(strategy=strategy, world_size=1, num_nodes=1)
    data._load_training()
    assert data._place() == placement


@on_gpu
@pytest.mark.parametrize("compiled", ["default", "reduce-overhead"])
def test_compiled_on_cuda(compiled, fit):
    flags = [*SMALL, *STEPS, "--trainer.accelerator=cuda"]
    runs = [fit(*flags, f"--model.compile={mode}") for mode in ("off", compiled)]
    np.testing.assert_allclose(*map(losses, runs), rtol=0, atol=1e-4)
