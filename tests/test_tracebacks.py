"""Errors of objects that a flag created, and of the user's code."""

import pytest
from forked import fork_app
from harness import ROOT, on_cpu, refusals, slow, tiny

SMALL = tiny(test=False, max_epochs=1, accelerator="cpu")
V2 = "--data.augment torchvision.transforms.v2."
CROP = f"{V2}RandomCrop --data.augment.size 64"
TOO_LARGE = (
    "error: --data.augment RandomCrop: Required crop size (64, 64) is larger than input image size "
    "(32, 32)."
)
INNER = "{class_path: torchvision.transforms.v2.RandomCrop, init_args: {size: 64}}"
LINEAR = "--data.augment torch.nn.Linear --data.augment.in_features 3 --data.augment.out_features 3"
CALL, SET = "--trainer.callbacks+=", "--trainer.callbacks."


SCHEDULED = f"{CALL}GradientAccumulationScheduler {SET}scheduling='{{4: 2}}'"
ONE_CYCLE = (
    "--model.scheduler OneCycleLR --model.scheduler.max_lr 0.1 --model.scheduler.total_steps 2"
)


OBJECTS = {
    CROP: TOO_LARGE[7:],
    f"{CROP} --data.num_workers 0": TOO_LARGE[7:],
    f"{V2}RandomApply --data.augment.transforms '[{INNER}]' --data.augment.p 1": (
        "--data.augment.transforms RandomCrop: Required crop size"
    ),
    f"{V2}ToPILImage": (
        "--data.augment ToPILImage turns torch.uint8 (3, 32, 32) into Image: it must"
    ),
    f"{V2}MixUp --data.augment.num_classes 10": (
        "--data.augment MixUp: labels should be index based"
    ),
    LINEAR: "--data.augment Linear: mat1 and mat2 must have the same dtype",
    f"{CALL}LearningRateFinder {SET}num_training_steps 0": (
        "LearningRateFinder: When using the learning rate"
    ),
    f"{CALL}ModelSummary {SET}max_depth=-5": (
        "--trainer.callbacks ModelSummary: `max_depth` can be -1, 0 or > 0"
    ),
    f"{CALL}ModelCheckpoint {SET}dirpath /proc/x": "the checkpoint cannot be written",
    f"{CALL}BackboneFinetuning": (
        "--trainer.callbacks BackboneFinetuning: 'CIFARCNN' object has no attribute"
    ),
    "--model.optimizer LBFGS": "--model.optimizer LBFGS: view size is not compatible",
    "--model.optimizer Adam --model.optimizer.differentiable true": (
        "--model.optimizer Adam: a leaf Variable that requires grad"
    ),
    "--trainer.profiler lightning.pytorch.profilers.XLAProfiler": (
        "--trainer.profiler XLAProfiler: Requirement"
    ),
    f"{CALL}EarlyStopping {SET}monitor=val_los": "EarlyStopping: Early stopping condi",
    "--trainer.val_check_interval 100": (
        "--trainer.val_check_interval: `val_check_interval` (100) must be"
    ),
    f"{SCHEDULED} --trainer.accumulate_grad_batches 2": (
        "--trainer.accumulate_grad_batches: You have set"
    ),
    f"{ONE_CYCLE} --model.scheduler_interval step": (
        "--model.scheduler OneCycleLR: Tried to step 3 times."
    ),
}


test_error_names_the_flag_of_the_failing_object = refusals(OBJECTS, *SMALL)


@pytest.mark.parametrize("strategy", [slow("ddp"), "ddp_fork"])
def test_error_of_all_ranks_is_printed_once(strategy, tmp_path):
    flags = on_cpu(strategy, root=tmp_path)
    message = fork_app.error("fit", *SMALL, *flags, *CROP.split())
    assert message.replace("rank 1: ", "") == TOO_LARGE  # the error of the rank that fails first


def test_verbose_shows_frames_of_the_library(app):
    for workers in ("0", "1"):
        out = app(
            "fit", *SMALL, *CROP.split(), f"--data.num_workers={workers}", "--verbose", code=2
        )
        assert "make_params" in out
        assert out.splitlines()[-1] == TOO_LARGE


CODE = [
    "--data.augment raising_code.Augment",
    "--model raising_code.Built",
    "--trainer.callbacks+=raising_code.Calls",
    "--model raising_code.Model",
    "--model raising_code.Model --trainer.strategy ddp_fork --trainer.devices 2",
    slow("--model raising_code.Late --trainer.strategy ddp --trainer.devices 2"),
]


@pytest.mark.parametrize("flags", CODE)
def test_traceback_of_user_code_is_short_and_printed_once(flags, tmp_path):
    """The traceback is printed once, and has only the user's two frames and their caller."""
    out = fork_app("fit", *SMALL, "--run.root", tmp_path, *flags.split(), code=1)
    assert out.count("Traceback") == 1, out
    _, *frames = out.partition("Traceback")[2].split("  File ")
    assert len(frames) == 3, out
    users = [f'"{ROOT}/tests/raising_code.py", line ' in frame for frame in frames]
    assert users == [False, True, True]
    assert "self.fail(" in frames[1]
