"""A stopped and resumed run ends with the weights of an uninterrupted one, bit for bit on the CPU.

Some tests stop a run. Others resume from a checkpoint that an uninterrupted run has written within
an epoch.
"""

import fcntl
import json
import os
import re

import pandas as pd
import pytest
import torch
from forked import fork_app, fork_fit
from harness import (
    RECIPE,
    SLOW,
    acts,
    bit_flipped,
    difference,
    last_of,
    on_cpu,
    options,
    record_of,
    slow,
    tiny,
)
from lightning import Trainer

from app.command.checkpoint_file import read
from app.command.checkpoints import check_checkpoint
from app.errors import UserError
from app.lab.verify.differences import Recorded, differences
from app.modules import CIFARCNN

# 453 training images: 15 steps per epoch, the last one with 5 images
DATA = tiny(503, 32, flip=True)
EVERY = ["--last_checkpoint.save_top_k", "-1", "--last_checkpoint.filename={step}"]
RECORDING = ["--trainer.callbacks+=app.lab.verify.recording.Recording"]
RECORDING += ["--trainer.callbacks.steps=1000", "--trainer.callbacks.epoch_steps=15"]
STEPS = [*options(test=False, max_epochs=3), *EVERY]
SAVING = ["--last_checkpoint.every_n_train_steps=7"]
PLAIN = [*DATA, "--model=CIFARCNN", "--model.optimizer.lr=0.05"]
CNN = [*PLAIN, *SAVING]
ONE_CYCLE = ["--model.scheduler=OneCycleLR", "--model.scheduler.max_lr=0.01"]
ONE_CYCLE += ["--model.scheduler.total_steps=45", "--model.scheduler_interval=step"]
MODELS = {
    "adam-onecycle": [*CNN, "--model.optimizer=Adam", *ONE_CYCLE],
    "plateau": [*CNN, "--model.scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau"],
    "recipe": [*CNN, *RECIPE, *options(gradient_clip_val=1)],
    "steps-read-early": [*DATA, "--model=user_code.OneCycle", *SAVING],
    "double-precision": [*CNN, "--trainer.precision=64-true"],
}


def checkpoints(run):
    """Return a run's checkpoints by step."""
    return {
        int(path.stem.removeprefix("step=")): path
        for path in (run / "checkpoints").glob("step=*.ckpt")
    }


def epochs(run):
    """Return each epoch's number, first learning rate, losses and accuracy from the record."""
    columns = ("epoch", "lr", "train_loss", "val_loss", "val_acc")
    return [[row[name] for name in columns] for row in record_of(run)["epochs"]]


@pytest.mark.parametrize(
    "model", ["plateau", *(slow(name) for name in MODELS if name != "plateau")]
)
def test_resume_within_an_epoch_is_exact(model, fit):
    flags = [*MODELS[model], *STEPS, *RECORDING, *options(log_every_n_steps=5)]
    whole = fit(*flags, "--run.name=whole")
    saved = checkpoints(whole)
    assert sorted(saved) == [7, 14, 21, 28, 35, 42]
    resumed = fit(*flags, "--run.name=resumed", f"--ckpt_path={saved[21]}")
    assert sorted(checkpoints(resumed)) == [28, 35, 42]
    before = Recorded(whole)
    del before.ranks[0]["steps"][21:]
    assert differences(Recorded(whole), Recorded(resumed, before), tolerance=0.0) == {}
    assert difference(saved[42], checkpoints(resumed)[42]) == 0
    assert epochs(resumed) == epochs(whole)
    assert len(epochs(whole)) == 3
    logged, expected = (pd.read_csv(run / "metrics.csv") for run in (resumed, whole))
    assert logged.equals(expected[expected["step"] >= 21].reset_index(drop=True))


