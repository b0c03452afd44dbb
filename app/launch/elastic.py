"""Launch of this node's ranks by torch elastic's agent, inside the command's process.

Each rank runs `python -m app …` with the same arguments, and reads its rank from the environment,
as under torchrun.
"""

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from app.errors import CAUSES, ExitStatus, RankError, UserError
from app.launch.failures import explain, message_of, root_cause, stopped
from app.launch.process import ADDRESSES, AGENT, handle, restored_signals, stop_only_once
from app.launch.rendezvous import Cluster, NodeRendezvous
from app.system.files import write_text
from app.system.machine import usable_cores

TAIL = 30  # number of lines to print from the end of a failed rank's output
# files that a rank writes beside torch's error file: the run's directory, the exit code after a
# signal, the rank's process id, and a mark at the end of the run
RUN_DIR = "run_dir"
STOPPED = "stopped"
PROCESS = "process"
ENDED = "ended"

rendezvous_handler_registry.register("nodes", lambda parameters: parameters.config["handler"])


@dataclass
class Ranks:
    """Started ranks of this node, observed by the files that they write.

    Attributes:
        rendezvous: Rendezvous with the other nodes.
        count: Number of this node's ranks.
        folder: Folder of all attempts.
        on_end: Function called with the run's directory and status when ranks fail or are stopped.
        is_live: Whether other ranks go on without these.
        stop: Exception that ends the ranks, set by another thread; or None.
    """

    rendezvous: NodeRendezvous
    count: int
    folder: Path
    on_end: Callable[[str, ExitStatus], None]
    is_live: bool = False
    stop: SignalException | None = None

    def files(self, pattern: str) -> list[Path]:
        """Return matching files of the latest attempt."""
        attempts = self.folder.glob(f"{self.rendezvous.run_id}_*/attempt_*")
        latest = max(attempts, key=os.path.getmtime, default=None)
        return sorted(latest.glob(pattern)) if latest else []

    def failures(self, name: str) -> dict[int, ProcessFailure]:
        """Return the ranks that have written a file, each as a failure with exit code 0."""
        failures = {}
        for file in self.files(f"*/{PROCESS}"):
            if file.with_name(name).exists():
                local_rank = int(file.parent.name)
                error_file = str(file.with_name("error.json"))
                failure = ProcessFailure(local_rank, int(file.read_text()), 0, error_file)
                failures[self.rendezvous.rank * self.count + local_rank] = failure
        return failures

    def early_ends(self) -> dict[int, ProcessFailure]:
        """Return the ranks that exited with 0 before the run's end, as by `os._exit(0)`."""
        failures = {}
        for rank, failure in self.failures(PROCESS).items():
            # look for the process first, because it writes the mark before it ends
            if not psutil.pid_exists(failure.pid) and rank not in self.failures(ENDED):
                failures[rank] = failure
        return failures

    def check(self) -> None:
        """Raise if a rank has ended early, because the other ranks would wait for it."""
        if self.stop is not None:
            raise self.stop
        failures = self.early_ends()
        if failures:
            raise ChildFailedError("app", failures)

    def refuse_restart(self) -> None:
        """Raise after a signal or a UserError; otherwise, print the reason for the restart."""
        for file in self.files(f"*/{STOPPED}"):
            raise SignalException("ended in order", signal.Signals(int(file.read_text()) - 128))
        reason = "a rank has failed"
        failures = self.failures("error.json")
        if failures:
            error = explain(*root_cause(failures))
            if isinstance(error, UserError):
                raise error
            reason = str(error)
        ranks = "it" if self.is_live else "all ranks"
        print(f"{reason}: restarting {ranks}", file=sys.stderr, flush=True)
        self.mark(ExitStatus(1, "failed", f"{reason}, and all ranks were restarted"))

    def mark(self, end: ExitStatus) -> None:
        """Report the run's end."""
        if self.is_live:
            return
        for file in self.files(f"*/{RUN_DIR}"):
            self.on_end(file.read_text(), end)

    def end_by(self, signal_name: str, rank: int | None = None) -> int:
        """Return the exit code after a signal. Ranks that ended in order have reported it.

        Args:
            signal_name: Name of the signal.
            rank: The rank that the signal ended; None if the command received it.
        """
        end = ExitStatus.stopped_by(signal_name)
        in_order = self.failures(ENDED)
        if not self.files(f"0/{ENDED}") or (rank is not None and rank not in in_order):
            self.mark(end)
        return end.code

    def print_output(self, rank: int, failure: ProcessFailure) -> None:
        """Print the end of a failed rank's output, unless the terminal has its traceback.

        Local rank 0 prints its traceback itself, also when it fails while the agent stops it.
        """
        for other in self.failures("error.json").values():
            if other.local_rank == 0 and message_of(other) == message_of(failure):
                return
        for log in reversed(self.files(f"{failure.local_rank}/*.log")):  # stdout after stderr
            for line in log.read_text(errors="replace").splitlines()[-TAIL:]:
                print(f"[rank {rank}] {line}", file=sys.stderr)


