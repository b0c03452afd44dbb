"""Who can connect to a run while it trains: nobody from another machine, unless an address was given for that.

Of runs on one machine, `Running.trained` looks at each.
"""

import ipaddress
import json
import os
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
from harness import TINY, family, free_port, listening, started, tiny

from app.system.interconnect import own_addresses

FLAGS = tiny(203, 20, accelerator="cpu")
FLAGS += ["--trainer.max_epochs", "100000", "--trainer.devices", "1", "--trainer.num_nodes", "2", "--run.test", "false"]
CPU = ["--trainer.accelerator", "cpu"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_nodes_listen_on_the_given_address(scheme: str, tmp_path: Path) -> None:
    place = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/meet"
    flags = [*FLAGS, "--cluster.init_method", place, "--cluster.node_rank"]
    with started(tmp_path, *flags, "0") as run, started(tmp_path, *flags, "1") as other:
        run.trained(1)
        found = listening(family(run.mark) | family(other.mark))
        assert run.process.poll() is None
    assert found
    loopback = {address for address in found if ipaddress.ip_address(address).is_loopback}
    assert found - loopback <= (set(own_addresses()) if scheme == "file" else set())


COMMANDS = {
    "fit": ["fit", *FLAGS[:4], *CPU, "--trainer.strategy", "ddp", "--trainer.devices", "2", "--trainer.max_steps", "4"],
    "compare": ["compare", "--experiment", "tiny.yaml"],
    "verify": ["verify", "--data", "Synthetic", "--steps", "4"],
    "plan": ["plan", *FLAGS[:4], *CPU, "--run.threads", "1", "--per_node", "2"],
    "doctor": ["doctor"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_starts_ranks_listens_on_loopback(name: str, tmp_path: Path) -> None:
    nodes = {"trainer.strategy": "ddp", "trainer.devices": 1, "trainer.num_nodes": 2}
    (tmp_path / "tiny.yaml").write_text(
        json.dumps(TINY | {"variants": {"ddp": {"trainer.devices": 2}, "nodes": nodes}})
    )
    mark, seen = uuid.uuid4().hex, set()
    with (tmp_path / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "app", *COMMANDS[name]], cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT,
            env={**os.environ, "APP_TEST_MARK": mark}, start_new_session=True,
        )  # fmt: skip
    try:
        while process.poll() is None:
            seen |= listening(family(mark))
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
    finally:
        for pid in family(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(60)
    assert process.returncode == 0, (tmp_path / "output.txt").read_text()
    assert seen
    assert all(ipaddress.ip_address(address).is_loopback for address in seen), seen
