"""Who can connect to a run while it trains: nobody from another machine, unless an address was given for that.

Of runs on one machine, `Running.trained` looks at each.
"""

import ipaddress
from pathlib import Path

import pytest
from harness import QUIET, family, free_port, listening, started

from app.system.interconnect import own_addresses

FLAGS = ["--data", "Synthetic", "--data.size", "203", "--data.batch_size", "20", *QUIET, "--trainer.accelerator", "cpu"]
FLAGS += ["--trainer.max_epochs", "100000", "--trainer.devices", "1", "--trainer.num_nodes", "2", "--run.test", "false"]


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
