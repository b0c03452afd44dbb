"""The meeting of nodes: what is said while they wait, and what is refused."""

import json
import re
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cluster.hosts import awaited
from harness import free_port

from app.errors import UserError
from app.launch.meeting import Guest, Host, Place
from app.launch.messages import receive, send
from app.launch.rendezvous import Cluster, Rendezvous


def tcp(port: int, host: str = "127.0.0.1") -> Place:
    return Place(f"tcp://{host}:{port}", host, port, None)


def hello(node: int, nodes: int = 2, devices: int = 1) -> dict[str, int]:
    return {"node": node, "nodes": nodes, "devices": devices}


@pytest.fixture
def go() -> Any:
    """Start a node of a meeting in a thread."""
    with ThreadPoolExecutor(8) as pool:

        def start(place: Place, node: int, timeout: float = 20, decided: Any = None, **said: int) -> Future[Any]:
            meeting = (Guest if node else Host)(place, hello(node, **said), timeout)
            future = pool.submit(meeting.meet, lambda: decided, lambda decided: None)
            future.meeting = meeting  # type: ignore[attr-defined]
            return future

        yield start


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_whoever_comes_first(scheme: str, order: tuple[int, ...], go: Any, tmp_path: Path) -> None:
    file = tmp_path / "meet"
    place = tcp(free_port()) if scheme == "tcp" else Place(f"file://{file}", "", 0, file)
    came = {}
    for node in order:
        came[node] = go(place, node, nodes=3, decided=f"of {node}")
        if node != order[-1]:
            with pytest.raises(TimeoutError):
                came[node].result(0.3)
    assert {future.result()["decided"] for future in came.values()} == {"of 0"}
    assert not file.exists()


def test_who_is_missing_is_said_and_the_wait_ends(go: Any, capfd: pytest.CaptureFixture[str]) -> None:
    place = tcp(free_port())
    host, guest = go(place, 0, nodes=3, timeout=9), go(place, 1, nodes=3, timeout=9)
    for waiting in (host, guest):
        with pytest.raises(UserError, match=r"waited 9 s \(--cluster.timeout\) for"):
            waiting.result()
    said = capfd.readouterr().out
    assert re.search(rf"waiting for node 2 of 3 at {place}, \d s", said)
    assert re.search(rf"waiting for the other nodes of 3, with node 0 at {place}, \d s", said)


def test_node_0_that_is_not_there(go: Any) -> None:
    port = free_port()
    with pytest.raises(UserError, match=rf"for node 0 of 2 at 127.0.0.1:{port} \(nobody listens there yet\)"):
        go(tcp(port), 1, timeout=1).result()


def test_node_0_on_the_wrong_machine(go: Any) -> None:
    with pytest.raises(UserError, match=r"192\.0\.2\.77 is no address of this machine, which is node 0"):
        go(tcp(free_port(), "192.0.2.77"), 0, timeout=1).result()


def test_a_foreign_listener(go: Any) -> None:
    """One that is silent, and one that talks nonsense; node 0 cannot have the port, the other waits in vain."""
    for talk in (b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"):
        with socket.create_server(("127.0.0.1", 0)) as foreign:
            port = foreign.getsockname()[1]
            with pytest.raises(UserError, match=rf"node 0 cannot listen on port {port} \(Address already in use\)"):
                go(tcp(port), 0).result()
            waiting = go(tcp(port), 1, timeout=2)
            connection, _ = foreign.accept()
            connection.sendall(talk)
            with connection, pytest.raises(UserError, match="for node 0 of 2"):
                waiting.result(15)


def test_a_foreign_caller_does_no_harm(go: Any) -> None:
    place = tcp(free_port())
    host = go(place, 0)
    for talk in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"", json.dumps({"greeting": "other"}).encode() + b"\n"):
        connection = None
        while connection is None:
            try:
                connection = socket.create_connection((place.host, place.port))
            except ConnectionRefusedError:
                time.sleep(0.01)
        with connection:
            connection.sendall(talk)
    assert go(place, 1).result() == host.result()


def test_nodes_that_do_not_fit_together(go: Any) -> None:
    place = tcp(free_port())
    host = go(place, 0, nodes=3, devices=2)
    first = go(place, 1, nodes=3, devices=2)
    for node, said, remedy in (
        (2, {"nodes": 3, "devices": 4}, "--trainer.devices is 2 on node 0 and 4 on node 2: give the same"),
        (2, {"nodes": 4, "devices": 2}, "--trainer.num_nodes is 3 on node 0 and 4 on node 2: give the same"),
    ):
        with pytest.raises(UserError, match=remedy):
            go(place, node, **said).result()
    awaited(lambda: 1 in host.meeting.guests, 20)
    with pytest.raises(UserError, match=r"another node has --cluster.node_rank 1"):
        go(place, 1, nodes=3, devices=2).result()
    go(place, 2, nodes=3, devices=2).result()
    assert host.result() == first.result()