def test_last_continues_a_finished_training(app, tmp_path):
    """`--ckpt_path last` prolongs a training, and remembers the best checkpoint so far."""
    flags = [*PLAIN, *options(test=False, name="x")]
    runs = tmp_path / "runs/x"
    # the third run resumes the second one
    for epochs_wanted, resume in (("3", []), ("1", []), ("3", ["--ckpt_path=last"])):
        app("fit", *flags, f"--trainer.max_epochs={epochs_wanted}", *resume)
    whole, resumed = (runs / version for version in ("version_0", "version_1"))
    assert difference(whole, resumed) == 0
    assert epochs(resumed) == epochs(whole)
    assert not (runs / "version_2").exists(), "one training is one run"
    lines, expected = (pd.read_csv(run / "epochs.csv") for run in (resumed, whole))
    assert lines["epoch"].tolist() == [1, 2, 3]
    assert lines.filter(regex="lr|train|val").equals(expected.filter(regex="lr|train|val"))
    pd.testing.assert_frame_equal(
        *(pd.read_csv(run / "metrics.csv") for run in (whole, resumed)), atol=1e-6
    )
    changed = ["--trainer.max_epochs=4", "--ckpt_path=last", "--model.optimizer.lr=0"]
    text = app.error("fit", *flags, *changed)
    assert (
        "--model.optimizer.lr 0.0: a resumed run uses the checkpoint's optimizer, whose "
        "value is 0.05" in text
    )


@pytest.mark.parametrize("model", ["AccuracyFalls", "LossRises"])
def test_resumed_run_remembers_the_best_checkpoint(model, fit):
    """A resumed run keeps the first epoch's checkpoint as the best: later metrics are worse."""
    flags = [f"--model=user_code.{model}", "--data=user_code.TheirData", "--run.name=x"]
    for count, resume in (("2", []), ("4", ["--ckpt_path=last"])):
        run = fit(*flags, *resume, f"--trainer.max_epochs={count}")
    assert read(run / "checkpoints/best.ckpt")["epoch"] == 0


@SLOW
def test_config_of_a_run_selects_that_run(app, fit, tmp_path):
    """A run's config selects this run instead of the newest of its name.

    A finished training is rejected.
    """
    flags = [*PLAIN, *options(test=False, name="x")]
    runs = tmp_path / "runs/x"
    for seed in ("1", "2"):
        fit(*flags, "--trainer.max_epochs=1", f"--seed_everything={seed}")
    first = ["--config", runs / "version_0/config.yaml", "--ckpt_path=last"]
    message = app.error("fit", *first)
    assert f"{runs / 'version_0'}" in message
    assert "has been trained for 1 epochs, as many as --trainer.max_epochs 1: give more" in message
    run = fit(*first, "--trainer.max_epochs=2")
    assert run == runs / "version_0"
    assert record_of(run)["resumed_from"] == str(last_of(run))
    # a folder stands for its best checkpoint, or for its last one to resume
    for test, named in (
        (1, ["--config", run / "config.yaml", "--ckpt_path=best"]),
        (2, [f"--ckpt_path={run}"]),
    ):
        app("test", *named)
        assert record_of(run / f"test_{test}")["resumed_from"] == str(run / "checkpoints/best.ckpt")
    fit(*flags, "--seed_everything=1", *options(max_epochs=3), f"--ckpt_path={run}")
    assert record_of(run)["resumed_from"] == str(run / "checkpoints/last.ckpt")


IN_WINDOWS = [*PLAIN, *options(test=False, max_epochs=1, accumulate_grad_batches=3)]
OWN = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.every_n_train_steps=2"]
OWN += ["--trainer.callbacks.save_top_k=-1", "--last_checkpoint.every_n_train_steps=2"]
SAVES = {"straight": OWN, "lightning": ["--last_checkpoint.train_time_interval=0:00:00"]}


def positions(folder):
    """Return the numbers of batches after which the checkpoints below a folder were saved."""
    loops = [read(path)["loops"]["fit_loop"] for path in folder.rglob("*.ckpt")]
    return {loop["epoch_loop.batch_progress"]["current"]["processed"] for loop in loops}


@pytest.mark.parametrize("loop", ["straight", slow("lightning")])
def test_kills_inside_accumulation_windows_lose_no_gradients(loop, tmp_path):
    """No checkpoint is written inside a window, because it would lose the first batches' gradients.

    A resumed run has not saved its first step, and an interval of time ends after any batch.
    """
    flags = [*IN_WINDOWS, *SAVES[loop], *options(root=tmp_path, loop=loop)]
    whole = fork_fit(tmp_path, *flags)
    killed = [*flags, "--run.name=killed", "--ckpt_path=auto"]
    for _ in range(2):
        fork_app("fit", *killed, *acts("exit", 8), code=9)
        assert positions(tmp_path / "killed") <= {3, 6}
    assert difference(whole, fork_fit(tmp_path, *killed)) == 0


