"""Command `python -m app join HOST:PORT`: adds this machine's devices to a live run.

`fit --cluster.live true` prints the address. The run's settings come from there; flags such as
`--trainer.devices 2` change those of this machine. Ctrl-C ends only this machine's ranks.
"""

import os
import tempfile
from pathlib import Path

from app.command.run import run as fit
from app.errors import UserError
from app.launch.live import CONFIG, JOINED, LIVE
from app.launch.process import RANKS, TASK
from app.launch.rendezvous import reach_store
from app.system.files import write_text


def run(arguments: list[str]) -> int:
    """Join a live run, and return the exit code.

    Args:
        arguments: The arguments after `join`.

    Raises:
        UserError: When no live run answers, or this machine's software or data differ.
    """
    address, *flags = arguments or ["--help"]
    if address in ("-h", "--help"):
        print(f"usage: python -m app join HOST:PORT [--FLAG VALUE ...]\n\n{__doc__}")
        return 0
    host, _, port = address.rpartition(":")
    try:
        config = reach_store(host, int(port)).get(CONFIG).decode()
    except (OSError, RuntimeError, ValueError, OverflowError) as error:
        raise UserError(
            f"{address}: no live run answers there ({error}): give the address that the run prints"
        ) from error
    for name in (*RANKS, *TASK):  # of torchrun or srun, which may have started this command once
        os.environ.pop(name, None)
    os.environ[LIVE] = address
    os.environ[JOINED] = "true"
    with tempfile.TemporaryDirectory(prefix="data-parallel-lab-") as folder:
        file = Path(folder, "config.yaml")
        write_text(file, config)
        return fit(["fit", "--config", str(file), *flags])
