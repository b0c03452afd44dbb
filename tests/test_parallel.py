"""The `dp` strategy, users' code under every strategy, and precisions."""

import pandas as pd
import pytest
import torch
from forked import fork_app, fork_fit
from harness import (
    QUIET,
    SLOW,
    last_of,
    newest_run,
    on_cpu,
    on_gpu,
    options,
    start_app,
    tiny,
    weights,
)
from lightning import Trainer
from user_code import Normalises, TheirData

import app.training  # noqa: F401  (registers dp)
from app.errors import RankLostError, RankSilentError
from app.launch.failures import lost

THEIRS = [
    "--model=user_code.TheirModel",
    "--data=user_code.TheirData",
    *options(max_epochs=2),
    *QUIET,
]
SMALL = tiny(72, 12, val_size=8)


def test_somebodys_own_model_and_data(tmp_path):
    flags = on_cpu("ddp_fork", root=tmp_path, name="x")
    assert "does not log val_acc" in fork_app("fit", *THEIRS, *flags)
    run = tmp_path / "x/version_0"
    names = ["best.ckpt", "last-1.ckpt", "last.ckpt"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == names
    assert (run / "config.yaml").read_text().count("user_code.") == 2


@SLOW
def test_torch_checks_collective_calls(tmp_path):
    """A gloo run in mixed precision completes with TORCH_DISTRIBUTED_DEBUG=DETAIL.

    torch's DDP would crash.
    """
    flags = [*SMALL, *on_cpu("ddp_fork", precision="bf16-mixed", max_epochs=1, root=tmp_path)]
    start_app("fit", *flags, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


@SLOW
@pytest.mark.parametrize("flag", ["fast_dev_run", "barebones"])
def test_a_run_that_leaves_no_traces(flag, tmp_path):
    flags = ["--data=Synthetic", *options(images=72, val_size=8, max_epochs=1)]
    flags += [*on_cpu("ddp", virtual_devices=2), f"--trainer.{flag}=true"]
    fork_fit(tmp_path, *flags)
    assert list(tmp_path.iterdir()) == []


COMMUNICATION = [
    ("socketProgress: Connection closed by remote peer h2<42921>", RankLostError),
    ("ncclRemoteError: possibly due to a network error or a remote process", RankLostError),
    ("NCCL communicator was aborted on rank 0.", RankLostError),
    ("[buffer.cc:78] Timed out waiting 20000ms for recv operation to complete", RankSilentError),
    ("Socket Timeout", RankSilentError),
    ("DataLoader timed out after 5 seconds", type(None)),
    ("mat1 and mat2 shapes cannot be multiplied", type(None)),
]


@pytest.mark.parametrize(("message", "kind"), COMMUNICATION)
def test_what_an_error_of_a_communication_tells(message, kind):
    """Errors of gloo and NCCL tell whether a rank is lost or silent; other messages tell neither.

    NCCL's messages are copied from its source, because no test here can provoke them.
    """
    assert type(lost(message)) is kind


def test_what_cannot_be_pickled_is_named(app):
    message = app.error("fit", *SMALL, "--model=user_code.CannotBePickled", *on_cpu("ddp_spawn"))
    assert "Can't pickle" in message
    assert "use --trainer.strategy ddp" in message


@SLOW
def test_parts_of_a_module_that_knows_nothing_of_them(app, tmp_path):
    """A user's module has the same weights and validation loss on one and two ranks.

    `validate` loads its checkpoint.

    97 training and 33 validation images in batches of 32 leave last batches of one image, and rank
    1 gets none of it.
    """
    flags = tiny(130, 32, "user_code.BuildsLate", val_size=33, max_epochs=1, threads=1)
    values = []
    for strategy in ("auto", "ddp_fork"):
        run = fork_fit(tmp_path, *flags, *on_cpu(strategy))
        app("validate", *flags, "--ckpt_path", last_of(run))
        logged = pd.read_csv(run / "metrics.csv")["their_val_loss"].dropna().item()
        values.append(weights(run) | {"logged": logged})
    torch.testing.assert_close(*values)


def test_lazy_layers(app, fit):
    flags = tiny(32, 8, "user_code.Lazy", max_epochs=1)
    fit(*flags)
    assert "no predictions.csv for your own model or data" in app(
        "predict", *flags, "--ckpt_path=last"
    )


def test_dp_refuses_a_step_that_it_cannot_split(app, fit):
    flags = [*THEIRS, "--model=user_code.SkipsForward"]
    assert "its step never calls self(batch)" in app.error("fit", *flags, *on_cpu("dp"))
    fit(*flags)


def test_dp_keeps_the_running_statistics_of_replica_0_only():
    """As in `nn.DataParallel`, only replica 0's buffers are kept.

    Attributes set by any replica are lost.
    """
    model = Normalises()
    trainer = Trainer(
        barebones=True,
        accelerator="cpu",
        strategy="dp",
        devices=2,
        max_steps=1,
        limit_val_batches=0,
    )
    seen = []
    handle = model.register_forward_hook(lambda module, args, output: seen.append(args[0].clone()))
    trainer.fit(model, datamodule=TheirData())
    handle.remove()
    half = next(images for images in seen if len(images) == 8)[:4]
    norm = model.net[0]
    torch.testing.assert_close(norm.running_mean, half.mean((0, 2, 3)))
    assert (norm.num_batches_tracked, model.forwards) == (1, 0)


PRECISIONS = {  # precisions of the scores and of the images
    "32-true": ("float32", "float32"),
    "bf16-mixed": ("bfloat16", "float32"),
    "bf16-true": ("bfloat16", "bfloat16"),
    "64-true": ("float64", "float64"),
}


@pytest.mark.parametrize("strategy", ["auto", "dp"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_replicas_compute_in_the_precision_that_was_asked_for(precision, strategy, app):
    flags = on_cpu(strategy, precision=precision, max_steps=2)
    out = app("fit", *THEIRS, "--model=user_code.NotesPrecision", *flags)
    lines = {line for line in out.splitlines() if line.startswith("computed in")}
    scores, images = PRECISIONS[precision]
    assert lines == {f"computed in torch.{scores} from torch.{images}"}


MODELS = {
    "CIFARCNN": on_cpu("dp"),
    "FashionMLP": [*on_cpu("auto"), "--data.like=FashionMNIST", "--model.repeats=1"],
}
DTYPES = {
    "bf16-mixed": torch.float32,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
    "64-true": torch.float64,
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("precision", DTYPES)
def test_every_precision(model, precision, fit):
    flags = [*SMALL, f"--model={model}", *MODELS[model], *options(crop_padding=4, flip=True)]
    # warn, because Adam's eps of 1e-8 is 0 in float16
    run = fit(*flags, *options(precision=precision, max_epochs=1, on_nonfinite="warn"))
    assert {value.dtype for value in weights(run).values()} == {DTYPES[precision]}


SHAPES = ["--trainer.callbacks+=batch_shapes.BatchShapes", *SMALL]
SHAPES += options(batch_size=30, max_epochs=1, test=False)


def shapes(out):
    """Return the lines that the callback prints."""
    return [line for line in out.splitlines() if line.startswith(("rank", "gathered"))]


def test_batch_shapes_under_dp(app):
    out = app("fit", *SHAPES, *on_cpu("dp"))
    expected = []
    for n in (4, 15, 2):  # images per replica: half of 8 in the sanity check, then of 30 and of 4
        sizes = f"input [{n}, 3, 32, 32] -> output [{n}, 10]"
        expected += [f"rank 0, replica 0: {sizes}", f"rank 0, replica 1: {sizes}"]
        expected += [f"gathered: [{2 * n}, 10]"]
    assert shapes(out) == expected


@SLOW
def test_batch_shapes_under_ddp(tmp_path):
    out = fork_app("fit", *SHAPES, *on_cpu("ddp_fork", root=tmp_path))
    # (rank, images): first in the sanity check, then in the epoch
    seen = [(0, 4), (1, 4), (0, 15), (0, 2), (1, 15), (1, 2)]
    assert shapes(out) == [
        f"rank {rank}, replica 0: input [{n}, 3, 32, 32] -> output [{n}, 10]" for rank, n in seen
    ]
    last = ["--ckpt_path", last_of(newest_run(tmp_path)), "--run.root", tmp_path]
    for command in ("test", "predict"):
        out = fork_app(command, *last)
        lines = shapes(out)
        assert lines == sorted(lines), out
        assert {line.split(",")[0] for line in lines} == {"rank 0", "rank 1"}


@SLOW
def test_batchnorm_on_a_single_image_is_refused(app, fit):
    flags = tiny(30, 21, val_size=8, max_epochs=1, test=False)
    flags += ["--model.network=resnet18"]
    assert "--data.drop_last true" in app.error("fit", *flags)
    fit(*flags, "--data.drop_last=true")


@on_gpu
@pytest.mark.parametrize(
    ("strategy", "precision"), [("auto", "16-mixed"), ("dp", "bf16-mixed"), ("ddp", "32-true")]
)
def test_on_cuda(strategy, precision, tmp_path):
    flags = [*SMALL, *options(accelerator="cuda", strategy=strategy, precision=precision)]
    for placement in ("memory", "device"):
        flags += options(placement=placement, name=placement)
        last = last_of(fork_fit(tmp_path, *flags, "--trainer.max_epochs=2"))
        if precision == "16-mixed":
            assert "scale" in torch.load(last, weights_only=True)["MixedPrecision"]
        fork_fit(tmp_path, *flags, "--trainer.max_epochs=3", f"--ckpt_path={last}")
