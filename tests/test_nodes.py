"""The rendezvous of nodes: lines printed while nodes wait, and rejected nodes."""

import json
import re
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from harness import SLOW, free_port

from app.errors import UserError
from app.launch.failures import lost
from app.launch.rendezvous import Cluster, NodeRendezvous


def meet(method, node, nodes=2, devices=1, timeout=20):
    rendezvous = NodeRendezvous(Cluster(method, node, timeout), nodes, devices)
    rendezvous.next_rendezvous()
    return rendezvous


@pytest.fixture
def go():
    """Function that calls `meet` in a thread, and returns the future of the result."""
    before = set(threading.enumerate())
    with ThreadPoolExecutor(8) as pool:
        yield lambda *args, **options: pool.submit(meet, *args, **options)
    for thread in (
        set(threading.enumerate()) - before
    ):  # otherwise, torch logs a thread's error in a later test
        thread.join(60)


def tcp(port):
    return f"tcp://127.0.0.1:{port}"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_nodes_meet_in_any_order(scheme, order, go, tmp_path):
    file = tmp_path / "meet"
    method = tcp(free_port()) if scheme == "tcp" else f"file://{file}"
    came = {}
    for node in order:
        came[node] = go(method, node, nodes=3)
        if node != order[-1]:
            with pytest.raises(TimeoutError):
                came[node].result(0.3)
    nodes = [came[node].result() for node in range(3)]
    nodes[0]._store.set("said", "by node 0")
    assert [node._store.get("said") for node in nodes] == [b"by node 0"] * 3
    assert len({node.master_port for node in nodes}) == 1
    assert not file.exists()


@SLOW
def test_missing_node_is_named_until_timeout(go, capfd):
    port = free_port()
    waiting = [go(tcp(port), node, nodes=3, timeout=9) for node in (0, 1)]
    for node in waiting:
        with pytest.raises(UserError, match=r"waited 9 s \(--cluster.timeout\) for"):
            node.result()
    assert (
        len(
            re.findall(
                rf"waiting for node 2 of 3 at 127.0.0.1:{port}, \d s", capfd.readouterr().out
            )
        )
        == 2
    )


def test_missing_node_0_times_out(go):
    port = free_port()
    with pytest.raises(
        UserError, match=rf"for node 0 of 2 at 127.0.0.1:{port} \(.*Connection refused\)"
    ):
        go(tcp(port), 1, timeout=1).result()


@SLOW
def test_foreign_listener_is_rejected(go):
    """If a foreign program has the port, node 0 cannot listen on it, and the other node times out.

    The program is silent, or answers in another protocol.
    """
    for talk in (b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"):
        with socket.create_server(("127.0.0.1", 0)) as foreign:
            port = foreign.getsockname()[1]
            with pytest.raises(
                UserError, match=rf"cannot listen on port {port} \(.*Address already in use"
            ):
                go(tcp(port), 0).result()
            waiting = go(tcp(port), 1, timeout=2)
            connection, _ = foreign.accept()
            with suppress(OSError):
                connection.sendall(talk)
            with connection, pytest.raises(UserError, match="for node 0 of 2"):
                waiting.result(15)


def test_different_flags_of_nodes_are_rejected(go):
    port = free_port()
    host = go(tcp(port), 0, nodes=3, devices=2)
    first = go(tcp(port), 1, nodes=3, devices=2)
    with pytest.raises(UserError, match=r"--trainer.devices is 2 on node 0 and 4 on node 2"):
        go(tcp(port), 2, nodes=3, devices=4).result()
    with pytest.raises(UserError, match=r"--trainer.num_nodes is 3 on node 0 and 4 on node 2"):
        go(tcp(port), 2, nodes=4, devices=2).result()
    go(tcp(port), 2, nodes=3, devices=2).result()
    assert host.result().master_port == first.result().master_port


def test_node_may_join_again_after_timeout(go):
    port = free_port()
    host = go(tcp(port), 0, nodes=3)
    with pytest.raises(UserError, match="waited 1 s"):
        go(tcp(port), 1, nodes=3, timeout=1).result()
    others = [go(tcp(port), node, nodes=3) for node in (1, 2)]
    assert {other.result().master_port for other in others} == {host.result().master_port}


def test_stale_file_is_replaced(go, tmp_path):
    file = tmp_path / "meet"
    method = f"file://{file}"
    file.write_text(json.dumps({"id": "dead", "address": "127.0.0.1", "port": free_port()}))
    early = go(method, 1)
    with pytest.raises(TimeoutError):
        early.result(0.5)
    host = go(method, 0)
    assert host.result().master_port == early.result().master_port
    assert not file.exists()


def test_file_that_cannot_be_created(go, tmp_path):
    (tmp_path / "plain").write_text("no folder")
    with pytest.raises(FileExistsError, match="plain"):  # `app.cli` prints it as one line
        go(f"file://{tmp_path}/plain/meet", 0).result()


AGREES = """\
import sys
from app.errors import UserError
from app.launch.agree import agree
from torch import distributed

folder, node = sys.argv[1], int(sys.argv[2])

def decide(launchers):
    if wrong == "decision":
        raise UserError("no such checkpoint")
    return {"of": node}

def check(decided):
    if wrong == f"check {node}":
        raise PermissionError
    if wrong == f"user {node}":
        raise UserError("no such checkpoint here")

for wrong in sys.argv[3:]:
    try:
        settings = {"model.optimizer.lr": "0.1" if wrong == "settings" and node == 2 else "0.2"}
        distributed.init_process_group("gloo", f"file://{folder}/{wrong}", rank=node, world_size=3)
        print(agree(decide, check, node, settings))
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
    distributed.destroy_process_group()
"""
PRINTED = {
    "nothing": ["{'of': 0}"] * 3,
    "decision": ["UserError: no such checkpoint"] * 3,
    "user 1": [
        f"UserError: {which}no such checkpoint here" for which in ("node 1: ", "", "node 1: ")
    ],
    "settings": [
        "UserError: --model.optimizer.lr is 0.2 on node 0 and 0.1 on node 2: give the same"
    ]
    * 3,
    "check 2": ["UserError: node 2: PermissionError"] * 2
    + ["PermissionError: "],  # the error has no message
}


@SLOW
def test_nodes_agree(tmp_path):
    """All nodes follow node 0's decision; if one node rejects it, every node prints the reason."""

    def run(node):
        command = [sys.executable, "-c", AGREES, tmp_path, str(node), *PRINTED]
        return subprocess.check_output(command, text=True, timeout=120).splitlines()

    with ThreadPoolExecutor(3) as pool:
        outputs = list(pool.map(run, range(3)))
    assert [list(lines) for lines in zip(*outputs, strict=True)] == list(PRINTED.values())


def test_lost_node_is_named_by_its_address():
    for message, name in (
        ("Connection closed by peer [10.0.0.20]:3456", "10.0.0.20"),
        ("Connection reset by peer, remote=[10.0.0.2]:1, local=[10.0.0.3]:2", "10.0.0.2"),
        ("Read error [fe80::1]:12: Connection reset by peer", "fe80::1"),
        ("Connection closed by peer [127.0.0.1]:3", "another rank"),
    ):
        assert str(lost(message)) == f"lost the connection to {name}: see its messages"