def test_what_node_0_decides_wrongly_is_said_on_every_node(go: Any) -> None:
    place = tcp(free_port())

    def decide() -> None:
        raise UserError("no such checkpoint")

    with ThreadPoolExecutor(1) as pool:
        host = pool.submit(Host(place, hello(0, nodes=2), 20).meet, decide, print)
        with pytest.raises(UserError, match="node 0: no such checkpoint"):
            go(place, 1, nodes=2).result()
        with pytest.raises(UserError, match=r"^no such checkpoint"):
            host.result()


@pytest.mark.parametrize("kind", [UserError, PermissionError])
def test_what_will_not_do_on_one_node_is_said_on_every_node(kind: type[Exception], go: Any) -> None:
    place = tcp(free_port())

    def check(decided: Any) -> None:
        raise kind("no such checkpoint here")

    host, other = go(place, 0, nodes=3), go(place, 2, nodes=3)
    with ThreadPoolExecutor(1) as pool:
        lacking = pool.submit(Guest(place, hello(1, nodes=3), 20).meet, lambda: None, check)
        with pytest.raises(UserError, match=r"^no such checkpoint here"):
            lacking.result()
    for node in (host, other):
        with pytest.raises(UserError, match=r"^node 1: no such checkpoint here"):
            node.result()


def test_one_that_ends_before_it_is_ready(go: Any) -> None:
    place = tcp(free_port())
    host = go(place, 0, nodes=2)
    awaited(lambda: host.meeting.port and _connects(place), 20)
    with socket.create_connection((place.host, place.port)) as caller:
        send(caller, {"greeting": "data-parallel-lab", **hello(1)})
        assert receive(caller)["wrong"] is None
        assert receive(caller)["decided"] is None
    with pytest.raises(UserError, match=r"^node 1: it has ended: see what it says"):
        host.result()


def test_a_caller_that_says_half_of_it_holds_nobody_up(go: Any) -> None:
    place = tcp(free_port())
    host = go(place, 0, nodes=2)
    awaited(lambda: host.meeting.port and _connects(place), 20)
    with socket.create_connection((place.host, place.port)) as caller:
        caller.sendall(b'{"greeting": "data-parallel-lab", "node": 1}\n')  # and nothing else
        assert caller.recv(100) == b""
    assert go(place, 1, nodes=2).result() == host.result()


def _connects(place: Place) -> bool:
    try:
        socket.create_connection((place.host, place.port)).close()
    except OSError:
        return False
    return True


def test_a_node_is_known_by_its_whole_address() -> None:
    cluster = Rendezvous(Cluster("tcp://10.0.0.1:29500", 0), 3)
    cluster.names = {"10.0.0.2": "node 1", "10.0.0.20": "node 2", "fe80::1": "node 0"}
    for said, name in (
        ("Connection closed by peer [10.0.0.20]:3456", "node 2"),
        ("Connection reset by peer, remote=[10.0.0.2]:1", "node 1"),
        ("from 10.0.0.2:1234", "node 1"),
        ("[fe80::1]:12", "node 0"),
        ("[10.0.0.21]:3", None),
    ):
        assert cluster.name_of(said) == name


def test_one_that_leaves_may_come_again(go: Any) -> None:
    place = tcp(free_port())
    host = go(place, 0, nodes=3)
    with pytest.raises(UserError, match="waited"):
        go(place, 1, nodes=3, timeout=0.5).result()
    others = [go(place, node, nodes=3) for node in (1, 2)]
    assert [other.result() for other in others] == [host.result()] * 2


def test_a_stale_file_is_replaced_and_a_live_one_refused(
    go: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "meet"
    place = Place(f"file://{file}", "", 0, file)
    file.write_text(json.dumps({"id": "dead", "addresses": ["127.0.0.1"], "port": free_port()}))
    early = go(place, 1)
    with pytest.raises(TimeoutError):
        early.result(0.5)
    host = go(place, 0, nodes=2)
    assert host.result() == early.result()
    assert f"replacing {file}, which a run that is gone has left" in capfd.readouterr().out

    host = go(place, 0)
    while not file.exists():
        time.sleep(0.01)
    with pytest.raises(UserError, match=r"another run is meeting at .* just now"):
        go(place, 0).result()
    assert go(place, 1).result() == host.result()
    assert not file.exists()


def test_a_file_that_cannot_be_made(go: Any, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("no folder")
    file = tmp_path / "plain" / "meet"
    with pytest.raises(UserError, match=f"--cluster.init_method file://{file}: .*: name a file that can be made"):
        go(Place(f"file://{file}", "", 0, file), 0).result()