@pytest.mark.parametrize("loop", ["straight", "lightning"])
def test_a_stop_inside_an_accumulation_window_waits_for_its_end(loop, app, tmp_path):
    app("fit", *IN_WINDOWS, *options(name="x", loop=loop), *acts("stop", 7))
    assert positions(tmp_path) == {9}
    assert record_of(tmp_path / "runs/x/version_0")["steps"] == 3
    run = ["--run.name=y", "--last_checkpoint.save_on_exception=true", *options(loop=loop)]
    _, out = app.run("fit", *IN_WINDOWS, *run, *acts("fail", 7))
    assert "no checkpoint is saved on the RuntimeError, because it would lose the gradients" in out
    assert not [*(tmp_path / "runs/y").rglob("*.ckpt")]


@SLOW
def test_checkpoints_inside_accumulation_windows_are_refused(app, fit):
    """A user's save and a validation's save are rejected."""
    message = app.error("fit", *IN_WINDOWS, *acts("save", 7))
    assert "call it where (batch_idx + 1) % 3 is 0, or with weights_only=True" in message
    message = app.error("fit", *IN_WINDOWS, "--trainer.val_check_interval=0.5")
    assert "--trainer.val_check_interval 0.5 validates and saves inside the 3 batches" in message
    assert "give a whole number, a multiple of 3" in message
    assert positions(fit(*IN_WINDOWS, "--trainer.val_check_interval=6")) <= {6, 12, 15}


