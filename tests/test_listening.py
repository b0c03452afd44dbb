"""Who can connect to a run while it trains: nobody from another machine, unless an address was given for that."""

import ipaddress
from pathlib import Path

import pytest
from harness import QUIET, family, free_port, listening, started

from app.system.interconnect import own_addresses

pytestmark = pytest.mark.slow
SMALL = ["--data", "Synthetic", "--data.size", "203", "--data.batch_size", "20", "--trainer.max_epochs", "100000"]
ONE = ["--trainer.devices", "2"]
TWO = ["--trainer.devices", "1", "--trainer.num_nodes", "2", "--trainer.strategy", "ddp"]


@pytest.mark.parametrize("way", ["ddp", "ddp_spawn", "tcp", "file"])
def test_nothing_listens_on_all_interfaces(way: str, tmp_path: Path) -> None:
    flags = [*SMALL, *QUIET, "--run.test", "false", "--trainer.accelerator", "cpu"]
    flags += [*ONE, "--trainer.strategy", way] if way.startswith("ddp") else TWO
    if way in ("tcp", "file"):
        place = f"tcp://127.0.0.1:{free_port()}" if way == "tcp" else f"file://{tmp_path}/meet"
        flags += ["--cluster.init_method", place, "--cluster.node_rank"]
    with started(tmp_path, *flags, *["0"] * (way in ("tcp", "file"))) as run:
        if way in ("tcp", "file"):
            with started(tmp_path, *flags, "1") as other:
                run.trained(1)
                found = listening(family(run.mark) | family(other.mark))
        else:
            run.trained(1)
            found = listening(family(run.mark))
        assert run.process.poll() is None
    assert found
    loopback = {address for address in found if ipaddress.ip_address(address).is_loopback}
    assert found - loopback <= (set(own_addresses()) if way == "file" else set())
