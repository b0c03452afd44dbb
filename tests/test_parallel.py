"""The `dp` strategy, users' code under every strategy, and precisions."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from harness import (
    QUIET,
    App,
    error_of,
    fork_app,
    on_cpu,
    on_gpu,
    options,
    output_of,
    start_app,
    tiny,
    weights,
)
from lightning.pytorch import Trainer
from user_code import Normalises, TheirData

import app.training  # noqa: F401  (registers dp)
from app.errors import RankLostError, RankSilentError
from app.launch.failures import lost
from app.modules import CIFARCNN
from app.training.data_parallel import Replica

THEIRS = [
    "--model",
    "user_code.TheirModel",
    "--data",
    "user_code.TheirData",
    *options(max_epochs=2),
    *QUIET,
]
SMALL = tiny(72, 12, val_size=8)


@pytest.mark.parametrize(
    "strategy", ["auto", "dp", "ddp_fork", pytest.param("ddp", marks=pytest.mark.slow)]
)
def test_somebodys_own_model_and_data(strategy: str, app: App, tmp_path: Path) -> None:
    flags = on_cpu(strategy, 1 if strategy == "auto" else 2, root=tmp_path, name="x")
    assert "does not log val_acc" in output_of(
        *(fork_app if "ddp" in strategy else app)("fit", *THEIRS, *flags)
    )
    run = tmp_path / "x" / "version_0"
    assert {path.name for path in (run / "checkpoints").iterdir()} == {
        "best.ckpt",
        "last.ckpt",
        "last-1.ckpt",
    }
    assert (run / "config.yaml").read_text().count("user_code.") == 2


@pytest.mark.slow
def test_torch_checks_collective_calls(tmp_path: Path) -> None:
    """A gloo run in mixed precision completes with TORCH_DISTRIBUTED_DEBUG=DETAIL.

    torch's DDP would crash.
    """
    flags = [*SMALL, *on_cpu("ddp_fork", 2, precision="bf16-mixed", max_epochs=1, root=tmp_path)]
    output_of(*start_app("fit", *flags, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}))


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["fast_dev_run", "barebones"])
def test_a_run_that_leaves_no_traces(flag: str, tmp_path: Path) -> None:
    flags = [*SMALL[:-4], *on_cpu("ddp", 2), f"--trainer.{flag}", "true", "--run.root", tmp_path]
    output_of(*fork_app("fit", *flags, "--trainer.max_epochs", "1", "--run.virtual_devices", "2"))
    assert list(tmp_path.iterdir()) == []


COMMUNICATION = [
    (
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
        "[10.0.0.2]:51",
        "gone",
    ),
    ("socketProgress: Connection closed by remote peer h2<42921>", "gone"),
    (
        "ncclRemoteError: possibly due to a network error or a remote process exiting prematurely.",
        "gone",
    ),
    ("NCCL communicator was aborted on rank 0.", "gone"),
    ("[unbound_buffer.cc:78] Timed out waiting 20000ms for recv operation to complete", "silent"),
    ("Socket Timeout", "silent"),
    ("DataLoader timed out after 5 seconds", None),
    ("mat1 and mat2 shapes cannot be multiplied", None),
]


@pytest.mark.parametrize(("message", "kind"), COMMUNICATION)
def test_what_an_error_of_a_communication_tells(message: str, kind: str | None) -> None:
    """Errors of gloo and NCCL tell whether a rank is lost or silent; other messages tell neither.

    NCCL's messages are copied from its source, because no test here can provoke them.
    """
    kinds = {"gone": RankLostError, "silent": RankSilentError}
    assert type(lost(message)) is kinds.get(str(kind), type(None))


def test_what_cannot_be_pickled_is_named(app: App) -> None:
    message = error_of(
        *app("fit", *SMALL, "--model", "user_code.CannotBePickled", *on_cpu("ddp_spawn", 2))
    )
    assert "Can't pickle" in message
    assert "use --trainer.strategy ddp" in message


def test_parts_of_a_module_that_knows_nothing_of_them(app: App, tmp_path: Path) -> None:
    """A user's module has the same weights and validation loss on one and two ranks.

    `validate` loads its checkpoint.

    97 training and 33 validation images in batches of 32 leave last batches of one image, and rank
    1 gets none of it.
    """
    flags = [
        *tiny(130, 32, "user_code.BuildsLate", val_size=33, max_epochs=1),
        "--run.threads",
        "1",
    ]
    values = []
    for strategy, devices in (("auto", 1), ("ddp_fork", 2)):
        output_of(
            *fork_app("fit", *flags, *on_cpu(strategy, devices, root=tmp_path, name=strategy))
        )
        run = tmp_path / strategy / "version_0"
        output_of(*app("validate", *flags, "--ckpt_path", run / "checkpoints" / "last.ckpt"))
        values.append(
            weights(run)
            | {"logged": pd.read_csv(run / "metrics.csv")["their_val_loss"].dropna().item()}
        )
    torch.testing.assert_close(*values)


def test_lazy_layers(app: App) -> None:
    flags = tiny(32, 8, "user_code.Lazy", max_epochs=1)
    output_of(*app("fit", *flags))
    assert "no predictions.csv for your own model or data" in output_of(
        *app("predict", *flags, "--ckpt_path", "last")
    )


def test_dp_splits_a_classifier_with_views() -> None:
    model = CIFARCNN(views="mirror")
    assert Replica(model).module is model


def test_dp_refuses_a_step_that_it_cannot_split(app: App) -> None:
    message = error_of(*app("fit", *THEIRS, "--model", "user_code.SkipsForward", *on_cpu("dp", 2)))
    assert "its step never calls self(batch)" in message
    output_of(*app("fit", *THEIRS, "--model", "user_code.SkipsForward"))


def test_dp_keeps_the_running_statistics_of_replica_0_only() -> None:
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
    seen: list[torch.Tensor] = []
    handle = model.register_forward_hook(lambda module, args, output: seen.append(args[0].clone()))
    trainer.fit(model, datamodule=TheirData())
    handle.remove()
    half = next(images for images in seen if len(images) == 8)[:4]
    norm = model.net[0]
    torch.testing.assert_close(norm.running_mean, half.mean((0, 2, 3)))
    assert (norm.num_batches_tracked, model.forwards) == (1, 0)


@pytest.mark.parametrize("strategy", ["auto", "dp"])
def test_replicas_compute_in_the_precision_that_was_asked_for(strategy: str, app: App) -> None:
    flags = [
        *THEIRS,
        "--model",
        "user_code.NotesPrecision",
        *on_cpu(strategy, 2 if strategy == "dp" else 1),
    ]
    for precision, scores, images in (
        ("32-true", "float32", "float32"),
        ("bf16-mixed", "bfloat16", "float32"),
        ("bf16-true", "bfloat16", "bfloat16"),
        ("64-true", "float64", "float64"),
    ):
        out = output_of(
            *app("fit", *flags, "--trainer.precision", precision, "--trainer.max_steps", "2")
        )
        lines = {line for line in out.splitlines() if line.startswith("computed in")}
        assert lines == {f"computed in torch.{scores} from torch.{images}"}


@pytest.mark.parametrize(("model", "strategy"), [("CIFARCNN", "dp"), ("FashionMLP", "auto")])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-true", "64-true"])
def test_every_precision(
    model: str, strategy: str, precision: str, app: App, tmp_path: Path
) -> None:
    flags = ["--model", model, *SMALL, *on_cpu(strategy, 2 if strategy == "dp" else 1)]
    flags += (
        ["--data.like", "FashionMNIST", "--model.repeats", "1"] if model == "FashionMLP" else []
    )
    flags += options(
        crop_padding=4, flip=True, on_nonfinite="warn"
    )  # because Adam's eps of 1e-8 is 0 in float16
    output_of(*app("fit", *flags, "--trainer.precision", precision, "--trainer.max_epochs", "1"))
    (run,) = tmp_path.glob("runs/*/version_0")
    true = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
    assert {value.dtype for value in weights(run).values()} == {true.get(precision, torch.float32)}


SHAPES = [
    "--trainer.callbacks+=app.monitor.BatchShapes",
    "--trainer.max_epochs",
    "1",
    "--run.test",
    "false",
]


def test_batch_shapes_under_dp(app: App) -> None:
    out = output_of(*app("fit", *SMALL, "--data.batch_size", "30", *on_cpu("dp", 2), *SHAPES))
    expected = []
    for n in (4, 15, 2):  # images per replica: half of 8 in the sanity check, then of 30 and of 4
        expected += [
            f"rank 0, replica {index}: input [{n}, 3, 32, 32] -> output [{n}, 10]"
            for index in (0, 1)
        ]
        expected += [f"gathered: [{2 * n}, 10]"]
    assert [line for line in out.splitlines() if line.startswith(("rank", "gathered"))] == expected


@pytest.mark.slow
def test_batch_shapes_under_ddp(tmp_path: Path) -> None:
    flags = [*SMALL, "--data.batch_size", "30", *on_cpu("ddp_fork", 2), *SHAPES]
    out = output_of(*fork_app("fit", *flags, "--run.root", tmp_path))
    lines = [line for line in out.splitlines() if line.startswith(("rank", "gathered"))]
    # (rank, images): first in the sanity check, then in the epoch
    seen = [(0, 4), (1, 4), (0, 15), (0, 2), (1, 15), (1, 2)]
    assert lines == [
        f"rank {rank}, replica 0: input [{n}, 3, 32, 32] -> output [{n}, 10]" for rank, n in seen
    ]
    last = tmp_path / "LeNet-Synthetic" / "version_0" / "checkpoints" / "last.ckpt"
    for command in ("test", "predict"):
        out = output_of(*fork_app(command, "--ckpt_path", last, "--run.root", tmp_path))
        lines = [line for line in out.splitlines() if line.startswith("rank")]
        assert lines == sorted(lines), out
        assert {line.split(",")[0] for line in lines} == {"rank 0", "rank 1"}


def test_batchnorm_on_a_single_image_is_refused(app: App) -> None:
    flags = [
        "--model.network",
        "resnet18",
        *options(images=30, batch_size=21, max_epochs=1, test=False),
    ]
    assert "--data.drop_last true" in error_of(*app("fit", *SMALL, *flags))
    output_of(*app("fit", *SMALL, *flags, "--data.drop_last", "true"))


@on_gpu
@pytest.mark.parametrize(
    ("strategy", "precision"), [("auto", "16-mixed"), ("dp", "bf16-mixed"), ("ddp", "32-true")]
)
def test_on_cuda(strategy: str, precision: str, tmp_path: Path) -> None:
    flags = [
        "--trainer.accelerator",
        "cuda",
        "--trainer.strategy",
        strategy,
        "--trainer.precision",
        precision,
    ]
    for placement in ("memory", "device"):
        more = ["--data.placement", placement, "--trainer.max_epochs", "2", "--run.name", placement]
        output_of(*fork_app("fit", *SMALL, *flags, *more, "--run.root", tmp_path))
        last = tmp_path / placement / "version_0" / "checkpoints" / "last.ckpt"
        if precision == "16-mixed":
            assert "scale" in torch.load(last, weights_only=True)["MixedPrecision"]
        again = ["--trainer.max_epochs", "3", "--run.root", tmp_path, "--ckpt_path", last]
        output_of(*fork_app("fit", *SMALL, *flags, *more, *again))
