"""Code for CUDA. Most tests need no GPU: they patch torch to report one, or use fake devices."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import QUIET, difference, losses, on_gpu, options, record_of, start_app, tiny
from torch import nn

import app.training.ddp
from app.cli import main
from app.errors import RankLostError, UserError
from app.launch import failures
from app.launch.failures import explaining_errors
from app.launch.signals import StopTogether
from app.modules import CIFARCNN
from app.system import machine
from app.training import DDP, DataParallelStrategy
from app.training.data_parallel import Replica

SMALL = tiny(72, val_size=8)
CPU = ["--trainer.accelerator=cpu"]


@pytest.fixture
def gpu(monkeypatch):
    """Fake a GPU, and fail the test if the run touches it."""

    def touched(*_):
        pytest.fail("took memory on the GPU")

    def reset(device):
        if torch.device(device).type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {device}")
        touched()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", touched)
    monkeypatch.setattr(torch.accelerator, "synchronize", touched)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(machine, "nvidia_smi", lambda field: ["NVIDIA of somebody"])


def test_a_run_on_the_cpu_of_a_machine_that_has_a_gpu(gpu, fit):
    record = record_of(fit(*SMALL, *CPU, "--trainer.max_epochs=1"))
    assert record["hardware"]["gpus"] == ["NVIDIA of somebody"]
    assert record["peak_memory"][0]["device"] == "cpu"


def test_memory_is_that_of_the_allocator_and_that_of_the_driver(monkeypatch):
    figures = {
        "max_memory_allocated": 2**29,
        "max_memory_reserved": 2**30,
        "mem_get_info": (2**30, 2**32),
        "get_device_properties": SimpleNamespace(total_memory=2**32),
    }
    for name, value in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    row = machine.peak_memory(torch.device("cuda", 0))
    assert [row[f"{name}_gib"] for name in ("allocated", "reserved", "in_use", "total")] == [
        0.5,
        1,
        3,
        4,
    ]
    row = machine.peak_memory(torch.device("cpu"))
    assert "in_use_gib" not in row


@pytest.mark.parametrize(("device", "waits"), [("cpu", 0), ("mps", 1), ("cuda:1", 1)])
def test_the_clock_waits_for_every_accelerator(device, waits, monkeypatch):
    awaited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", awaited.append)
    machine.time_when_done(torch.device(device))
    assert awaited == [torch.device(device)] * waits


CUBLAS, NCCL = "CUBLAS_WORKSPACE_CONFIG", "TORCH_NCCL_ASYNC_ERROR_HANDLING"
VARIABLES = [
    (CUBLAS, None, ":4096:8"),
    (CUBLAS, ":16:8", ":16:8"),
    (NCCL, None, "2"),
    (NCCL, "1", "2"),
    (NCCL, "0", "0"),
    (NCCL, "3", "3"),
]


@pytest.mark.parametrize(("name", "before", "after"), VARIABLES)
def test_variables_for_cuda(name, before, after, monkeypatch):
    """cuBLAS is ready for later deterministic training.

    torch reads cuBLAS's variable at the first product only.

    NCCL leaves a failed process to Python: its variable becomes 2 if unset or 1, because torch
    elastic sets 1.
    """
    monkeypatch.delenv(name, raising=False)
    if before:
        monkeypatch.setenv(name, before)
    assert main(["--help"]) == 0
    assert os.environ[name] == after


@pytest.fixture
def nccl(monkeypatch):
    """Fake a process group of NCCL, and return the list of its recorded calls."""
    left = []
    group = SimpleNamespace(initialized=True)

    def abort():
        left.append("aborted")
        group.initialized = False

    monkeypatch.setattr(failures.distributed, "is_initialized", lambda: group.initialized)
    monkeypatch.setattr(failures.distributed, "get_backend", lambda: "nccl")
    monkeypatch.setattr(failures, "abort_process_group", abort)
    return left


def fail(error):
    """Call a callback with an error, and raise the error, as Lightning does.

    After the callback, Lightning moves the model to the host. The callback must leave NCCL, because
    this move would otherwise wait for other ranks.
    """
    StopTogether(60.0).on_exception(None, None, error)
    assert failures.distributed.is_initialized() is False, "nothing waits for the device"
    raise error


LOST = torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0.")
ERRORS = {
    RuntimeError("broken"): RuntimeError,
    RuntimeError("Connection closed by peer [10.0.0.2]:51"): RankLostError,  # gloo's
    KeyboardInterrupt(): KeyboardInterrupt,
    SystemExit(143): SystemExit,
    LOST: RankLostError,
}


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_error_leaves_nccl_before_lightning_waits_for_the_device(error, nccl):
    """NCCL's own errors are understood after its group was left, too."""
    with pytest.raises(ERRORS[error]), explaining_errors():
        fail(error)
    assert nccl == ["aborted"], "and not again"


