"""Several nodes without a launcher, by the real command: parity, and rejected settings."""

import re
import socket

import pandas as pd
import pytest
from forked import fork_app
from harness import (
    SLOW,
    assert_same,
    error_of,
    free_port,
    on_two_nodes,
    options,
    record_of,
    refusals,
    started,
    tiny,
)

SMALL = tiny(203, 20)
STEPS = options(accelerator="cpu", max_epochs=2, log_every_n_steps=1)
WAY = options(strategy="ddp", devices=1, num_nodes=2)


PLACE = "--cluster.init_method"
RANK = "--cluster.node_rank"
WRONG = {
    "": "where do the nodes meet? give --cluster.init_method tcp://HOST:PORT, or set MASTER_ADDR",
    f"{PLACE} tcp://127.0.0.1:29500": "which of them is this? give --cluster.node_rank",
    f"{PLACE} tcp://127.0.0.1": "tcp://127.0.0.1: give tcp://HOST:PORT, file:///PATH or env://",
    f"{PLACE} file://x/y {RANK} 0": "file://x/y: give tcp://",
    f"{PLACE} tcp://a:99999 {RANK} 0": "tcp://a:99999: give tcp://",
    f"{PLACE} tcp://a:1 {RANK} 2": "the nodes are 0 to 1",
    f"--trainer.num_nodes 1 {RANK} 0": "--cluster.node_rank 0: there is one node",
    "--cluster.timeout 0": "--cluster.timeout 0: give more than 0",
}


test_wrong_flags_are_rejected_at_once = refusals(WRONG, *SMALL, "--trainer.num_nodes=2")


LEFTOVERS = [
    ({"LOCAL_RANK": "1"}, "LOCAL_RANK in the environment, but no launcher started this process"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "unset RANK WORLD_SIZE"),
    ({"NODE_RANK": "1"}, "unset NODE_RANK"),
    ({"MASTER_PORT": "5x"}, "MASTER_PORT=5x in the environment: give a whole number, or unset it"),
    ({"APP_AGENT": "5x"}, "APP_AGENT=5x in the environment is left over from another run: unset"),
    ({"TORCHELASTIC_RUN_ID": "none"}, "unset TORCHELASTIC_RUN_ID"),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun cannot start runs: use torchrun or srun"),
    (
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},
        "this SLURM job has 4 tasks, but the command was started once",
    ),
    (
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"},
        "this SLURM job has 2 nodes, but the command was started",
    ),
]


@pytest.mark.parametrize(("left", "message"), LEFTOVERS)
def test_leftover_launcher_variables_are_rejected(left, message):
    """If a launcher's variables are left over, the error explains them."""
    assert message in fork_app.error("fit", *SMALL, env=left)


def test_port_out_of_range():
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999", "NODE_RANK": "0"}
    message = fork_app.error("fit", *SMALL, "--trainer.num_nodes=2", env=address)
    assert message == "error: MASTER_PORT=99999 in the environment: give a port, 1 to 65535"


def test_taken_port(app, monkeypatch):
    """A taken port is rejected if processes would meet there; a single process needs no port."""
    with socket.create_server(("", 0)) as server:
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        code, out = app.run("fit", *SMALL, *STEPS, "--trainer.strategy=ddp", "--trainer.devices=2")
        assert "Address already in use" in error_of(code, out)
        app("fit", *SMALL, *STEPS)


@pytest.mark.parametrize(("strategy", "devices"), [("ddp", "1"), ("ddp_fork", "2")])
def test_leftover_address_is_ignored(strategy, devices, tmp_path):
    flags = [*SMALL, *STEPS, *options(strategy=strategy, devices=devices, root=tmp_path)]
    out = fork_app("fit", *flags, env={"MASTER_ADDR": "192.0.2.1"}, timeout=100)
    assert "MASTER_ADDR=192.0.2.1 is not used: this run is on one node" in out


@SLOW
def test_two_nodes_equal_one_device(app, fit, tmp_path):
    """Two nodes train, test and predict like one device."""
    root = ["--run.root", str(tmp_path / "nodes")]
    for code, out in on_two_nodes("fit", *SMALL, *STEPS, *WAY, *root):
        assert code == 0, out
        if "train longer" in out:
            suggested = out.split("use it          python -m app ")[1].split("\n")[0].split()
            assert "train longer    the same command, with --ckpt_path" in out
            assert "python -m app compare" not in out
    app(*suggested, "--run.root", tmp_path / "suggested")
    single = fit(*SMALL, *STEPS)
    ours = tmp_path / "nodes/LeNet-Synthetic/version_0"
    assert_same(ours, single)
    records = [record_of(run) for run in (ours, single)]
    assert records[0]["test"] == pytest.approx(records[1]["test"], abs=1e-6)
    assert records[0]["world_size"] == 2
    ways = on_two_nodes("predict", *SMALL, *STEPS[:2], *WAY, *root, "--ckpt_path=best")
    assert [code for code, _ in ways] == [0, 0], ways
    assert record_of(ours / "predict_1")["status"] == "completed"
    suggested = tmp_path / "suggested/LeNet-Synthetic/version_0"
    together = pd.read_csv(ours / "predict_1/predictions.csv")
    pd.testing.assert_frame_equal(together, pd.read_csv(suggested / "predictions.csv"))


@SLOW
def test_nodes_with_different_flags_are_rejected(tmp_path):
    """Every node rejects the run before the first step, and names the first flag that differs."""
    flags = [*SMALL, *STEPS, *WAY, f"--cluster.init_method=tcp://127.0.0.1:{free_port()}"]
    first = [*flags, "--cluster.node_rank=0"]
    second = [*flags, "--cluster.node_rank=1", "--data.data_seed=1", "--model.optimizer.lr=0.5"]
    with started(tmp_path, *first) as run, started(tmp_path, *second) as other:
        outputs = [node.end(code=2) for node in (run, other)]
    for out in outputs:
        message = error_of(2, out)
        assert re.search(
            r"--model.optimizer.lr is 0.0\d+ on node 0 and 0.5 on node 1: give the same", message
        ), message
    assert not list(tmp_path.rglob("run.json"))


@SLOW
def test_launcher_plugin_of_user(tmp_path):
    """Processes that a user's own launcher has started share one run, as torchrun's do."""
    flags = [*SMALL, *STEPS, *options(strategy="ddp", devices=2)]
    flags += ["--trainer.plugins=user_code.OwnLauncher"]
    port = {"OWN_PORT": str(free_port())}
    with (
        started(tmp_path, *flags, env={**port, "OWN_RANK": "0"}) as run,
        started(tmp_path, *flags, env={**port, "OWN_RANK": "1"}) as other,
    ):
        for process in (run, other):
            process.end(code=0)
    assert (run.record["world_size"], run.record["status"]) == (2, "completed")
    assert len(list((tmp_path / "LeNet-Synthetic").iterdir())) == 1
