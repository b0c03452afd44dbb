"""Rules that reject a run before anything is built, in one table."""

import re

import pytest
from harness import tiny

from app.command import rules
from app.command.configuration import resolve
from app.errors import UserError
from app.launch.cluster_environment import Launched

SMALL = ["fit", *tiny(accelerator="cpu")]
TWO = Launched("torchrun", 1, 2, 2)
DP, DDP = {"trainer.strategy": "dp"}, {"trainer.strategy": "ddp"}
SYNC = {"trainer.sync_batchnorm": True}


@pytest.fixture(scope="module")
def config():
    return resolve(SMALL)


@pytest.fixture
def check(config, monkeypatch):
    """Return a function that checks the configuration with changed settings under a launcher."""

    def run(settings, launcher):
        changed = config.clone()
        for key, value in settings.items():
            changed[key] = value
        monkeypatch.setattr(rules, "launched", lambda: launcher)
        rules.check("fit", changed)

    return run


REFUSED = [
    (
        {"trainer.devices": "-1"},
        None,
        "--trainer.devices '-1': `devices` selected with `CPUAccelerator` should be an int > 0",
    ),
    (
        {"trainer.accelerator": "cudo"},
        None,
        "--trainer.accelerator cudo: there is none on this machine: did you mean cuda?",
    ),
    (
        {"cluster.max_restarts": 1},
        None,
        "--cluster.max_restarts 1 has no effect: no agent starts the processes of",
    ),
    (
        {"cluster.log_dir": "x"},
        TWO,
        "--cluster.log_dir x has no effect: torchrun starts the processes of this run",
    ),
    ({"run.name": "../x"}, None, "--run.name ../x: give a relative path without .."),
    (DP | {"trainer.num_nodes": 2}, None, "dp works inside one node, not on 2: use ddp"),
    (
        DP | {"trainer.devices": 2},
        TWO,
        "--trainer.strategy dp does not work with torchrun, which has started the processes",
    ),
    (
        {"trainer.strategy": "ddp_fork"},
        TWO,
        "ddp_fork does not work with torchrun, which has started the processes",
    ),
    (
        DDP | {"trainer.devices": 3},
        TWO,
        "torchrun started 1 node(s) of 2 process(es), but the run is --trainer.nu",
    ),
    ({}, Launched("srun", 2, None, 3), "not the same number on each node: give --ntasks-per-node"),
    (
        {"data.init_args.batch_size": 15},
        TWO,
        "a global batch of 15 cannot be shared equally by 2 ranks: use --dat",
    ),
    (
        DDP | {"trainer.devices": 3},
        None,
        "use --data.batch_size 15 or 18, or another --trainer.devices",
    ),
    (
        {"cluster.init_method": "tcp://a:1"},
        TWO,
        "--cluster.init_method: torchrun decides how the nodes meet",
    ),
    (SYNC | DDP | {"trainer.devices": 2}, None, "--trainer.sync_batchnorm works on GPUs only"),
    (SYNC | DP | {"trainer.devices": 2}, None, "--trainer.sync_batchnorm has no effect under dp"),
    (SYNC, None, "--trainer.sync_batchnorm has no effect under auto in one process"),
]


@pytest.mark.parametrize(("settings", "launcher", "text"), REFUSED)
def test_flags_that_cannot_work_are_rejected(settings, launcher, text, check):
    with pytest.raises(UserError, match=re.escape(text)):
        check(settings, launcher)


WORKS = [
    ({}, None),
    (DP | {"trainer.devices": 2}, None),
    (DDP | {"trainer.devices": 4}, None),
    ({"trainer.devices": 2}, TWO),
    ({}, TWO),
    ({}, Launched("srun", 2, 2, 4)),
    ({"run.name": "a/b.c"}, None),
    ({"trainer.num_nodes": 2, "cluster.init_method": "file:///x", "cluster.node_rank": 1}, None),
    ({"seed_everything": True}, None),
]


@pytest.mark.parametrize(("settings", "launcher"), WORKS)
def test_flags_that_work_are_accepted(settings, launcher, check):
    check(settings, launcher)
