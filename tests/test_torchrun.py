"""torchrun: rejected flags, new runs, and ranks that end with their agent.

test_elastic.py tests restarts of workers, and test_hosts.py tests parity.
"""

import sys
from pathlib import Path

import pytest
from harness import SLOW, options, started, tiny

pytestmark = SLOW
TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=2"]
SMALL = tiny(203, 20, flip=True)
STEPS = options(accelerator="cpu", log_every_n_steps=1, test=False)


# each rank checks this rule; tests/test_rules.py has the other rules
STARTED = "torchrun started 1 node(s) of 2 process(es), but the run is --trainer.num_nodes 1 of 3"
MISSING = "--ckpt_path nowhere.ckpt: there is no such file"  # rank zero checks it for all ranks


@pytest.mark.parametrize(
    ("flags", "text"), [("--trainer.devices=3", STARTED), ("--ckpt_path=nowhere.ckpt", MISSING)]
)
def test_error_of_rank_is_printed_at_once(flags: str, text: str, tmp_path: Path) -> None:
    with started(tmp_path, *SMALL, *STEPS, flags, launcher=TORCHRUN) as run:
        out = run.end(120, code=1)  # torchrun's exit code
    assert f"error: {text}" in out
    assert not list(tmp_path.glob("*/version_*"))


def test_torchrun_resumes_only_with_auto(tmp_path: Path) -> None:
    """A new torchrun continues an earlier run only with `--ckpt_path auto`."""
    flags = [*SMALL, *STEPS, "--trainer.max_epochs"]
    auto = ["--ckpt_path=auto"]
    for epochs, more, resumed in (("1", auto, None), ("2", [], None), ("3", auto, "version_1")):
        with started(tmp_path, *flags, epochs, *more, launcher=TORCHRUN) as run:
            run.end(120, code=0)
        assert len(run.record["parts"]) == (resumed is not None)
        assert (
            (run.record["resumed_from"] is None)
            if resumed is None
            else (resumed in run.record["resumed_from"])
        )


def test_workers_end_with_torchrun(tmp_path: Path) -> None:
    with started(tmp_path, *SMALL, *STEPS, "--trainer.max_epochs=100000", launcher=TORCHRUN) as run:
        run.trained(2).get("SIGKILL", "main").end()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_signal_to_torchrun_saves_checkpoint(name: str, tmp_path: Path) -> None:
    with started(tmp_path, *SMALL, *STEPS, "--trainer.max_epochs=100000", launcher=TORCHRUN) as run:
        out = run.trained(2).get(name, "group").end(29)  # before 30 s, when torchrun kills ranks
    assert run.process.returncode != 0, out
    error = {"SIGTERM": "by SIGTERM", "SIGINT": "by Ctrl-C"}[name]
    assert (run.record["status"], run.record["error"]) == ("interrupted", error)
    assert Path(run.record["checkpoint"]["last"]).exists()
