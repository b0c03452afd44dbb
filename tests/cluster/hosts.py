"""Virtual hosts on one machine, connected by a virtual switch.

A host is a set of namespaces: network, host name, processes, mounts. All its processes descend from
its first process. When the first process ends, the kernel removes the host's daemons, jobs, links
and /dev/shm, also if the test run is killed. Names in a host are invisible outside, so that two
tests cannot collide.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest


def awaited(condition, seconds, how_it_stands=str):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, how_it_stands()
        time.sleep(0.1)


class Host:
    """Virtual host. Its command starts when `go` is called, after the network is set up."""

    def __init__(self, name, place, command="sleep infinity"):
        self.name = name
        self.log = place / f"{name}.log"
        apart = "setpriv --pdeathsig KILL unshare --net --uts --mount --pid --mount-proc"
        mounts = f"mount --bind {place}/hosts /etc/hosts; mount -t tmpfs tmpfs /dev/shm"
        first = f"hostname {name}; {mounts}; ip link set lo up; read go"
        with self.log.open("w") as log:
            self.outer = subprocess.Popen(
                [
                    *apart.split(), "--fork", "--kill-child", "sh", "-ec",
                    f"{first}; {command} & wait",
                ],
                stdin=subprocess.PIPE, stdout=log, stderr=log, text=True,
                env={**os.environ, "SLURM_CONF": f"{place}/slurm.conf"},
            )  # fmt: skip
        children = psutil.Process(self.outer.pid).children
        awaited(children, 10, self.log.read_text)
        self.pid = children()[0].pid
        self.enter = f"nsenter --target {self.pid} --net --uts --mount --pid --wd=.".split()

    def go(self):
        assert self.outer.stdin
        self.outer.stdin.write("go\n")
        self.outer.stdin.flush()

    def run(self, *command, timeout=60, env=None):
        """Run a command on this host, check that it succeeds, and return its output."""
        process = self.start(*command, env=env)
        out, _ = process.communicate(timeout=timeout)
        assert process.returncode == 0, out
        return out.strip()

    def shared_memory(self):
        return os.listdir(f"/proc/{self.pid}/root/dev/shm")

    def end(self):
        """Kill every process of this host at once, as a power failure would."""
        if self.outer.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self.outer.wait(30)

    def start(self, *command, env=None):
        """Start a command on this host."""
        return subprocess.Popen(
            [*self.enter, *map(str, command)], env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip


class Network:
    """Hosts on a switch: `ctl` at 10.77.0.254, and h1 to hN at 10.77.0.1 and so on."""

    def __init__(self, count, place, stack):
        self.place = place
        self.stack = stack
        self.addresses = {
            "ctl": "10.77.0.254",
            **{f"h{i}": f"10.77.0.{i}" for i in range(1, count + 1)},
        }
        lines = [
            f"{ip} {name}\n" for name, ip in {"localhost": "127.0.0.1", **self.addresses}.items()
        ]
        (place / "hosts").write_text("".join(lines))
        self.hosts = {}

    def switch_on(self, command="sleep infinity"):
        """Make the host `ctl` with the switch, and start a command on it."""
        switch = self._make("ctl", command)
        for words in (
            "link add br0 type bridge",
            "addr add 10.77.0.254/24 dev br0",
            "link set br0 up",
        ):
            switch.run("ip", *words.split())
        switch.go()
        return switch

    def add(self, name, command="sleep infinity"):
        """Make a host, connect it to the switch, and start a command on it."""
        switch = self.hosts["ctl"]
        host = self._make(name, command)
        ends = f"eth0 netns {host.pid} type veth peer name {name} netns {switch.pid}"
        subprocess.run(
            ["ip", "link", "add", *ends.split()], check=True, capture_output=True, timeout=20
        )
        switch.run("ip", "link", "set", name, "master", "br0", "up")
        host.run("ip", "addr", "add", f"{self.addresses[name]}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        host.go()
        return host

    def _make(self, name, command):
        self.hosts[name] = host = Host(name, self.place, command)
        self.stack.callback(host.end)
        return host

    def link(self, name, state):
        """Set the link of a host `up` or `down`, at the switch."""
        self.hosts["ctl"].run("ip", "link", "set", name, state)

    def logs(self):
        return "\n".join(
            f"{host.name}: {host.log.read_text()[-2000:]}" for host in self.hosts.values()
        )


@contextmanager
def place_for_hosts(what, programs=(), packages=""):
    """Yield a folder for virtual hosts and their exit stack, or skip the test."""
    needed = (*programs, "ip", "unshare", "nsenter", "setpriv")
    missing = [name for name in needed if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{what} needs {', '.join(missing)}; Debian: {packages}iproute2 util-linux")
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--pid", "--mount-proc", "--fork", "true"],
        capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    if tried.returncode != 0:
        pytest.skip(f"{what} needs namespaces: {tried.stderr.strip()}")
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder, ExitStack() as stack:
        Path(folder).chmod(0o755)  # munged requires it
        yield Path(folder), stack


@contextmanager
def network(count):
    """Yield a network of `count` hosts, and remove it afterwards."""
    with place_for_hosts("a network of virtual hosts") as (place, stack):
        made = Network(count, place, stack)
        made.switch_on()
        for index in range(1, count + 1):
            made.add(f"h{index}")
        yield made
