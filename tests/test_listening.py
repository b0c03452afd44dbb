"""Ports of a command: no other machine can connect, unless the user gives an address.

`Running.trained` also checks that a run without a launcher does not listen on all interfaces.
"""

import ipaddress
import json

import pytest
from harness import SLOW, TINY, family, listening, output_of, running, started, tiny

from app.system.addresses import own_addresses

FLAGS = tiny(203, 20, accelerator="cpu", max_epochs=100000, devices=1, num_nodes=2, test=False)


@SLOW
def test_nodes_that_meet_at_a_file_listen_on_their_own_addresses(tmp_path):
    """The nodes that `compare` starts below meet at a given address, and listen only there."""
    flags = [*FLAGS, f"--cluster.init_method=file://{tmp_path}/meet", "--cluster.node_rank"]
    with started(tmp_path, *flags, "0") as run, started(tmp_path, *flags, "1") as other:
        run.trained(1)
        addresses = listening(family(run.mark) | family(other.mark))
        assert run.process.poll() is None
    assert addresses
    others = {address for address in addresses if not ipaddress.ip_address(address).is_loopback}
    assert others <= set(own_addresses())


COMMANDS = {  # without fit, which `Running.trained` checks, and doctor, which test_doctor checks
    "compare": ["compare", "--experiment=tiny.yaml"],
    "verify": ["verify", "--data=Synthetic", "--steps=4", "--quick"],
}


@SLOW
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_listen_on_loopback(name, tmp_path):
    nodes = {"trainer.strategy": "ddp", "trainer.devices": 1, "trainer.num_nodes": 2}
    variants = {"ddp": {"trainer.devices": 2}, "nodes": nodes}
    (tmp_path / "tiny.yaml").write_text(json.dumps(TINY | {"variants": variants}))
    with running(*COMMANDS[name], cwd=tmp_path) as run:
        out = run.on_loopback()
    output_of(run.process.returncode, out)
