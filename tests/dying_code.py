"""Code of a user that ends its own process at one stage of a run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cluster.hosts import awaited
from lightning import Callback

from app.launch import signals
from app.launch.elastic import ENDED

signals.PERIOD = 0  # in each rank: they agree after each step


def end(way: str):
    """End this process."""
    if way in ("SIGKILL", "SIGTERM", "SIGHUP"):
        os.kill(os.getpid(), getattr(signal, way))
        time.sleep(0.01)  # Python runs the handler
    elif way == "many SIGTERM":
        command = os.getppid() if "LOCAL_RANK" in os.environ else os.getpid()
        shell = f"for i in $(seq 300); do kill -TERM {command}; sleep 0.005; done"
        subprocess.Popen(["bash", "-c", shell], start_new_session=True, stderr=subprocess.DEVNULL)
        time.sleep(0.1)
    elif way.startswith("_exit"):
        os._exit(int(way[5:]))
    elif way.startswith("exit"):
        sys.exit(int(way[4:]))
    else:
        raise RuntimeError(way)


def reaching(**stages: str) -> type[Callback]:
    """Return a callback class whose hooks call `_reach` with the names of stages."""

    def hook(stage: str) -> Callable[..., None]:
        return lambda callback, trainer, *_, **__: callback._reach(stage, trainer)

    hooks = {name: hook(stage) for name, stage in stages.items()}
    return type("Reaching", (Callback,), hooks)


ENDS = reaching(
    setup="setup",
    on_fit_start="fit start",
    on_validation_start="validation",
    on_save_checkpoint="save",
    on_test_start="test",
    on_test_end="test end",
)
KILLS = reaching(
    on_train_batch_start="step",
    on_after_backward="backward",
    on_validation_batch_start="validation",
    on_validation_end="validated",
    on_save_checkpoint="save",
    on_train_epoch_end="epoch",
    on_test_batch_start="test",
)


class Ends(ENDS):
    """Ends the process of a rank at a stage.

    Args:
        stage: The stage, such as `setup`, `step`, `test` or `teardown test`.
        way: A signal, `_exit0`, `exit0` or the text of an error.
        rank: The rank; of a single process, 0.
    """

    def __init__(self, stage: str, way: str, rank: int = 1):
        self.stage = stage
        self.way = way
        self.rank = rank

    def _reach(self, stage, trainer):
        if stage == self.stage and trainer.global_rank == min(self.rank, trainer.world_size - 1):
            end(self.way)

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 2:
            self._reach("step", trainer)

    def teardown(self, trainer, pl_module, stage):
        assert trainer.state.fn is not None
        self._reach(f"teardown {trainer.state.fn.value}", trainer)
        if self.stage == "after rank 0" and trainer.state.fn == "test" and trainer.global_rank == 1:
            folder = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1]
            awaited((folder / "0" / ENDED).exists, 60)
            end(self.way)


class Kills(KILLS):
    """Kills ranks of a live run, each once.

    Args:
        at: Moments `STAGE:STEP:RANK`; the rank is killed at the stage after this step or later.
        folder: Folder for a file of each kill.
    """

    def __init__(self, at: list[str], folder: str):
        self.at = at
        self.folder = Path(folder)

    def _reach(self, stage, trainer):
        for moment in self.at:
            name, step, rank = moment.split(":")
            is_now = name == stage and trainer.global_step >= int(step)
            mark = self.folder / moment
            if is_now and trainer.global_rank == int(rank) and not mark.exists():
                mark.touch()
                end("SIGKILL")
