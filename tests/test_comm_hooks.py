"""Communication of gradients: ring, hooks on a CPU, strategies' options, rejected settings."""

import itertools
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from harness import (
    App,
    assert_same,
    difference,
    error_of,
    fork_app,
    on_two_nodes,
    options,
    output_of,
    record_of,
    tiny,
)
from jsonargparse import Namespace
from test_parity import MODELS, STEPS, TOLERANCE

from app.command.configuration import resolve
from app.training.comm_hooks import ring_all_reduce

HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
SMALL = tiny(72, 16, val_size=8)
CPU = ["--trainer.accelerator", "cpu", "--trainer.devices", "2"]
MEET = "--trainer.num_nodes 2 --cluster.init_method tcp://127.0.0.1:29500 --cluster.node_rank 0"


def forked(strategy: str, *options: str) -> list[str]:
    """Return flags for a strategy with two processes. They are forks, because forks start fast."""
    pairs = zip(options[::2], options[1::2], strict=True)
    words = [word for name, value in pairs for word in (f"--trainer.strategy.{name}", value)]
    return [*CPU, "--trainer.strategy", strategy, "--trainer.strategy.start_method", "fork", *words]


def rings(rank: int, store: str, is_staged: bool) -> None:
    """Check the ring against the built-in all-reduce, on groups of 2 to 8 ranks.

    Each of eight processes calls this.
    """
    if is_staged:
        torch.Tensor.cpu = torch.Tensor.clone  # type: ignore[method-assign]  # copy, as from a GPU
    dist.init_process_group(
        "gloo", f"file://{store}", timedelta(seconds=60), world_size=8, rank=rank
    )
    groups: list[Sequence[int]] = [range(2), range(3), range(4), range(5), [6, 1, 4], range(8)]
    for ranks in groups:
        group, world = dist.new_group(list(ranks)), len(ranks)
        if rank not in ranks:
            continue
        for length in (0, 1, 3, 7, 1000):
            mine = torch.randn(length, generator=torch.Generator().manual_seed(rank))
            ours, wanted = mine.clone(), mine.clone()
            sent = ring_all_reduce(ours, group)
            dist.all_reduce(wanted, group=group)
            torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6)
            gathered = [torch.empty(length) for _ in ranks]
            dist.all_gather(gathered, ours, group=group)
            assert all(torch.equal(result, ours) for result in gathered)
            total = torch.tensor(sent)
            dist.all_reduce(total, group=group)
            assert total == 2 * (world - 1) * mine.nbytes
            if length % world == 0:
                assert sent == 2 * (world - 1) * mine.nbytes // world
    dist.destroy_process_group()


@pytest.mark.parametrize("is_staged", [False, True])
def test_ring_all_reduce(is_staged: bool, tmp_path: Path) -> None:
    torch.testing.assert_close(0.0, 0.0)  # import torch.testing's modules once, not in each fork
    torch.multiprocessing.start_processes(
        rings, (str(tmp_path / "store"), is_staged), nprocs=8, start_method="fork"
    )


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run on one device."""
    root = tmp_path_factory.mktemp("single")
    output_of(*fork_app("fit", *MODELS["cnn"], *STEPS, "--run.root", root, "--run.name", "x"))
    return root / "x" / "version_0"


@pytest.mark.slow
def test_parity_of_the_ring(single: Path, tmp_path: Path) -> None:
    flags = [*MODELS["cnn"], *STEPS, *forked("ddp_ring"), "--trainer.devices", "4"]
    out = output_of(*fork_app("fit", *flags, "--run.root", tmp_path, "--run.name", "x"))
    run = tmp_path / "x" / "version_0"
    assert_same(run, single, TOLERANCE)
    # LeNet has 62,006 parameters of 4 bytes
    assert "ddp_ring: rank 0 sent 0.372 MB a step, 2(N−1)/N of 0.248 MB of gradients, N = 4" in out
    assert record_of(run)["strategy"] == "ddp_ring"


EXACT = [*SMALL, *options(precision="64-true", max_epochs=4, test=False)]  # 16 steps


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one device in float64, so that rounding hides no difference."""
    root = tmp_path_factory.mktemp("exact")
    output_of(*fork_app("fit", *EXACT, "--run.root", root, "--run.name", "x"))
    return root / "x" / "version_0"


