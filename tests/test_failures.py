"""End of a rank's process at each stage of a run: named rank, exit code and record."""

import itertools
import multiprocessing
import os
import re
import signal

import pytest
from forked import fork_app
from harness import on_cpu, record, slow, tiny
from torch.distributed.elastic.multiprocessing import ProcessFailure

from app.launch.failures import callstack, error_file, message_of

ENDS = {  # exit code, and pattern of the record's error
    "SIGKILL": (1, r"rank 1 \(process \d+\) was ended by SIGKILL"),
    "_exit0": (1, r"rank 1 \(process \d+\) ended with exit code 0 before the end of the run"),
    "_exit3": (1, r"rank 1 \(process \d+\) failed with exit code 3"),
    "exit0": (1, r"(rank 1: )?sys\.exit\(\) in dying_code\.py:\d+ end ended the run early: .*"),
    "mine": (1, r"rank 1 \(process \d+\) failed with exit code 1: RuntimeError: mine"),
    "SIGTERM": (143, "by SIGTERM"),
    "SIGHUP": (129, "by SIGHUP"),
}
STAGES = (
    "setup",
    "fit start",
    "step",
    "validation",
    "save",
    "test",
    "test end",
    "teardown fit",
    "teardown test",
)
TELLING = [
    ("ddp_fork", "setup", "SIGKILL"),
    ("ddp_fork", "fit start", "_exit0"),
    ("ddp_fork", "setup", "SIGTERM"),
    ("ddp_fork", "test end", "exit0"),
    slow("ddp", "after rank 0", "SIGTERM"),
    ("auto", "step", "exit0"),  # a single process
    ("auto", "test end", "SIGHUP"),
]
MAIN = ("setup", "step", "test end")  # stages with all kinds of ends
OTHERS = [stage for stage in STAGES if stage not in MAIN]
ALL = [
    *itertools.product(("ddp_fork",), MAIN, ENDS),
    *itertools.product(("ddp", "ddp_spawn"), MAIN, ("SIGKILL", "_exit0", "mine", "SIGTERM")),
    *itertools.product(("ddp_fork", "ddp_spawn"), OTHERS, ("SIGKILL", "mine")),
]


@pytest.mark.parametrize(
    ("strategy", "stage", "end"), [*TELLING, *(slow(*case) for case in ALL if case not in TELLING)]
)
def test_end_of_a_rank_ends_the_run(strategy, stage, end, tmp_path):
    """The last rank ends at a stage. Another one ends at once, too, despite a long timeout."""
    flags = [*tiny(max_epochs=2), *on_cpu(strategy, root=tmp_path)]
    flags += ["--trainer.callbacks+=dying_code.Ends", f"--trainer.callbacks.stage={stage}"]
    code, out = fork_app.run("fit", *flags, f"--trainer.callbacks.way={end}", timeout=100)
    expected, pattern = ENDS[end]
    assert code == expected, out
    saved = record(tmp_path)
    assert saved["status"] == ("failed" if code == 1 else "interrupted"), saved["error"]
    assert re.fullmatch(pattern, saved["error"])
    if code == 1:
        assert f"error: {saved['error']}\n" in out


def test_error_file_is_whole_or_absent(tmp_path, monkeypatch):
    """A rank that is killed while it writes leaves no half file, which its launcher would read."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))

    def fail():
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"), error_file():
        fail()
    failure = ProcessFailure(0, 1, 1, str(file))
    assert message_of(failure) == "RuntimeError: mine"
    assert "in fail" in callstack(failure)
    file.unlink()
    process = multiprocessing.get_context("fork").Process(target=_killed_while_writing, args=[fail])
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert not file.exists()


def _killed_while_writing(fail):
    """Die at the moment when the file's content reaches the disk."""
    os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
    with error_file():
        fail()
