"""What our patches expect of Lightning and torch is there; an upgrade that takes it away fails here, with its name."""

import importlib
import inspect
import shlex
from collections.abc import Callable

import pytest
from harness import QUIET, error_of

from app.system import lightning_patches, torch_patches  # noqa: F401  (declare what they expect)
from app.system.lightning_patches import COMPLAINTS, Complaint, complaint
from app.system.patches import EXPECTED, expects, missing

App = Callable[..., tuple[int, str]]
SMALL = ["--data", "Synthetic", "--data.size", "64", "--data.batch_size", "16", *QUIET]


@pytest.mark.parametrize("patch", list(EXPECTED))
def test_the_installed_version_has_what_a_patch_expects(patch: str) -> None:
    said = missing(patch)
    assert said is None, said


@pytest.mark.parametrize(
    "name",
    [
        "lightning.pytorch.trainer.trainer:Trainer._gone",  # a method, or what __init__ sets
        "lightning.pytorch.loops.fit_loop:_FitLoop.epoch_progress._gone",
        "torch.distributed:_gone",
        "lightning.gone:Trainer",
    ],
)
def test_a_name_that_is_gone_is_said(name: str) -> None:
    library = name.partition(".")[0]

    @expects("torch.nn:Module._parameters", name)  # only annotated: found all the same
    def patch() -> None: ...

    key = f"{__name__}.patch"
    try:
        said = missing(key) or ""
    finally:
        del EXPECTED[key]
    assert said.startswith(f"{key} needs {name}, which {library} ")
    assert said.endswith("does not have: see what took its place")


@pytest.mark.parametrize("known", COMPLAINTS, ids=lambda known: known.module.rpartition(".")[2])
def test_lightning_still_complains_in_these_words(known: Complaint) -> None:
    assert known.text in inspect.getsource(importlib.import_module(known.module))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor=val_los",
            "EarlyStopping's monitor val_los is not logged: give one of ",
        ),
        (
            "--trainer.val_check_interval 100",
            "--trainer.val_check_interval 100: an epoch has 4 batches: give 4 at most, or ",
        ),
        (
            "--trainer.accumulate_grad_batches 2 --trainer.callbacks+=GradientAccumulationScheduler "
            "--trainer.callbacks.scheduling='{4: 2}'",
            "contradict each other: leave one of them out",
        ),
        (
            "--model.scheduler OneCycleLR --model.scheduler.max_lr 0.1 --model.scheduler.total_steps 2 "
            "--model.scheduler_interval step",
            "--model.scheduler: Tried to step 3 times. The specified number of total steps is 2",
        ),
        ("--model.scheduler StepLR --model.scheduler.step_size 0", "--model.scheduler: integer modulo by zero"),
        ("--trainer.precision transformer-engine", "transformer"),
    ],
    ids=["early-stopping", "val-check-interval", "accumulation", "scheduler-steps", "scheduler-zero", "precision"],
)
def test_what_only_training_shows_is_said_in_one_line(flags: str, said: str, app: App) -> None:
    assert said in error_of(*app("fit", *SMALL, *shlex.split(flags)))


def test_other_errors_are_left_alone() -> None:
    assert complaint(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert complaint(ValueError("Expected more than 1 value per channel when training")) is None
