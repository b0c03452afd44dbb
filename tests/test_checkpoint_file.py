"""Checkpoints are written whole or not at all, despite failures; changed content is detected."""

import errno
import os
from contextlib import nullcontext, suppress
from pathlib import Path
from pickle import UnpicklingError
from unittest.mock import Mock

import pytest
import torch
from forked import fork_app, fork_fit
from harness import bit_flipped, last_of, on_cpu, options
from lightning.fabric.plugins.io import TorchCheckpointIO

from app.command import checkpoints
from app.command.checkpoint_file import LAST, PREVIOUS, SNAPSHOT, CheckpointFiles, read
from app.command.checkpoints import (
    RunCheckpoint,
    check_checkpoint,
    find_checkpoint,
    is_newest,
    newest_checkpoint,
    read_earlier,
)
from app.errors import UserError
from app.modules.weights import checkpoint_of
from app.record import Record
from app.system import files


def content(step, size=40):
    return {"global_step": step, "state_dict": {"weight": torch.full((size,), float(step))}}


def test_changed_content_is_detected(tmp_path):
    path = tmp_path / LAST
    CheckpointFiles().save_checkpoint(content(1), path)
    assert read(path)["global_step"] == 1
    whole = path.read_bytes()
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        checkpoint = None
        with suppress(UserError):
            checkpoint = read(path)
        if checkpoint is not None:  # the bit lies outside of the content
            assert (checkpoint["global_step"], checkpoint["state_dict"]["weight"].tolist()) == (
                1,
                [1.0] * 40,
            )
    for length in range(0, len(whole), 13):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=f"{path}: (damaged|not a checkpoint)"):
            read(path)


def test_checkpoints_of_lightning_and_torch_are_loaded(tmp_path):
    """Checkpoints that Lightning or torch wrote are loaded, also in torch's old format.

    A changed bit is detected by the zip archive's checksums, which torch ignores. A file without
    weights is rejected.
    """
    path = tmp_path / "theirs.ckpt"
    TorchCheckpointIO().save_checkpoint(content(2, 4000), path)
    assert CheckpointFiles().load_checkpoint(path)["global_step"] == 2
    bit_flipped(path)  # inside the tensor
    with pytest.raises(UserError, match=r"theirs.ckpt: damaged \(archive/data/0\)"):
        read(path)
    torch.save(content(3), path, _use_new_zipfile_serialization=False)
    assert read(path)["global_step"] == 3
    for wrong in ([1], {"state_dict": 1}):
        torch.save(wrong, path)
        with pytest.raises(UserError, match="it holds no weights"):
            read(path)


class Call:
    def __reduce__(self):
        return os.system, ("touch ran",)


def test_snapshot_and_remote_path(tmp_path):
    """A snapshot is loaded as a copy; Lightning writes remote paths, but runs no code from them."""
    plugin = CheckpointFiles()
    plugin.snapshot = content(2)
    for path in (tmp_path / LAST, "memory://x.ckpt"):
        plugin.save_checkpoint(content(1), path)
        assert plugin.load_checkpoint(path)["global_step"] == 1
    plugin.load_checkpoint(SNAPSHOT).clear()
    assert plugin.load_checkpoint(SNAPSHOT)["global_step"] == 2
    plugin.save_checkpoint({"state_dict": {"w": Call()}}, "memory://x.ckpt")
    with pytest.raises(UnpicklingError):
        plugin.load_checkpoint("memory://x.ckpt")


