"""Several simulated hosts with separate networks: rendezvous, parity, failures."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from cluster.hosts import awaited
from harness import assert_same, options, record, record_of, tiny

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
SMALL = tiny(203, 20, flip=True)
STEPS = [*SMALL, *options(accelerator="cpu", log_every_n_steps=1, test=False)]
TCP = [*options(num_nodes=2, devices=1), "--cluster.init_method=tcp://h1:29500"]
FOR_EVER = ["--trainer.max_epochs=100000"]
SILENCE = "error: no answer from another rank within --cluster.timeout: "
CUT = f"{SILENCE}it hangs, or the link to it is cut"
Process = subprocess.Popen[str]


def fit(host, *flags, launcher=None, env=None):
    return host.start(
        *(launcher or [sys.executable]), "-m", "app", "fit", *STEPS, *map(str, flags), env=env
    )


def torchrun(processes, nodes="2"):
    meet = ["--rdzv-backend=c10d", "--rdzv-endpoint=h1:29400"]
    return [
        str(Path(sys.executable).with_name("torchrun")),
        "--nnodes",
        nodes,
        "--nproc-per-node",
        str(processes),
        *meet,
    ]


def two_nodes(hosts, root, *flags, env=None):
    """Start a run of two nodes that meet at a TCP address."""
    both = enumerate((hosts.hosts["h1"], hosts.hosts["h2"]))
    return [
        fit(host, "--run.root", root, *TCP, f"--cluster.node_rank={node}", *flags, env=env)
        for node, host in both
    ]


def inner(process):
    """Return the process of the command itself, which is a child of the started nsenter."""
    return psutil.Process(process.pid).children()[0]


def a_rank(process):
    """Return the first rank that a node's agent, ours or torchrun's, has started."""
    return next(child for child in inner(process).children() if "RANK" in child.environ())


def trained(root, processes, epochs):
    def ready():
        has_ended = any(process.poll() is not None for process in processes)
        return has_ended or len(record(root)["epochs"]) >= epochs

    awaited(ready, 240)


def ended(processes, seconds, code=None):
    """Wait for all commands to end in time, check their exit code, and return their outputs."""
    limit = time.monotonic() + seconds
    outputs = []
    for process in processes:
        out, _ = process.communicate(timeout=max(limit - time.monotonic(), 0.1))
        outputs.append(out)
    assert {process.returncode for process in processes} == {code} or code is None, outputs
    return outputs


def orphans(host):
    """Return the command lines of a host's remaining processes."""
    living = [p for p in psutil.Process(host.pid).children(recursive=True) if not gone(p)]
    return [line for line in (" ".join(p.cmdline()) for p in living) if line != "sleep infinity"]


def gone(process):
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(autouse=True)
def clean(hosts):
    """Check that a test leaves no process and no segment of shared memory."""
    yield
    for host in hosts.hosts.values():
        if host.outer.poll() is None:
            awaited(lambda host=host: not orphans(host), 10, lambda host=host: str(orphans(host)))
            assert host.shared_memory() == []


@pytest.mark.parametrize("way", ["torchrun", "env", "file"])
def test_parity(way, hosts, app, tmp_path):
    """Two hosts with two devices each train like one device, although the second host starts first.

    The last batch of an epoch has three images, so that one of the four ranks gets none.

    In the `env` case, h1 resolves its own name to a loopback address, and gloo must still find the
    right interface.
    """
    root = tmp_path / "hosts"
    epochs = ["--trainer.max_epochs=2"]
    processes = []
    for node in (1, 0):
        host = hosts.hosts[f"h{node + 1}"]
        launcher = None
        env = {}
        flags = ["--trainer.num_nodes=2", "--trainer.devices=2"]
        if way == "torchrun":
            launcher = torchrun(2)
        elif way == "env":
            if node == 0:  # map h1 to 127.0.1.1, as Debian's installer does
                host.run(
                    "sh", "-c", f"sed 's/10.77.0.1/127.0.1.1/' /etc/hosts > {tmp_path}/etc-hosts"
                )
                host.run("mount", "--bind", tmp_path / "etc-hosts", "/etc/hosts")
            env = {"MASTER_ADDR": "h1", "MASTER_PORT": "29500", "NODE_RANK": str(node)}
        else:
            flags += [
                f"--cluster.init_method=file://{tmp_path}/meet",
                f"--cluster.node_rank={node}",
            ]
        processes.append(fit(host, "--run.root", root, *epochs, *flags, launcher=launcher, env=env))
    ended(processes, 300, code=0)
    app("fit", *STEPS, *epochs)
    assert record(root)["world_size"] == 4
    run = Path("LeNet-Synthetic", "version_0")
    assert_same(root / run, tmp_path / "runs" / run)