def check_effect(root: Path, exact: Path, effect: bool) -> None:
    """Check that a run's weights equal one device's or, with an `effect`, differ slightly."""
    changed = difference(root / "x" / "version_0", exact)
    assert 1e-9 < changed < 1e-2 if effect else changed < 1e-12


ACTING = [
    ("ddp_fp16", [], ""),
    ("ddp_powersgd", ["start_powersgd_iter", "4"], "ddp_powersgd: 1 of "),
    pytest.param("ddp_bf16", [], "", marks=pytest.mark.slow),
    pytest.param(
        "ddp", ["ddp_comm_hook", f"{HOOKS}.fp16_compress_hook"], "", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(("strategy", "options", "message"), ACTING)
def test_hooks_act_on_cpu(
    strategy: str, options: list[str], message: str, exact: Path, tmp_path: Path
) -> None:
    out = output_of(
        *fork_app(
            "fit", *EXACT, *forked(strategy, *options), "--run.root", tmp_path, "--run.name", "x"
        )
    )
    assert message in out
    check_effect(tmp_path, exact, effect=True)
    assert record_of(tmp_path / "x" / "version_0")["strategy"] in (strategy, f"{strategy}_fork")


def test_accumulated_gradients_are_averaged_once(tmp_path: Path) -> None:
    flags = [
        *SMALL,
        *forked("ddp", "ddp_comm_hook", "user_code.speaking_hook"),
        "--run.root",
        tmp_path,
    ]
    out = output_of(
        *fork_app("fit", *flags, *options(accumulate_grad_batches=2, max_epochs=1, test=False))
    )
    assert (
        out.count("averaged a bucket") == 4
    )  # 64 images are 4 batches in 2 steps; each of 2 ranks prints once a step
    assert "static graph" not in out


@pytest.mark.slow
def test_what_a_checkpoint_does_not_hold_is_said(exact: Path, tmp_path: Path) -> None:
    flags = [*EXACT, *forked("ddp_powersgd"), "--run.root", tmp_path, "--run.name", "x"]
    out = output_of(*fork_app("fit", *flags))
    assert "nothing was compressed in 16 steps" in out
    assert "does not hold" not in out
    check_effect(tmp_path, exact, effect=False)
    out = output_of(*fork_app("fit", *flags, "--trainer.max_epochs", "5", "--ckpt_path", "last"))
    assert out.count("the checkpoint does not hold the error feedback of PowerSGD") == 1


@pytest.mark.slow
def test_a_node_is_one_process_under_ddp_dp(single: Path, tmp_path: Path) -> None:
    flags = [
        *MODELS["cnn"],
        *STEPS,
        *CPU,
        "--trainer.strategy",
        "ddp_dp",
        "--trainer.num_nodes",
        "2",
    ]
    flags += [
        "--trainer.callbacks+=app.monitor.BatchShapes",
        "--run.root",
        str(tmp_path),
        "--run.name",
        "x",
    ]
    (code, out), (code_1, out_1) = on_two_nodes("fit", *flags)
    assert (code, code_1) == (0, 0), out + out_1
    run = tmp_path / "x" / "version_0"
    assert_same(run, single, TOLERANCE)
    for rank, replica in itertools.product((0, 1), (0, 1)):
        assert f"rank {rank}, replica {replica}: input [16, 3, 32, 32] -> output [16, 10]" in out
    assert "gathered: [32, 10]" in out
    record = record_of(run)
    expected = {"strategy": "ddp_dp", "devices": 2, "num_nodes": 2, "world_size": 2, "replicas": 4}
    assert expected.items() <= record.items()
    assert [row["rank"] for row in record["peak_memory"]] == [0, 0, 1, 1]
    assert record["time_per_step"]["communication"] > 0


def strategy(*words: str) -> Namespace | str:
    """Return the resolved strategy of a command line."""
    return resolve(["fit", *SMALL, *words]).trainer.strategy


def test_options_follow_a_name(tmp_path: Path) -> None:
    assert strategy("--trainer.strategy", "ddp_ring") == "ddp_ring"
    for words in (["--trainer.strategy", "ddp"], ["--trainer.strategy=ddp"]):
        spec = strategy(
            *words, "--trainer.devices", "2", "--trainer.strategy.process_group_backend", "gloo"
        )
        assert spec.class_path == "app.training.ddp.DDP"
        assert (spec.init_args.process_group_backend, spec.init_args.start_method) == (
            "gloo",
            "popen",
        )
    spec = strategy(
        "--trainer.strategy=ddp_spawn_find_unused_parameters_true",
        "--trainer.strategy.bucket_cap_mb=1",
    )
    assert spec.init_args.find_unused_parameters
    assert spec.init_args.start_method == "spawn"
    spec = strategy(
        "--trainer.strategy",
        "ddp_fp16",
        "--trainer.strategy.bucket_cap_mb=1",
        "--trainer.strategy",
        "dp",
    )
    assert spec == "dp"


@pytest.mark.parametrize("content", ["ddp_powersgd", {"class_path": "app.training.PowerSGD"}])
def test_options_follow_a_name_in_a_config(content: str | dict[str, str], tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(yaml.safe_dump({"trainer": {"strategy": content}}))
    spec = strategy("--config", str(config), "--trainer.strategy.matrix_approximation_rank", "2")
    assert spec.class_path.endswith(".PowerSGD")
    assert spec.init_args.matrix_approximation_rank == 2
    spec = strategy("--config", str(config))
    assert (
        spec == content
        if isinstance(content, str)
        else spec.init_args.matrix_approximation_rank == 1
    )


REFUSED = [
    (
        "process_group_backend gloo",
        "process_group_backend: give --trainer.strategy ddp, or another one, before it",
    ),
    ("ddpp process_group_backend gloo", "or another one, before it: did you mean ddp?"),
    ("ddp find_unused_parameter true", "did you mean --trainer.strategy.find_unused_parameters?"),
    ("ddp period 3", "the chosen class has no such setting"),
    ("ddp bucket_cap_mb big", "--trainer.strategy.bucket_cap_mb big: expected a number"),
    ("ddp bucket_cap_mb -1", "--trainer.strategy.bucket_cap_mb -1: give 0 or more"),
    ("ddp process_group_backend nccl", "process_group_backend nccl: on cpu use gloo"),
    ("ddp process_group_backend glo", "process_group_backend glo: on cpu use gloo"),
    ("ddp ddp_comm_hook torch.nowhere", "module 'torch' has no attribute 'nowhere'"),
    (f"ddp ddp_comm_hook {HOOKS}.fp16_compress_wrapper", "fp16_compress_wrapper: not a hook"),
    (f"ddp ddp_comm_wrapper {HOOKS}.fp16_compress_wrapper", "has no effect without a hook"),
    ("ddp_fp16 ddp_comm_hook user_code.speaking_hook", "the chosen class has no such setting"),
    (
        "ddp_powersgd start_powersgd_iter 1",
        "--trainer.strategy.start_powersgd_iter 1: give 2 or more",
    ),
    ("ddp_dp", "use --trainer.strategy dp, or give more --trainer.num_nodes"),
    (
        "ddp_fp16 --trainer.devices 1",
        "this run is one process: use --trainer.strategy ddp without a hook",
    ),
    ("ddp_ring --trainer.devices 1", "ring_hook has no effect, because this run is one process"),
    (
        "ddp static_graph true --trainer.accumulate_grad_batches 2",
        "torch fails where gradients are accumulated",
    ),
    (f"ddp_dp {MEET} --trainer.sync_batchnorm true", "sync_batchnorm has no effect under dp"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_what_cannot_act_is_refused(flags: str, message: str, app: App) -> None:
    words = flags.split()
    argv = ["--trainer.strategy", words.pop(0)] if len(words) % 2 else []
    for name, value in zip(words[::2], words[1::2], strict=True):
        argv += [name if name.startswith("--") else f"--trainer.strategy.{name}", value]
    assert message in error_of(*app("fit", *SMALL, *CPU, *argv))


def test_bf16_is_refused_where_torch_would(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert "use --trainer.strategy ddp_fp16" in error_of(
        *app("fit", *SMALL, *CPU, "--trainer.strategy", "ddp_bf16")
    )


def test_a_backend_that_torch_lacks_is_refused(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_mpi_available", lambda: False)
    message = error_of(*app("fit", *SMALL, *forked("ddp", "process_group_backend", "mpi")))
    assert "process_group_backend mpi: on cpu use gloo" in message
