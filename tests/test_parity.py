"""Parity: every way of running takes the same 60 steps, compared as `verify` does."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from forked import fork_fit
from harness import RECIPE, SLOW, difference, losses, on_cpu, options, slow, tiny

from app.data.shares import stream
from app.data.synthetic import SyntheticSource
from app.lab.verify.differences import TOLERANCE, Recorded, differences
from app.modules import CIFARCNN, FashionMLP

STEPS = options(max_epochs=4, log_every_n_steps=1, test=False)
RECORDED = [*STEPS, "--trainer.callbacks+=app.lab.verify.recording.Recording"]
RECORDED += ["--trainer.callbacks.steps=60", "--trainer.callbacks.epoch_steps=15"]
# batches of 64 from 903 training and 103 validation images: neither 2 nor 4 divides the last
# batches, of 7 and 39
IMAGES = tiny(1006, 64, val_size=103, flip=True, crop_padding=2)
# float64, because Adam takes full steps even for gradients that are only rounding errors
MLP = [
    "--model=FashionMLP",
    "--model.repeats=1",
    *options(like="FashionMNIST", precision="64-true"),
]
ADAMW = ["--model.optimizer=AdamW", "--model.optimizer.lr=0.002", "--model.scheduler=StepLR"]
ADAMW += ["--model.scheduler.step_size=1", "--model.scheduler.gamma=0.5"]
CNN = [*IMAGES, "--model=CIFARCNN"]
MODELS = {"cnn": CNN, "mlp": [*IMAGES, *MLP], "adamw": [*IMAGES, *MLP, *ADAMW]}
MODELS["recipe"] = [*CNN, *RECIPE, *options(gradient_clip_val=1)]


def check_same(run, expected, tolerance=TOLERANCE):
    """Compare 60 steps, as `verify` does.

    The comparison covers samples, rates, losses, gradients, weights, evaluation and optimizer.
    """
    np.testing.assert_allclose(losses(run), losses(expected), rtol=0, atol=tolerance)
    here, there = Recorded(run), Recorded(expected)
    assert len(here.steps) == len(there.steps) == 60
    assert differences(there, here, tolerance) == {}


@pytest.fixture(scope="module")
def single(request, tmp_path_factory):
    """Name of a model, and directory of its run on one device."""
    root = tmp_path_factory.mktemp(request.param)
    return request.param, fork_fit(root, *MODELS[request.param], *RECORDED)


WAYS = [("recipe", "ddp_fork", 2)]
# ddp_spawn runs "adamw", because it must pickle the optimizer and the scheduler that flags
# configure
MORE = [
    ("adamw", "dp", 2),
    ("cnn", "dp", 4),
    ("cnn", "ddp", 2),
    ("adamw", "ddp_spawn", 2),
    ("recipe", "dp", 2),
    ("cnn", "ddp_ring", 4),
]
WAYS += [slow(*way) for way in MORE]


@pytest.mark.parametrize(("single", "strategy", "devices"), WAYS, indirect=["single"])
def test_parity(single, strategy, devices, tmp_path):
    model, expected = single
    run = fork_fit(tmp_path, *MODELS[model], *RECORDED, *on_cpu(strategy, devices))
    # not 0, because metrics of the float64 runs of "adamw" are logged in float32
    check_same(run, expected, 1e-8 if model == "adamw" else TOLERANCE)


@SLOW
@pytest.mark.parametrize("single", ["cnn"], indirect=True)
@pytest.mark.parametrize(("batches", "strategy"), [(4, "auto"), (2, "dp"), slow(2, "ddp_fork")])
def test_accumulated_gradients(single, batches, strategy, tmp_path):
    """Gradients accumulated over batches equal those of whole batches of 64.

    An epoch's last window has fewer and smaller batches, so that each must be weighted by its
    number of samples.
    """
    model, expected = single
    way = on_cpu(strategy, batch_size=64 // batches, accumulate_grad_batches=batches)
    check_same(fork_fit(tmp_path, *MODELS[model], *RECORDED, *way), expected)


@pytest.mark.parametrize(("model", "accumulated"), [("cnn", 2), ("mlp", 1)])
def test_a_loop_by_hand(model, accumulated, tmp_path):
    """On one device, the app has a plain torch loop's losses and weights over the same batches."""
    flags = ["--seed_everything=7", *options(flip=False, crop_padding=0, precision="32-true")]
    flags += options(accumulate_grad_batches=accumulated)
    run = fork_fit(tmp_path, *MODELS[model], *STEPS, *flags)

    torch.manual_seed(7)
    if model == "cnn":
        module, source = CIFARCNN(), SyntheticSource("CIFAR10", 1006, 0)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.001, momentum=0.9)
    else:
        module, source = FashionMLP(repeats=1), SyntheticSource("FashionMNIST", 1006, 0)
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    train = source.load("train")
    pixels, labels = train.tensor(0).float(), train.labels
    images = (pixels / 255 - 0.5) / 0.5 if model == "cnn" else pixels / 256
    # the first 103 are for validation
    rows = torch.randperm(1006, generator=stream(7, 0))[103:].sort().values
    steps = []
    for epoch in range(4):
        order = rows[torch.randperm(903, generator=stream(7, 1, epoch))]
        for batch in order.split(64 * accumulated):
            scores = module.network(images[batch])
            if model == "cnn":
                loss = F.cross_entropy(scores, labels[batch])
            else:
                target = F.one_hot(labels[batch], 10).float()
                loss = F.smooth_l1_loss(scores.softmax(1), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps.append(loss.item())
    np.testing.assert_allclose(losses(run), steps, rtol=0, atol=TOLERANCE)
    assert difference(run, module.state_dict()) < TOLERANCE