def launch(
    argv: Sequence[str],
    processes: int,
    rendezvous: NodeRendezvous,
    on_end: Callable[[str, ExitStatus], None],
) -> int:
    """Start this node's ranks, and wait for them.

    Args:
        argv: Arguments of `python -m app`.
        processes: Number of this node's ranks.
        rendezvous: Rendezvous with the other nodes, and the settings of the launch.
        on_end: Function called with the run's directory and status when ranks of this node fail or
            are stopped.

    Returns:
        Exit code: 0 for success, 129, 130 or 143 when a signal ended the ranks.

    Raises:
        UserError: When a rank raised a UserError.
        RankError: When a rank failed otherwise.
    """
    with _prepared(rendezvous.cluster, processes) as folder:
        return _run(argv, Ranks(rendezvous, processes, folder, on_end))


def launch_apart(
    argv: Sequence[str], processes: int, cluster: Cluster, on_end: Callable[[str, ExitStatus], None]
) -> int:
    """Start this node's ranks of a live run, each with an agent that restarts it alone.

    Args:
        argv: Arguments of `python -m app`.
        processes: Number of this node's ranks.
        cluster: Settings of the launch.
        on_end: As for `launch`; called when no rank is left.

    Returns:
        Exit code, as for `launch`.

    Raises:
        UserError: When no rank ended in order, and a rank raised a UserError.
        RankError: When no rank ended in order.
    """
    with _prepared(cluster, processes) as folder, ThreadPoolExecutor(processes) as threads:
        for name in ADDRESSES:
            os.environ.pop(name, None)
        agents = []
        results = []
        for place in range(processes):
            rendezvous = NodeRendezvous(cluster, 1, 1)
            rendezvous.run_id += f"_{place}"
            ranks = Ranks(rendezvous, 1, folder, on_end, is_live=True)
            agents.append(ranks)
            results.append(threads.submit(_run, argv, ranks))
        try:
            wait(results)
        except SignalException as stop:
            for ranks in agents:
                ranks.stop = stop
            wait(results)
    errors = list(filter(None, (result.exception() for result in results)))
    codes = [result.result() for result in results if result.exception() is None]
    if codes:
        for error in errors:
            print(f"error: {error}", file=sys.stderr)
        return max(codes)
    error = errors[0]
    agents[0].is_live = False
    agents[0].mark(ExitStatus.of(error))
    raise error


@contextmanager
def _prepared(cluster: Cluster, processes: int) -> Iterator[Path]:
    """Prepare environment and signals for agents in this process; yield the ranks' folder."""
    # our own temporary folder, because torch would not delete the one that it creates
    with (
        tempfile.TemporaryDirectory(prefix="data-parallel-lab-") as temporary,
        patch.dict(os.environ),  # restores the environment
        restored_signals(),
    ):
        os.environ[AGENT] = str(os.getpid())
        os.environ.setdefault("OMP_NUM_THREADS", str(max(usable_cores() // processes, 1)))
        # seconds for ranks to save their last checkpoint; torch reads this variable from 2.12 on
        timeout = str(int(cluster.timeout))
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", timeout)
        log = logging.getLogger("torch.distributed.elastic")
        log.addHandler(logging.NullHandler())
        log.propagate = "APP_DEBUG" in os.environ
        folder = Path(cluster.log_dir or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        handle(CAUSES, _stop)
        yield folder


def _run(argv: Sequence[str], ranks: Ranks) -> int:
    """Start ranks, wait for them, and return the exit code."""
    rendezvous = ranks.rendezvous
    rendezvous.ranks = ranks
    log_dir = rendezvous.cluster.log_dir
    is_deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as in the background
    first_hidden = 0 if log_dir else 1
    config = LaunchConfig(
        min_nodes=rendezvous.world_size,
        max_nodes=rendezvous.world_size,
        nproc_per_node=ranks.count,
        run_id=rendezvous.run_id,
        role="rank",
        rdzv_backend="nodes",
        rdzv_configs={"handler": rendezvous},
        max_restarts=rendezvous.cluster.max_restarts,
        logs_specs=DefaultLogsSpecs(
            str(ranks.folder),
            redirects=dict.fromkeys(range(first_hidden, ranks.count), Std.ALL),
            tee={0: Std.ALL} if log_dir else Std.NONE,
        ),
        log_line_prefix_template="[${role_name} ${rank}] ",
        signals_to_handle="" if is_deaf else "SIGINT",
    )
    try:
        # escape `$`, because torch replaces `${local_rank}`
        elastic_launch(config, sys.executable)(
            "-m", "app", *(argument.replace("$", "$$") for argument in argv)
        )
        ranks.check()
        return 0
    except SignalException as ended:
        return ranks.end_by(CAUSES[ended.sigval])
    except ChildFailedError as failed:
        failures = dict(failed.failures)
        for rank, failure in ranks.early_ends().items():
            failures.setdefault(rank, failure)
        rank, failure = root_cause(failures, rendezvous.world_size)
        signal_name = stopped(failure)
        if signal_name:
            return ranks.end_by(signal_name, rank)
        error = explain(rank, failure)
        if type(error) is RankError and failure.local_rank:
            ranks.print_output(rank, failure)
    ranks.mark(ExitStatus.of(error))
    raise error


def _stop(number: int, *_: object) -> None:
    stop_only_once()
    raise SignalException("stopped", signal.Signals(number))


def note(name: str, text: str = "") -> None:
    """Write a file for our agent, if it started this rank.

    Args:
        name: Name of the file, such as `RUN_DIR`.
        text: The run's directory, or the exit code.
    """
    if AGENT in os.environ:
        error_file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
        with suppress(OSError):  # $TMPDIR is full
            write_text(error_file.with_name(name), text)