def test_best_checkpoint_of_a_moved_run(tmp_path):
    """It has the recorded name, or begins with `best`; an unreadable record counts as none."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    record = Record()
    record.checkpoint.best = "/gone/epoch=3.ckpt"
    record.save(tmp_path / "run.json")
    for time, name in enumerate((LAST, "epoch=3.ckpt", PREVIOUS)):
        CheckpointFiles().save_checkpoint(content(1), folder / name)
        os.utime(folder / name, (time, time))
    configs = [str(tmp_path / "config.yaml")]
    assert find_checkpoint("best", configs, "", "") == str(folder / "epoch=3.ckpt")
    CheckpointFiles().save_checkpoint(content(1), folder / "best.ckpt")
    (tmp_path / "run.json").write_text("{")
    assert find_checkpoint("best", configs, "", "") == str(folder / "best.ckpt")
    assert checkpoint_of(tmp_path) == folder / "best.ckpt"
    assert checkpoint_of(tmp_path, resumes=True) == folder / LAST
    assert read_earlier(tmp_path / "none.json") == Record()
    with pytest.raises(UserError, match=r"bets.ckpt: .*: did you mean .*/best.ckpt\?$"):
        find_checkpoint(str(folder / "bets.ckpt"), [], "", "")
    for name in (PREVIOUS, "best.ckpt"):
        (folder / name).write_bytes(b"")
    with pytest.raises(UserError, match=f"best.ckpt: .*: use {folder}/epoch=3.ckpt"):
        find_checkpoint("best", configs, "", "")


def test_newest_checkpoint_by_hand(tmp_path, monkeypatch):
    """It is whole, and of this command line and launcher; a newer `best` does not count."""
    training = {"loops": {}, "optimizer_states": []}
    saved = []
    for time, (command, launcher, extra) in enumerate(
        [
            ("fit", "a", training),
            ("fit", "a", {}),
            ("fit", "b", training),
            ("test", "a", training),
            ("fit", "a", None),
        ]
    ):
        path = tmp_path / f"version_{time}/checkpoints" / LAST
        path.parent.mkdir(parents=True)
        Record(command=command, launchers=[launcher]).save(path.parent.parent / "run.json")
        if extra is None:
            path.write_bytes(b"damaged")
        else:
            CheckpointFiles().save_checkpoint(content(1) | extra, path)
        os.utime(path, (time, time))
        saved.append(path)
    monkeypatch.setattr(checkpoints, "rank_zero_info", Mock())
    assert newest_checkpoint(tmp_path, None) == str(saved[3])
    assert checkpoints.rank_zero_info.call_count == 2, "why, and where it is kept"
    assert [path.exists() for path in saved] == [True] * 4 + [False]
    assert saved[4].with_name(f"{LAST}.damaged").read_bytes() == b"damaged"
    assert newest_checkpoint(tmp_path, ("fit", ["a", "c"])) == str(saved[0])
    assert newest_checkpoint(tmp_path, ("fit", ["c"])) is None
    saved[0].unlink()
    with pytest.raises(UserError, match="training can resume from none of the 1 checkpoints"):
        newest_checkpoint(tmp_path, ("fit", ["a"]))
    paths = []
    for time, name in enumerate((PREVIOUS, LAST, "best.ckpt")):
        path = saved[1].with_name(name)
        path.touch()
        os.utime(path, (time, time))
        paths.append(path)
    assert list(map(is_newest, paths)) == [False, True, True]


RESUMED = [  # batches, epochs and threads, whether at an epoch's end, and of a finished training
    (4, 0, 1, False, False, None),
    (3, 0, 1, True, False, None),
    (3, 0, 1, False, False, "after batch 3 of an epoch, inside an optimizer step"),
    (4, 2, 1, True, False, "has been trained for 2 epochs, as many as --trainer.max_epochs 2"),
    (4, 2, 1, True, True, None),
    (4, 0, 2, True, True, "--run.threads 1: .* was trained with 2"),
]


@pytest.mark.parametrize(
    ("batches", "epochs", "threads", "is_last", "finished", "problem"), RESUMED
)
def test_training_resumes(batches, epochs, threads, is_last, finished, problem, tmp_path):
    """It resumes after a window's end, and after an epoch's end, whose window is shorter."""
    progress = {"current": {"processed": batches}, "is_last_batch": is_last}
    loop = {"epoch_progress": {"current": {"processed": epochs}}}
    loop |= {"epoch_loop.batch_progress": progress, "epoch_loop.state_dict": {"threads": threads}}
    resumed = {"loops": {"fit_loop": loop}, "optimizer_states": []}
    CheckpointFiles().save_checkpoint(content(1) | resumed, tmp_path / LAST)
    trainer = Mock(max_epochs=2, max_steps=-1, accumulate_grad_batches=2)
    trainer.fit_loop.epoch_loop.kept = {"threads": 1}
    with nullcontext() if problem is None else pytest.raises(UserError, match=problem):
        check_checkpoint(str(tmp_path / LAST), Mock(), Mock(), trainer, finished)


def saving(monitor):
    """Return a callback that only counts the checkpoints that it would save."""
    callback = RunCheckpoint(monitor=monitor, mode="max")
    callback._should_skip_saving_checkpoint = lambda trainer: False
    callback._should_save_on_train_epoch_end = lambda trainer: True
    callback._save_topk_checkpoint = Mock()
    return callback


STOPS = [(None, 0, 9, 0), (None, 1, 9, 2), (None, 0, 4, 2), ("val_acc", 1, 4, 0)]


@pytest.mark.parametrize(("monitor", "stopped", "last_step", "saves"), STOPS)
def test_a_stop_within_an_epoch_is_saved(monitor, stopped, last_step, saves, monkeypatch):
    """After a step or a validation, if no metric decides."""
    monkeypatch.setattr(checkpoints, "is_stopped", lambda trainer: stopped)
    callback = saving(monitor)
    trainer = Mock(is_last_batch=False, global_step=4, max_steps=last_step)
    trainer.configure_mock(current_epoch=0, callback_metrics={"val_acc": 1.0})
    callback.on_train_batch_end(trainer, Mock(), None, None, 0)
    callback.on_validation_end(trainer, Mock())
    assert callback._save_topk_checkpoint.call_count == saves


@pytest.mark.parametrize(
    ("logged", "checks", "monitor"),
    [
        ({"val_loss": 1.0}, False, "val_loss"),
        ({"val_loss": 1.0}, True, "val_acc"),
        ({"val_acc": 1.0, "val_loss": 1.0}, False, "val_acc"),
        ({}, False, None),
    ],
)
@pytest.mark.parametrize("step", [0, 1])
def test_after_a_validation(step, logged, checks, monitor):
    """The logged metrics decide what is monitored. Before the first step, a probe is saved."""
    callback = saving("val_acc")
    trainer = Mock(global_step=step, current_epoch=0, callback_metrics=logged)
    trainer.sanity_checking = checks
    callback.on_validation_end(trainer, Mock())
    assert callback.monitor == monitor
    assert (callback.mode == "max") == (monitor == "val_acc")
    assert callback._save_topk_checkpoint.called == (step == 0 and monitor is not None)


NAMES = [("best", 1, "best"), ("best", 2, "best-{epoch}-{step}"), ("{step}", 2, "{step}")]


@pytest.mark.parametrize(("name", "count", "expected"), NAMES)
def test_several_checkpoints_have_names(name, count, expected):
    callback = RunCheckpoint(monitor="val_loss", filename=name, save_top_k=count, dirpath="x")
    callback.setup(Mock(), Mock(), "test")
    assert callback.filename == expected


def test_of_equal_accuracies_the_lower_loss_is_kept():
    callback = RunCheckpoint(monitor="val_acc", mode="max")
    callback.best_k_models = {"a.ckpt": torch.tensor(0.5)}
    callback.kth_best_model_path = "a.ckpt"
    callback.best_model_score = torch.tensor(0.5)
    callback.best_loss = 2.0
    for accuracy, loss, is_kept in (
        (0.5, 2, 0),
        (0.5, 1, 1),
        (0.5, 1.5, 0),
        (0.4, 0.5, 0),
        (0.6, 3, 1),
    ):
        trainer = Mock(callback_metrics={"val_loss": loss})
        trainer.strategy.reduce_boolean_decision = bool
        assert callback.check_monitor_top_k(trainer, torch.tensor(accuracy)) == is_kept


@pytest.mark.parametrize(("batches", "monitor"), [([0, 0], None), ([0, 3], "val_loss")])
def test_without_validation_no_metric_is_monitored(batches, monitor, monkeypatch):
    monkeypatch.setattr("app.command.checkpoints.rank_zero_info", Mock())
    callback = RunCheckpoint(monitor="val_loss")
    callback.on_train_start(Mock(num_val_batches=batches), Mock())
    assert callback._last_time_checked  # an interval of time begins now
    assert callback.monitor == monitor
    assert checkpoints.rank_zero_info.called == (monitor is None)


def test_loading_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, zipped in (("new.ckpt", True), ("old.ckpt", False)):
        torch.save({"state_dict": {"w": Call()}}, name, _use_new_zipfile_serialization=zipped)
        with pytest.raises(
            UserError, match=r"it holds \w+.system, but only tensors and plain values are loaded"
        ):
            read(Path(name))
    assert not Path("ran").exists()


def test_previous_last_checkpoint_is_kept(tmp_path, monkeypatch):
    """Only `last` keeps its previous checkpoint, even on a file system without hard links."""
    last, previous, best = (tmp_path / name for name in (LAST, PREVIOUS, "best.ckpt"))
    files_ = CheckpointFiles()
    replace = Path.replace

    def checked(path, target):
        assert step in (0, 3) or last.exists()
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", checked)
    for step in range(4):
        if step == 3:
            monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EPERM, "no links")))
        files_.save_checkpoint(content(step), last)
        files_.save_checkpoint(content(step), best)
        assert read(last)["global_step"] == step
        assert not step or read(previous)["global_step"] == step - 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.ckpt", PREVIOUS, LAST]


def test_save_after_a_kill_between_link_and_replace(tmp_path):
    """After a kill during a save, the next save keeps both checkpoints, and no temporary file.

    A kill after linking `last-1`, but before replacing `last`, leaves both names as hard links to
    one file. Renaming one of them to the other does nothing.
    """
    last, before = tmp_path / LAST, tmp_path / PREVIOUS
    CheckpointFiles().save_checkpoint(content(1), last)
    before.hardlink_to(last)
    CheckpointFiles().save_checkpoint(content(2), last)
    assert [read(path)["global_step"] for path in (before, last)] == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([LAST, PREVIOUS])


def test_full_disk_leaves_the_earlier_file(tmp_path, monkeypatch):
    """A full disk gives a one-line error, keeps the earlier file, and leaves no unfinished file."""
    last = tmp_path / LAST
    CheckpointFiles().save_checkpoint(content(1), last)
    monkeypatch.setattr(
        os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    )
    with pytest.raises(
        UserError, match=f"{last}: .*No space left on device.*any previous one is kept"
    ):
        CheckpointFiles().save_checkpoint(content(2), last)
    monkeypatch.undo()
    assert read(last)["global_step"] == 1
    assert [path.name for path in tmp_path.iterdir()] == [LAST]


def test_folder_renamed_during_a_save(tmp_path, monkeypatch):
    """The save creates the folder again; the renamed folder keeps the earlier file."""
    path = tmp_path / "run" / LAST
    CheckpointFiles().save_checkpoint(content(1), path)
    monkeypatch.setattr(
        "app.command.checkpoint_file._keep", lambda *_: path.parent.rename(tmp_path / "away")
    )
    CheckpointFiles().save_checkpoint(content(2), path)
    assert read(path)["global_step"] == 2
    assert read(tmp_path / "away" / LAST)["global_step"] == 1


def theirs(model, **settings):
    """Return flags for one epoch with a model of `user_code`."""
    words = [f"--model=saving_code.{model}", "--data=user_code.TheirData", "--run.name=x"]
    return [*words, *options(test=False, **{"max_epochs": 1, "accelerator": "cpu"} | settings)]


@pytest.mark.parametrize("devices", [1, 2])
def test_unreadable_checkpoint_ends_the_run_before_it_trains(devices, tmp_path):
    """The line names the object. It is the last one on every number of processes."""
    flags = ["--run.root", tmp_path, *theirs("SavesMode", max_epochs=2)]
    flags += on_cpu("ddp_fork") if devices == 2 else []
    assert fork_app.error("fit", *flags) == (
        "error: checkpoint['settings']['modes'][0] is of type saving_code.Mode, so that no "
        "checkpoint could be loaded: save a plain value or a tensor, or call "
        "torch.serialization.add_safe_globals([saving_code.Mode]) in the module's file"
    )
    assert not list(tmp_path.rglob("*.ckpt"))
    fork_app("fit", *flags, "--trainer.enable_checkpointing=false")


def test_allowed_object_is_saved_and_loaded(tmp_path):
    flags = [*theirs("SavesMode"), "--model.allows=true"]
    fork_fit(tmp_path, *flags)
    fork_fit(tmp_path, *flags, "--ckpt_path=last", "--trainer.max_epochs=2")


def test_unreadable_hyperparameters_are_left_out(tmp_path):
    """One line names them. The trial changes no random stream."""
    flags = ["fit", "--run.root", tmp_path / "saved", *theirs("KeepsObjects")]
    out = fork_app(*flags)
    line = "checkpoints are saved without the hyperparameters act, optimizer, because only plain"
    assert out.count(line) == 1
    saved = tmp_path / "saved/x/version_0"
    assert read(last_of(saved))["hyper_parameters"] == {"scale": 2.0}
    other = fork_fit(tmp_path / "x", *theirs("KeepsObjects", enable_checkpointing=False))
    assert (saved / "metrics.csv").read_text() == (other / "metrics.csv").read_text()


def test_unfinished_files_in_use_are_not_removed(tmp_path):
    with files.whole(tmp_path / "x") as file:
        file.write(b"x")
        files.remove_parts(tmp_path)
        assert len(list(tmp_path.glob(".*"))) == 1
    assert (tmp_path / "x").read_bytes() == b"x"