def test_another_groups_errors_stay(monkeypatch):
    monkeypatch.setattr(
        failures, "abort_process_group", lambda: pytest.fail("gloo's is left at the exit")
    )
    monkeypatch.setattr(failures.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(failures.distributed, "get_backend", lambda: "gloo")
    with pytest.raises(RankLostError), explaining_errors():
        raise RuntimeError("[pair.cc:553] Connection closed by peer [10.0.0.2]:51")


def test_ddp_wraps_the_model_on_the_stream_where_it_computes(monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda: pytest.fail("a stream of its own"))
    monkeypatch.setattr(
        app.training.ddp, "DistributedDataParallel", lambda *args, **kwargs: made.append(kwargs)
    )
    strategy = DDP()
    strategy.parallel_devices = [torch.device("cuda", 0)]
    strategy.cluster_environment = SimpleNamespace(local_rank=lambda: 0)
    strategy.model = nn.Linear(1, 1)
    strategy.configure_ddp()
    assert made[0]["device_ids"] == [0]
    assert made[0]["gradient_as_bucket_view"] is True


def test_dp_copies_the_network_alone():
    model = CIFARCNN()
    assert Replica(model).module is model.network

    class Doubled(CIFARCNN):
        def forward(self, images):
            return super().forward(images) * 2

    doubled = Doubled()
    assert Replica(doubled).module is doubled
    mirrored = CIFARCNN(views="mirror")
    assert Replica(mirrored).module is mirrored


def test_dp_on_one_device_is_a_plain_call(fit):
    run = fit(*SMALL, *CPU, *options(strategy="dp", devices=1, max_epochs=8, test=False))
    assert record_of(run)["time_per_step"]["communication"] == 0
    strategy = DataParallelStrategy([torch.device("cuda", 0)])
    strategy.replica = Replica(CIFARCNN())
    # this must not copy to the device, because none exists
    assert strategy._forward(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


# not Adam, because it amplifies float32's rounding
SGD = ["--model.optimizer=SGD", "--model.optimizer.lr=0.01"]
ON_GPU = ["--trainer.accelerator=cuda", "--trainer.devices=1"]
STEPS = tiny(503, 32, flip=True, test=False, max_epochs=2, log_every_n_steps=1)
EVERY = ["--last_checkpoint.save_top_k=-1", "--last_checkpoint.filename={step}"]
EVERY += ["--last_checkpoint.every_n_train_steps=7"]


@on_gpu
@pytest.mark.parametrize("model", ["CIFARCNN", "FashionMLP"])
def test_float32_is_that_of_the_cpu(model, fit):
    """By default, losses on GPU and CPU are equal, because TF32 is off, even in convolutions."""
    like = ["--data.like=FashionMNIST"] if model == "FashionMLP" else []
    runs = [fit(f"--model={model}", *SGD, *STEPS, *like, *device) for device in (ON_GPU, CPU)]
    np.testing.assert_allclose(*map(losses, runs), rtol=0, atol=1e-5)


@on_gpu
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_exact_resume_with_deterministic_algorithms(precision, fit):
    flags = [*STEPS, *EVERY, *ON_GPU, *options(precision=precision, deterministic=True)]
    try:
        whole = fit(*flags) / "checkpoints"
        middle = ["--run.name=resumed", "--ckpt_path", whole / "step=21.ckpt"]
        resumed = fit(*flags, *middle) / "checkpoints"
    finally:
        torch.use_deterministic_algorithms(False)
    assert difference(whole / "step=28.ckpt", resumed / "step=28.ckpt") == 0


@on_gpu
def test_fsdp_resumes_and_tests(tmp_path):
    flags = ["fit", *SMALL, *ON_GPU, "--trainer.strategy=fsdp", "--run.root", tmp_path]
    start_app(*flags, "--trainer.max_epochs=1")
    start_app(*flags, "--trainer.max_epochs=2", "--ckpt_path=last")
    assert record_of(tmp_path / "LeNet-Synthetic/version_0")["test"] is not None


def test_out_of_memory_is_said_in_one_line(app, tmp_path, monkeypatch):
    """Error line and record name the requested and free memory, and a setting that needs less."""
    message = (
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has "
        "a total capacity of 79.10 GiB of which 5.56 MiB is free. "
        "Process 1 has 1.0 GiB memory in use. "
        "Of the allocated memory 1 GiB is allocated by PyTorch."
    )

    def training_step(*_):
        raise torch.OutOfMemoryError(message)

    monkeypatch.setattr(CIFARCNN, "training_step", training_step)
    error = app.error("fit", "--data=Synthetic", "--data.images=100", *QUIET)
    assert error.startswith(
        "error: out of memory on the CUDA: 20.00 MiB were requested, and 5.56 MiB are free: give "
    )
    remedy = (
        "give --data.batch_size 32 with --trainer.accumulate_grad_batches 2, "
        "for the same training step, or "
    )
    assert remedy in error, "half of the batch at once"
    record = record_of(tmp_path / "runs/LeNet-Synthetic/version_0")
    assert (record["status"], record["error"]) == ("failed", error.removeprefix("error: "))
    with (
        pytest.raises(UserError, match=r"out of memory on the host: 4611686018427387904 bytes"),
        explaining_errors(),
    ):
        torch.empty(2**62, dtype=torch.uint8)