def test_short_link_cut_is_survived(hosts, tmp_path):
    processes = two_nodes(hosts, tmp_path, *FOR_EVER, "--cluster.timeout=60")
    trained(tmp_path, processes, 2)
    hosts.link("h2", "down")
    time.sleep(5)
    hosts.link("h2", "up")
    trained(tmp_path, processes, len(record(tmp_path)["epochs"]) + 5)
    inner(processes[1]).send_signal(signal.SIGINT)  # Ctrl-C on one node stops both
    ended(processes, 30, code=130)
    assert record(tmp_path)["status"] == "interrupted"
    assert Path(record(tmp_path)["checkpoint"]["last"]).exists()


@pytest.mark.parametrize("while_reading", [False, True])
def test_cut_link_ends_run(while_reading, hosts, tmp_path):
    """A rank waits long while the other one reads images, but a cut link ends the run.

    Each node ends within 20 s after the timeout of 20 s, and prints `CUT` but no traceback.
    """
    flags = [*FOR_EVER, "--cluster.timeout=20"]
    if while_reading:
        flags += ["--data=user_code.ReadsWhenTold"]
    processes = two_nodes(hosts, tmp_path, *flags, env={"TEST_PLACE": str(tmp_path)})
    if while_reading:
        awaited((tmp_path / "reads").exists, 120)
    else:
        trained(tmp_path, processes, 2)
    hosts.link("h2", "down")
    (tmp_path / "go").touch()
    for process, out in zip(processes, ended(processes, 20 + 20), strict=True):
        assert process.returncode == 1, out
        assert CUT in out
        assert "Traceback" not in out


@pytest.mark.parametrize(("way", "node"), [("tcp", 0), ("torchrun", 1)])
def test_stopped_rank_is_killed_on_its_host(way, node, hosts, tmp_path):
    """A process on the stopped rank's host kills it, and both nodes print that it was stopped."""
    flags = [*FOR_EVER, "--cluster.timeout=20"]
    if way == "tcp":
        processes = two_nodes(hosts, tmp_path, *flags)
    else:
        names = ("h1", "h2")
        processes = [
            fit(hosts.hosts[name], "--run.root", tmp_path, *flags, launcher=torchrun(1))
            for name in names
        ]
    trained(tmp_path, processes, 2)
    stopped = a_rank(processes[node])
    stopped.suspend()
    awaited(lambda: gone(stopped), 20 + 10 + 5)
    processes[node].send_signal(signal.SIGCONT)  # because nsenter stops itself when its child stops
    out = ended(processes, 10)
    place = f"rank {node} is in (the evaluation|step [0-9,]+), no stack; waiting: rank {1 - node} "
    assert re.search(re.escape(SILENCE) + place, out[1 - node]), out[1 - node]
    assert f"error: rank {node} hangs (stacks: " in out[node]
    assert "; the other ranks timed out, and it was killed" in out[node]
    assert all(process.returncode for process in processes)
    assert "Traceback" not in "".join(out) or way == "torchrun"  # torchrun prints its own traceback