UP_TO_TWO = [*PLAIN, *options(test=False, max_epochs=2)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Directory of an uninterrupted run of two epochs."""
    return fork_fit(tmp_path_factory.mktemp("whole"), *UP_TO_TWO)


@pytest.mark.parametrize(("steps", "every"), [slow((1, 15, 16, 29), "null"), ((15,), "5")], ids=str)
def test_run_stopped_by_max_steps_resumes_exactly(steps, every, whole, fit):
    """A run that stops and resumes several times has an uninterrupted run's weights and records.

    A checkpoint due after an epoch's last step is written at the epoch's end, with validation and
    mean loss.
    """
    flags = [*UP_TO_TWO, f"--last_checkpoint.every_n_train_steps={every}"]
    fit(*flags, f"--trainer.max_steps={steps[0]}")
    for step in (*steps[1:], -1):
        resumed = fit(*flags, "--ckpt_path=last", f"--trainer.max_steps={step}")
    assert difference(whole, resumed) == 0
    assert epochs(resumed) == epochs(whole)


def test_early_stopping_saves_where_it_stops(fit):
    """Early stopping ends a run at a validation within an epoch.

    If `min_epochs` epochs are not complete, it waits for the end of the last one. Then checkpoints
    are saved only at ends of epochs.
    """
    early = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val_loss"]
    early += ["--trainer.callbacks.min_delta=100", "--trainer.callbacks.patience=1"]
    flags = [*PLAIN, "--run.test=false", *early]
    middle = fit(*flags, *options(val_check_interval=5, max_epochs=2))
    assert read(last_of(middle))["global_step"] == 10
    later = fit(*flags, *EVERY, *options(min_epochs=3, max_epochs=4))
    assert sorted(checkpoints(later)) == [15, 30, 45]


@SLOW
def test_resume_across_strategies(fit, tmp_path):
    """A checkpoint of ddp resumes under ddp bit for bit, under other strategies up to rounding."""
    ddp = [*CNN, *STEPS, *on_cpu("ddp_fork")]
    saved = checkpoints(fork_fit(tmp_path, *ddp))
    resumed = fork_fit(tmp_path, *ddp, "--run.name=resumed", f"--ckpt_path={saved[21]}")
    assert difference(saved[42], checkpoints(resumed)[42]) == 0
    for strategy in ("auto", "dp"):
        run = fit(*CNN, *STEPS, *on_cpu(strategy, name=strategy), f"--ckpt_path={saved[21]}")
        assert difference(saved[42], checkpoints(run)[42]) < 1e-5


def test_another_batch_size_in_the_middle_of_an_epoch_is_refused(app, fit):
    saved = checkpoints(fit(*CNN, *STEPS, "--trainer.max_steps=10"))[7]
    assert "batch_size 32" in app.error(
        "fit", *CNN, *STEPS, "--data.batch_size=16", f"--ckpt_path={saved}"
    )


@SLOW
def test_changed_settings_start_a_new_run(app, tmp_path):
    """A changed setting, an earlier checkpoint, or a run in progress leads to a new run.

    One line gives the reason.
    """
    runs, newest = tmp_path / "runs/x", ["--ckpt_path=auto"]
    flags = [*CNN, *EVERY, *options(test=False, name="x"), "--trainer.max_epochs"]
    app("fit", *flags, "1")
    first = runs / "version_0"
    descriptor = os.open(first, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # as a run in progress does
    assert f"not continuing {first}: it is still running" in app("fit", *flags, "2", *newest)
    os.close(descriptor)
    out = app("fit", *flags, "2", "--ckpt_path", checkpoints(first)[7])
    assert f"not continuing {first}: it has newer checkpoints" in out
    out = app("fit", *flags, "3", "--data.flip=false", *newest)
    assert f"not continuing {runs}/version_2: --data.flip differs" in out
    records = [record_of(runs / f"version_{n}") for n in range(4)]
    assert [len(record["epochs"]) for record in records] == [1, 2, 2, 3]
    assert not any(record["parts"] for record in records)


@SLOW
def test_auto_takes_the_newest_readable_checkpoint(app, tmp_path):
    """`auto` takes the newest readable checkpoint, or none; a finished training is only tested."""
    flags = [*PLAIN, "--run.name=x", "--ckpt_path=auto", "--trainer.max_epochs"]
    runs = tmp_path / "runs/x"
    last = runs / "version_0/checkpoints/last.ckpt"
    for earlier, epochs_wanted in enumerate(("1", "2", "2")):
        out = app("fit", *flags, epochs_wanted)
        record = record_of(runs / "version_0")
        assert (record["status"], len(record["epochs"])) == ("completed", int(epochs_wanted))
        assert record["resumed_from"] == (str(last) if earlier else None)
        assert record["test"] is not None
        assert len(record["parts"]) == earlier
        before = sum(part["train_s"] for part in record["parts"])
        assert record["train_s"] > before - 1e-6 >= 0 or not earlier
        if not earlier:
            last.with_name("newer.ckpt").write_bytes(last.read_bytes()[:1000])
    assert f"resuming from {last}" in out
    (runs / "version_0/run.json").write_text("")  # as after a loss of power
    assert f"resuming from {last}" in app("fit", *flags, "2")


FLAGS = [*PLAIN, *options(name="x", test=False), "--trainer.max_epochs"]


def test_damaged_checkpoint_is_rejected_or_replaced(app, tmp_path):
    """A damaged checkpoint is rejected by name or path; `auto` renames it and uses an earlier one.

    If no checkpoint is intact, `auto` rejects the run instead of starting it anew.
    """
    folder = tmp_path / "runs/x/version_0/checkpoints"
    app("fit", *FLAGS, "2")
    last = folder / "last.ckpt"
    bit_flipped(last)
    for command, checkpoint in (("fit", "last"), ("test", "last"), ("predict", last)):
        message = app.error(command, *FLAGS, "3", f"--ckpt_path={checkpoint}")
        assert re.match(rf"error: --ckpt_path {last}: damaged \(.+\): use {folder}/", message)
    (folder / "best.ckpt").unlink()
    out = app("fit", *FLAGS, "3", "--ckpt_path=auto")
    assert (
        f"{last} is damaged: it is kept as last.ckpt.damaged, and "
        f"the run continues from {folder}/last-1.ckpt" in out
    )
    second = record_of(tmp_path / "runs/x/version_0")
    assert (second["resumed_from"], len(second["epochs"])) == (str(folder / "last-1.ckpt"), 3)
    assert (folder / "last.ckpt.damaged").exists()
    for path in (tmp_path / "runs").rglob("*.ckpt"):
        bit_flipped(path)
    message = app.error("fit", *FLAGS, "4", "--ckpt_path=auto")
    assert "from none of the 3 checkpoints under" in message
    assert "give another --run.name to begin anew" in message


@SLOW
def test_checkpoint_without_a_needed_part_is_rejected(app, fit, tmp_path):
    good = read(last_of(fit(*FLAGS, "1")))
    bad = tmp_path / "bad.ckpt"
    trainer = Trainer(max_epochs=2, logger=False)
    weights_alone = {key: good[key] for key in ("state_dict", "pytorch-lightning_version")}
    for content in (
        weights_alone,
        good | {"loops": {"fit_loop": {}}},
        good | {"optimizer_states": ["x"]},
    ):
        torch.save(content, bad)
        with pytest.raises(UserError, match=f"^--ckpt_path {bad}: training cannot resume"):
            check_checkpoint(str(bad), CIFARCNN(), None, trainer, False)
    resume = [*FLAGS, "2", f"--ckpt_path={bad}"]
    for key in ("callbacks", "lr_schedulers"):
        torch.save(good | {key: 3.5}, bad)
        message = app.error("fit", *resume)
        assert "--ckpt_path: the checkpoint cannot be restored" in message
    torch.save(weights_alone, bad)
    app("test", *resume)  # weights are enough to test
    flags = ["--last_checkpoint.save_weights_only=true", "--run.name=y"]
    fit(*FLAGS, "1", *flags)
    assert "it has no " in app.error("fit", *FLAGS, "2", *flags, "--ckpt_path=last")
    out = app("fit", *FLAGS, "2", "--run.name=y", "--ckpt_path=auto")
    assert "resuming from" in out, "from best.ckpt, though weights alone are newer"


def test_last_is_found_without_the_record(app, fit):
    """`--ckpt_path last` finds the checkpoint's file if the record lacks it or is unreadable."""
    run = fit(*FLAGS, "1")
    record = record_of(run)
    for content in (json.dumps(record | {"checkpoint": None, "epochs": []}), '{"checkpoint": 7}'):
        (run / "run.json").write_text(content)
        out = app("validate", "--config", run / "config.yaml", "--ckpt_path=last")
        assert f"{run}/run.json cannot be read" in out or '"checkpoint": null' in content


TUNED = ["--data=user_code.TheirData", *options(accelerator="cpu", test=False, max_epochs=3)]
TUNED += ["--model=saving_code.FineTuned", "--trainer.callbacks+=BackboneFinetuning"]
TUNED += ["--trainer.callbacks.unfreeze_backbone_at_epoch=1", "--trainer.callbacks.train_bn=false"]


@pytest.mark.parametrize("steps", [slow(3), slow(5), 8, slow(10)])
def test_resumed_fine_tuning_trains_the_same_layers(steps, tmp_path):
    """A run stopped before, at or after the epoch that unfreezes the backbone goes on as whole."""
    whole = fork_fit(tmp_path / "whole", *TUNED)
    fork_fit(tmp_path, *TUNED, "--run.name=cut", f"--trainer.max_steps={steps}")
    cut = fork_fit(tmp_path, *TUNED, "--run.name=cut", "--ckpt_path=last")
    assert record_of(cut)["steps"] == 15
    assert difference(whole, cut) == 0


@SLOW
def test_unfrozen_layers_are_averaged_over_the_ranks(tmp_path):
    """DDP wraps the model again when a callback unfreezes layers, also with virtual devices."""
    two = on_cpu("ddp_fork")
    fork_fit(tmp_path, *TUNED, *two)  # it would end with "ranks differ"
    flags = [*TUNED, *options(virtual_devices=2, global_batch=8, threads=1)]
    alone = fork_fit(tmp_path / "alone", *flags)
    assert difference(alone, fork_fit(tmp_path, *flags, *two)) == 0


def test_module_that_steps_its_own_optimizer(tmp_path):
    """Lightning counts no steps, so batches count as steps, also in a resumed run."""
    flags = ["--model=saving_code.StepsItself", "--data=user_code.TheirData", "--run.name=x"]
    flags += [*options(root=tmp_path, test=False, accelerator="cpu"), "--trainer.max_epochs"]
    line = "StepsItself steps SGD itself, and Lightning counts no such step: each batch counts as "
    line += "a step. Use `self.optimizers()`, whose steps Lightning counts"
    for epochs, resume in (("1", []), ("2", ["--ckpt_path=last"])):
        out = fork_app("fit", *flags, epochs, *resume)
        assert out.count(line) == 1
        run = tmp_path / "x/version_0"
        assert record_of(run)["steps"] == 5 * int(epochs)
        assert read(run / "checkpoints/last.ckpt")["global_step"] == 5 * int(epochs)
