"""A real SLURM of four nodes on one machine: slurmctld and munged on a host `ctl`, a slurmd on each of h1 to h4.

A host is a set of namespaces (network, host name, processes, mounts) with a first process that everything in it
descends from, so that the end of that one is the end of all: daemons, jobs, links, /dev/shm. Nothing of it has a name
outside, so that two clusters do not meet, and the kernel ends it all when the test run is killed.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

NODES = ("h1", "h2", "h3", "h4")
SETTINGS = """\
ClusterName=test
SlurmctldHost=ctl(10.77.0.254)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={place}/socket
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool-%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# more cores on a node than the machine has
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
ReturnToService=2
KillWait=20
SlurmdTimeout=10
MessageTimeout=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=h[1-4] NodeAddr=10.77.0.[1-4] CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=low Nodes=h[1-4] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=high Nodes=h[1-4] MaxTime=INFINITE State=UP PriorityTier=10
"""


def awaited(condition: Callable[[], object], seconds: float, how_it_stands: Callable[[], str]) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, how_it_stands()
        time.sleep(0.1)


def environ(pid: int) -> dict[str, str]:
    """Environment of a living process; empty where there is none."""
    try:
        if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return {}
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except (OSError, psutil.NoSuchProcess):
        return {}
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


class Host:
    """A virtual host; the daemons start with `go`, when its network stands."""

    def __init__(self, name: str, daemons: str, place: Path) -> None:
        self.name, self.log = name, place / f"{name}.log"
        apart = "setpriv --pdeathsig KILL unshare --net --uts --mount --pid --mount-proc --fork --kill-child"
        mounts = f"mount --bind {place}/hosts /etc/hosts; mount -t tmpfs tmpfs /dev/shm"
        first = f"hostname {name}; {mounts}; ip link set lo up; read go"
        with self.log.open("w") as log:
            self.outer = subprocess.Popen(
                [*apart.split(), "sh", "-ec", f"{first}; {daemons} & wait"],
                stdin=subprocess.PIPE, stdout=log, stderr=log, text=True,
                env={**os.environ, "SLURM_CONF": f"{place}/slurm.conf"},
            )  # fmt: skip
        children = psutil.Process(self.outer.pid).children
        awaited(children, 10, self.log.read_text)
        self.pid = children()[0].pid

    def go(self) -> None:
        assert self.outer.stdin
        self.outer.stdin.write("go\n")
        self.outer.stdin.flush()

    def run(self, *command: str | Path, timeout: float = 60, env: dict[str, str] | None = None) -> str:
        """What a command printed that was run on it to its end, which must be a success."""
        enter = ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount", "--pid", "--wd=."]
        done = subprocess.run(
            [*enter, *map(str, command)], env={**os.environ, **(env or {})}, timeout=timeout,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout.strip()

    def shared_memory(self) -> list[str]:
        return os.listdir(f"/proc/{self.pid}/root/dev/shm")

    def end(self) -> None:
        """Every process on it ends at once, as when it loses power."""
        if self.outer.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self.outer.wait(30)


class Slurm:
    """The cluster: jobs, their states, and their processes as they are seen from outside."""

    def __init__(self, place: Path, stack: ExitStack) -> None:
        self.place = place
        self.conf = {"SLURM_CONF": f"{place}/slurm.conf"}
        addresses = {"ctl": "10.77.0.254", **{name: f"10.77.0.{i}" for i, name in enumerate(NODES, 1)}}
        lines = [f"{ip} {name}\n" for name, ip in {"localhost": "127.0.0.1", **addresses}.items()]
        (place / "hosts").write_text("".join(lines))
        (place / "slurm.conf").write_text(SETTINGS.format(place=place))
        (place / "key").write_bytes(os.urandom(1024))
        (place / "key").chmod(0o400)

        def host(name: str, daemons: str) -> Host:
            made = Host(name, daemons, place)
            stack.callback(made.end)
            return made

        own = " ".join(f"--{name}-file={place}/{name}" for name in ("key", "seed", "pid", "log"))
        self.ctl = host("ctl", f"munged --foreground --socket={place}/socket {own} & slurmctld -D -c")
        self.ctl.run("ip", "link", "add", "br0", "type", "bridge")
        self.ctl.run("ip", "addr", "add", "10.77.0.254/24", "dev", "br0")
        self.ctl.run("ip", "link", "set", "br0", "up")
        self.ctl.go()
        self.nodes = {name: host(name, "slurmd -D -c") for name in NODES}
        for name, node in self.nodes.items():
            ends = f"eth0 netns {node.pid} type veth peer name {name} netns {self.ctl.pid}"
            subprocess.run(["ip", "link", "add", *ends.split()], check=True, capture_output=True, timeout=20)
            self.ctl.run("ip", "link", "set", name, "master", "br0", "up")
            node.run("ip", "addr", "add", f"{addresses[name]}/24", "dev", "eth0")
            node.run("ip", "link", "set", "eth0", "up")
            node.go()
        awaited(lambda: self._states() == ["idle"] * len(NODES), 60, self.logs)

    def _states(self) -> list[str]:
        try:
            return self.run("sinfo", "-hN", "-p", "low", "-o", "%T").split()
        except AssertionError:  # slurmctld does not answer yet
            return []

    def logs(self) -> str:
        return "\n".join(f"{host.name}: {host.log.read_text()[-2000:]}" for host in (self.ctl, *self.nodes.values()))

    def run(self, *command: str | Path, timeout: float = 60, env: dict[str, str] | None = None) -> str:
        """What a command printed on the host where people log in."""
        return self.ctl.run(*command, timeout=timeout, env={**(env or {}), **self.conf})

    def submit(self, *command: str | Path, env: dict[str, str] | None = None) -> str:
        """The id of the job of `sbatch …`, which gets this process's environment."""
        flags = [f"--output={self.place}/%j.out", "--open-mode=append"]
        return self.run("sbatch", "--parsable", *flags, *command, env=env)

    def output(self, job: str) -> str:
        path = self.place / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says, by its names: JobState, ExitCode, Restarts, NodeList, …"""
        words = self.run("scontrol", "show", "job", "--oneliner", job).split()
        return {name: value for name, _, value in (word.partition("=") for word in words)}

    def reaches(self, job: str, *states: str, seconds: float = 60) -> str:
        """Wait for one of the states (COMPLETED and the like: no process of the job is left), and say which it is."""
        awaited(
            lambda: self.job(job)["JobState"] in states,
            seconds,
            lambda: f"{self.job(job)}\n{self.output(job)}\n{self.logs()}",
        )
        return self.job(job)["JobState"]

    def start_again(self, job: str, seconds: float = 60) -> None:
        """Start a requeued job, as soon as its processes are gone; SLURM itself would wait for two minutes."""
        self.reaches(job, "PENDING", seconds=seconds)
        self.run("scontrol", "update", f"jobid={job}", "StartTime=now")
        self.reaches(job, "RUNNING")

    def processes(self, job: str) -> dict[int, dict[str, str]]:
        """The living processes of a job on all hosts, as pids of this process's own /proc, with their environment."""
        found = {pid: environ(pid) for pid in psutil.pids()}
        mark = {**self.conf, "SLURM_JOB_ID": job}
        return {pid: variables for pid, variables in found.items() if mark.items() <= variables.items()}

    def ranks(self, job: str) -> dict[int, int]:
        """The pid of each rank of the job's `srun`; the processes that a rank started are left out."""
        found = {}
        for pid, variables in self.processes(job).items():
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
            pid_on_node = next(line for line in status if line.startswith("NSpid:")).split()[-1]
            if "SLURM_STEP_ID" in variables and variables["SLURM_TASK_PID"] == pid_on_node:
                found[int(variables["SLURM_PROCID"])] = pid
        return found


@contextmanager
def cluster() -> Iterator[Slurm]:
    """The cluster, or the reason why this machine cannot have it; nothing of it is left afterwards."""
    if os.geteuid() != 0:
        pytest.skip("SLURM on virtual hosts needs root")
    programs = ("slurmctld", "slurmd", "munged", "ip", "unshare", "nsenter", "setpriv")
    if missing := [name for name in programs if shutil.which(name) is None]:
        pytest.skip(f"SLURM on virtual hosts needs {', '.join(missing)}; Debian: slurm-wlm munge iproute2 util-linux")
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--pid", "--mount-proc", "--fork", "true"],
        capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    if tried.returncode != 0:
        pytest.skip(f"SLURM on virtual hosts needs namespaces: {tried.stderr.strip()}")
    if not any(Path("/sys/fs/cgroup").iterdir()):
        pytest.skip("slurmd needs /sys/fs/cgroup mounted")
    with tempfile.TemporaryDirectory(prefix="slurm-") as place, ExitStack() as stack:
        Path(place).chmod(0o755)  # munged insists
        yield Slurm(Path(place), stack)