def test_hosts_without_shared_folder(hosts, tmp_path):
    """Node 0 stores the run; the last weights are tested, because node 1 lacks the best.

    Both nodes then refuse to resume, because node 1 lacks the checkpoint.
    """
    root = tmp_path / "runs"
    root.mkdir()
    for name in ("h1", "h2"):
        hosts.hosts[name].run("mount", "-t", "tmpfs", "tmpfs", root)
    flags = ["--trainer.max_epochs=1", "--run.test=true"]
    processes = two_nodes(hosts, root, *flags)
    out = ended(processes, 120, code=0)
    assert "best.ckpt is not on every node: testing the last weights instead of the best" in out[0]
    roots = [
        Path(f"/proc/{hosts.hosts[name].pid}/root{root}/LeNet-Synthetic") for name in ("h1", "h2")
    ]
    final = record_of(roots[0] / "version_0")
    assert final["test"] is not None
    assert final["tested"] is None
    assert "(last weights)" in out[0]
    assert not (roots[1] / "version_0/run.json").exists()
    processes = two_nodes(hosts, root, *flags, "--ckpt_path=last", "--trainer.max_epochs=2")
    out = ended(processes, 60, code=2)
    lacking = (
        f"--ckpt_path {root}/LeNet-Synthetic/version_0/checkpoints/last.ckpt: there is no such file"
    )
    assert f"error: node 1: {lacking}" in out[0]
    assert f"error: {lacking}" in out[1]
    assert not (roots[0] / "version_1").exists()


def test_killed_rank_of_other_host_is_named(hosts, tmp_path):
    processes = two_nodes(hosts, tmp_path, *FOR_EVER, "--trainer.devices=2")
    trained(tmp_path, processes, 2)
    a_rank(processes[1]).kill()
    out = ended(processes, 30, code=1)
    assert "was ended by SIGKILL" in out[1]
    assert "error: rank 2 (process" in out[1]
    assert "error: lost the connection to 10.77.0.2: see its messages" in out[0]


def test_torchrun_continues_with_fewer_and_more_hosts(hosts, app, tmp_path):
    """One host loses power, another joins and is stopped: losses stay those of one device.

    The run uses float64, because float32 rounding could hide a skipped or repeated step. The
    tolerance is 1e-6, because the record's losses are float32.
    """
    root = tmp_path / "hosts"
    exact = ["--trainer.precision=64-true", "--last_checkpoint.every_n_train_steps=5"]
    at = ["--max-restarts=3", "--rdzv-id=elastic"]
    at += ["--rdzv-conf=last_call_timeout=1,keep_alive_interval=1"]

    def join(name):
        flags = ["--run.root", root, *exact, *FOR_EVER, "--cluster.timeout=20"]
        # with torch 2.15, a node that joins later waits in vain if this variable is not set
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return fit(hosts.hosts[name], *flags, launcher=[*torchrun(2, "1:2"), *at], env=own_store)

    def newest():
        return len(list((root / "LeNet-Synthetic").glob("version_*"))) - 1

    def continues(world_size):
        """Wait until the newest run has `world_size` ranks and two more epochs."""
        since = len(record(root, newest())["epochs"])

        def trains():
            latest = record(root, newest())
            trained_on = len(latest["epochs"]) >= since + 2
            return first.poll() is not None or (trained_on and latest["world_size"] == world_size)

        awaited(trains, 240)
        assert first.poll() is None, ended([first], 60)

    first = join("h1")
    lost = join("h2")
    continues(4)
    hosts.hosts["h2"].end()
    lost.communicate(timeout=30)
    continues(2)
    third = join("h3")
    continues(4)
    inner(third).send_signal(signal.SIGTERM)
    third.communicate(timeout=60)
    continues(2)
    inner(first).send_signal(signal.SIGTERM)
    out = ended([first], 60)
    final = record(root, newest())
    assert (final["status"], final["world_size"]) == ("interrupted", 2), out
    rows = {row["epoch"]: row["train_loss"] for row in final["epochs"] if row["whole"]}
    app("fit", *STEPS, *exact, f"--trainer.max_epochs={max(rows) + 1}")
    single = {row["epoch"]: row["train_loss"] for row in record(tmp_path / "runs")["epochs"]}
    assert list(rows) == list(range(len(rows)))
    np.testing.assert_allclose(
        list(rows.values()), [single[epoch] for epoch in rows], rtol=0, atol=1e-6
    )
