"""Communication of gradients: ring, hooks on a CPU, strategies' options, rejected settings."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import yaml
from forked import fork_app, fork_fit
from harness import difference, on_cpu, options, record_of, refusals, slow, tiny

from app.command.configuration import resolve
from app.training.comm_hooks import ring_all_reduce, ring_hook

HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
SMALL = tiny(72, val_size=8)
CPU = ["--trainer.accelerator=cpu", "--trainer.devices=2"]


def forked(*settings, strategy="ddp"):
    """Return flags for a strategy with two processes. They are forks, because forks start fast."""
    words = [f"--trainer.strategy.{setting}" for setting in ("start_method=fork", *settings)]
    return [*CPU, f"--trainer.strategy={strategy}", *words]


def rings(rank, store, is_staged):
    """Check the ring against the built-in all-reduce, on groups of 2 to 8 ranks.

    Each of eight processes calls this.
    """
    if is_staged:
        torch.Tensor.cpu = torch.Tensor.clone  # copy, as from a GPU
    dist.init_process_group(
        "gloo", f"file://{store}", timedelta(seconds=60), world_size=8, rank=rank
    )
    groups = [range(2), range(3), range(4), range(5), [6, 1, 4], range(8)]
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
    bucket = SimpleNamespace(buffer=lambda: torch.full((3,), float(rank)))
    assert ring_hook(None, bucket).wait().tolist() == [3.5] * 3
    dist.destroy_process_group()


@pytest.mark.parametrize("is_staged", [False, True])
def test_ring_all_reduce(is_staged, tmp_path):
    torch.testing.assert_close(0.0, 0.0)  # import torch.testing's modules once, not in each fork
    torch.multiprocessing.start_processes(
        rings, (str(tmp_path / "store"), is_staged), nprocs=8, start_method="fork"
    )


EXACT = [*SMALL, *options(precision="64-true", max_epochs=4, test=False)]  # 16 steps


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """A run on one device in float64, so that rounding hides no difference."""
    return fork_fit(tmp_path_factory.mktemp("exact"), *EXACT)


ACTING = [
    ("ddp_fp16", []),
    slow("ddp_bf16", []),
    slow("ddp", [f"ddp_comm_hook={HOOKS}.fp16_compress_hook"]),
]


@pytest.mark.parametrize(("strategy", "settings"), ACTING)
def test_hooks_act_on_cpu(strategy, settings, exact, tmp_path):
    run = fork_fit(tmp_path, *EXACT, *forked(*settings, strategy=strategy))
    assert 1e-9 < difference(run, exact) < 1e-2
    assert record_of(run)["strategy"] in (strategy, f"{strategy}_fork")


def test_accumulated_gradients_are_averaged_once(tmp_path):
    flags = [*SMALL, *forked("ddp_comm_hook=user_code.speaking_hook")]
    flags += options(accumulate_grad_batches=2, max_epochs=1, test=False, root=tmp_path)
    out = fork_app("fit", *flags)
    # 64 images are 4 batches in 2 steps; each of 2 ranks prints once a step
    assert out.count("averaged a bucket") == 4
    assert "static graph" not in out


def strategy(*words):
    """Return the resolved strategy of a command line."""
    return resolve(["fit", *SMALL, *words]).trainer.strategy


def test_options_follow_a_name():
    assert strategy("--trainer.strategy=ddp_ring") == "ddp_ring"
    assert strategy("--trainer.strategy=FP16").class_path == "app.training.FP16"
    for words in (["--trainer.strategy", "ddp"], ["--trainer.strategy=ddp"]):
        spec = strategy(*words, "--trainer.strategy.process_group_backend=gloo")
        assert spec.class_path == "app.training.ddp.DDP"
        assert spec.init_args.process_group_backend == "gloo"
        assert spec.init_args.start_method == "popen"
    limit = "--trainer.strategy.bucket_cap_mb=1"
    spec = strategy("--trainer.strategy=ddp_spawn_find_unused_parameters_true", limit)
    assert spec.init_args.find_unused_parameters
    assert spec.init_args.start_method == "spawn"
    assert strategy("--trainer.strategy=ddp_fp16", limit, "--trainer.strategy=dp") == "dp"


@pytest.mark.parametrize("content", ["ddp_fp16", {"class_path": "app.training.FP16"}])
def test_options_follow_a_name_in_a_config(content, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(yaml.safe_dump({"trainer": {"strategy": content}}))
    spec = strategy(f"--config={config}", "--trainer.strategy.bucket_cap_mb=2")
    assert spec.class_path.endswith(".FP16")
    assert spec.init_args.bucket_cap_mb == 2
    spec = strategy(f"--config={config}")
    assert spec == content or spec.init_args.bucket_cap_mb is None


FLAG = "--trainer.strategy"
REFUSED = {
    f"{FLAG}.process_group_backend gloo": f"give {FLAG} ddp, or another one, before it",
    f"{FLAG} ddpp {FLAG}.bucket_cap_mb 1": "or another one, before it: did you mean ddp?",
    f"{FLAG} ddp {FLAG}.find_unused_parameter true": f"mean {FLAG}.find_unused_parameters?",
    f"{FLAG} ddp {FLAG}.period 3": "the chosen class has no such setting",
    f"{FLAG} ddp {FLAG}.bucket_cap_mb big": f"{FLAG}.bucket_cap_mb big: expected a number",
    f"{FLAG} ddp {FLAG}.bucket_cap_mb -1": f"{FLAG}.bucket_cap_mb -1: give 0 or more",
    f"{FLAG} ddp {FLAG}.process_group_backend nccl": "backend nccl: on cpu use gloo",
    f"{FLAG} ddp {FLAG}.ddp_comm_hook torch.nowhere": "module 'torch' has no attribute 'nowhere'",
    f"{FLAG} ddp {FLAG}.ddp_comm_hook {HOOKS}.fp16_compress_wrapper": "wrapper: not a hook",
    f"{FLAG} ddp {FLAG}.ddp_comm_wrapper {HOOKS}.fp16_compress_wrapper": (
        "has no effect without a hook"
    ),
    f"{FLAG} ddp_fp16 {FLAG}.ddp_comm_hook user_code.speaking_hook": (
        "the chosen class has no such setting"
    ),
    f"{FLAG} ddp_fp16 --trainer.devices 1": (
        f"has no effect, because this run is one process: use {FLAG} ddp without a hook"
    ),
    f"{FLAG} ddp {FLAG}.static_graph true --trainer.accumulate_grad_batches 2": (
        "torch fails where gradients are accumulated"
    ),
}


test_what_cannot_act_is_refused = refusals(REFUSED, *SMALL, *CPU)


def test_bf16_is_refused_where_torch_would(app, monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    message = app.error("fit", *SMALL, *on_cpu("ddp_bf16"))
    assert "use --trainer.strategy ddp_fp16" in message
