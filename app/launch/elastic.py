"""Launch of this node's ranks by torch elastic's agent, inside the command's process.

Each rank runs `python -m app …` with the same arguments, and reads its rank from the environment,
as under torchrun.
"""

import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from torch import distributed
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from app.errors import CAUSES, ExitStatus, RankError, RankLostError, UserError
from app.launch.failures import explain, lost, message_of, root_cause, stopped
from app.launch.process import AGENT, heard, restored_signals, stop_only_once
from app.launch.rendezvous import NodeRendezvous
from app.system.files import write_text
from app.system.machine import usable_cores

TAIL = 30  # number of lines to print from the end of a failed rank's output
# files that a rank writes beside torch's error file: the run's directory, the exit code after a
# signal, the rank's process, whose id is part of the name, and a mark at the end of the run
RUN_DIR = "run_dir"
STOPPED = "stopped"
PROCESS = "process_"
ENDED = "ended"

rendezvous_handler_registry.register("nodes", lambda parameters: parameters.config["handler"])


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
    error: UserError | RankError
    cluster = rendezvous.cluster
    # our own temporary folder, because torch would not delete the one that it creates
    with (
        tempfile.TemporaryDirectory(prefix="data-parallel-lab-") as temporary,
        _agent(processes, cluster.timeout),
    ):
        folder = Path(cluster.log_dir or temporary)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as cause:
            raise UserError(
                f"--cluster.log_dir {folder}: no folder can be made there ({cause.strerror})"
            ) from cause

        def files(pattern: str) -> list[Path]:
            """Return matching files of the latest attempt's ranks."""
            attempts = sorted(folder.glob(f"{rendezvous.run_id}_*/attempt_*"), key=os.path.getmtime)
            return sorted(attempts[-1].glob(pattern)) if attempts else []

        def mark(end: ExitStatus) -> None:
            for note in files(f"*/{RUN_DIR}"):
                on_end(note.read_text(), end)

        def end_by(signal_name: str) -> int:
            """Return the exit code after a signal.

            If ranks did not end in order, they have not marked the record.
            """
            end = ExitStatus.stopped_by(signal_name)
            if not files(f"*/{STOPPED}") and len(files(f"*/{ENDED}")) < processes:
                mark(end)
            return end.code

        def early_ends() -> dict[int, ProcessFailure]:
            """Return the ranks that exited with 0 before the run's end, as by `os._exit(0)`."""
            failures = {}
            for file in files(f"*/{PROCESS}*"):
                process = int(file.name.removeprefix(PROCESS))
                local_rank = int(file.parent.name)
                # look for the process first, because it writes the mark before it ends
                if not psutil.pid_exists(process) and not file.with_name(ENDED).exists():
                    failure = ProcessFailure(
                        local_rank, process, 0, str(file.with_name("error.json"))
                    )
                    failures[rendezvous.rank * processes + local_rank] = failure
            return failures

        def check_ranks() -> None:
            """Raise if a rank has ended early, because the other ranks would wait for it."""
            for rank, failure in early_ends().items():
                raise explain(rank, failure)

        def refuse_restart() -> None:
            """Raise after a signal or a UserError, to prevent a restart.

            Otherwise, print the reason for the restart.
            """
            reason = "a rank has failed"
            for file in files("*/error.json"):
                kind, _, text = (cause := message_of(json.loads(file.read_text()))).partition(": ")
                if kind == UserError.__name__:
                    raise UserError(text)
                if (
                    not kind.startswith("Rank") and lost(text) is None
                ):  # not a consequence of another rank's failure
                    reason = (
                        f"rank {rendezvous.rank * processes + int(file.parent.name)} "
                        f"has failed: {cause}"
                    )
            for file in files(f"*/{STOPPED}"):
                raise SignalException("ended in order", signal.Signals(int(file.read_text()) - 128))
            print(f"{reason}: restarting all ranks", file=sys.stderr, flush=True)
            mark(ExitStatus(1, "failed", f"{reason}, and all ranks were restarted"))

        def stop(number: int, *_: object) -> None:
            stop_only_once()
            raise SignalException("stopped", signal.Signals(number))

        rendezvous.before_restart = refuse_restart
        rendezvous.while_running = check_ranks
        for number in heard((signal.SIGTERM, signal.SIGHUP)):
            signal.signal(number, stop)
        config = LaunchConfig(
            min_nodes=rendezvous.world_size,
            max_nodes=rendezvous.world_size,
            nproc_per_node=processes,
            run_id=rendezvous.run_id,
            role="rank",
            rdzv_backend="nodes",
            rdzv_configs={"handler": rendezvous},
            max_restarts=cluster.max_restarts,
            logs_specs=DefaultLogsSpecs(
                str(folder),
                redirects=dict.fromkeys(range(0 if cluster.log_dir else 1, processes), Std.ALL),
                tee={0: Std.ALL} if cluster.log_dir else Std.NONE,
            ),
            log_line_prefix_template="[${role_name} ${rank}] ",
            signals_to_handle=",".join(
                signal.Signals(number).name for number in heard([signal.SIGINT])
            ),
        )
        try:
            # escape `$`, because torch replaces `${local_rank}`
            elastic_launch(config, sys.executable)(
                "-m", "app", *(argument.replace("$", "$$") for argument in argv)
            )
            check_ranks()
            return 0
        except SignalException as ended:
            return end_by(CAUSES[ended.sigval])
        except RankError as early_end:
            error = early_end
        except distributed.DistError as lost_node:
            error = RankLostError(
                f"lost the connection to another node: {str(lost_node).splitlines()[0]}"
            )
        except ChildFailedError as failed:
            failures = failed.failures
            early = {
                rank: failure for rank, failure in early_ends().items() if rank not in failures
            }
            rank, failure = root_cause(early | failures, rendezvous.world_size)
            signal_name = stopped(failure)
            if signal_name:
                return end_by(signal_name)
            error = explain(rank, failure)
            # local rank 0 prints its traceback itself, also when it fails while the agent stops it
            printed = [message_of(json.loads(file.read_text())) for file in files("0/error.json")]
            is_printed = message_of(failure.error_file_data) in printed
            if type(error) is RankError and failure.local_rank and not is_printed:
                # stdout.log after stderr.log
                for log in reversed(files(f"{failure.local_rank}/*.log")):
                    for line in log.read_text(errors="replace").splitlines()[-TAIL:]:
                        print(f"[rank {rank}] {line}", file=sys.stderr)
        mark(ExitStatus.of(error))
    raise error


@contextmanager
def _agent(processes: int, timeout: float) -> Iterator[None]:
    """Set the agent's environment and logging.

    Afterwards, restore the environment and the signal handlers.
    """
    before = os.environ.copy()
    os.environ[AGENT] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(usable_cores() // processes, 1)))
    # seconds for ranks to save their last checkpoint; torch reads this variable from 2.12 on
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(int(timeout)))
    log = logging.getLogger("torch.distributed.elastic")
    log.addHandler(logging.NullHandler())
    log.propagate = "APP_DEBUG" in os.environ
    try:
        with restored_signals():
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def note(name: str, text: str = "") -> None:
    """Write a file for our agent, if it started this rank.

    Args:
        name: Name of the file, such as `RUN_DIR`.
        text: The run's directory, or the exit code.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if AGENT in os.environ and error_file:
        with suppress(OSError):  # $TMPDIR is full
            write_text(Path(error_file).with_name(name), text)
