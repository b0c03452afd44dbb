"""A real SLURM on one machine: slurmctld and munged on `ctl`, slurmd on h1 to h4."""

import os
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from cluster.hosts import Network, awaited, place_for_hosts

PATH = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
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


def environ(pid):
    """Return a living process's environment; empty if the process has ended."""
    with suppress(psutil.Error):
        return psutil.Process(pid).environ()
    return {}


class Slurm:
    """SLURM cluster: its jobs, their states, and their processes, with pids of the real machine."""

    def __init__(self, place, stack):
        self.place = place
        self.network = Network(len(NODES), place, stack)
        self.conf = {"SLURM_CONF": f"{place}/slurm.conf"}
        (place / "slurm.conf").write_text(SETTINGS.format(place=place))
        (place / "key").write_bytes(os.urandom(1024))
        (place / "key").chmod(0o400)
        files = " ".join(f"--{name}-file={place}/{name}" for name in ("key", "seed", "pid", "log"))
        self.ctl = self.network.switch_on(
            f"munged --foreground --socket={place}/socket {files} & slurmctld -D -c"
        )
        self.nodes = {name: self.network.add(name, "slurmd -D -c") for name in NODES}
        awaited(lambda: self._states() == ["idle"] * len(NODES), 60, self.network.logs)

    def _states(self):
        try:
            return self.run("sinfo", "-hN", "-p", "low", "-o", "%T").split()
        except AssertionError:  # slurmctld does not answer yet
            return []

    def run(self, *command, timeout=60, env=None):
        """Run a command on `ctl`, check that it succeeds, and return its output.

        This Python's folder is first in PATH, unless `env` has another PATH.
        """
        return self.ctl.run(*command, timeout=timeout, env={**PATH, **(env or {}), **self.conf})

    def submit(self, *command, env=None):
        """Submit a job with this process's environment, and return its id."""
        flags = [f"--output={self.place}/%j.out", "--open-mode=append"]
        return self.run("sbatch", "--parsable", *flags, *command, env=env)

    def output(self, job):
        path = self.place / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def job(self, job):
        """Return the fields of `scontrol show job`: JobState, ExitCode, Restarts, NodeList, …"""
        words = self.run("scontrol", "show", "job", "--oneliner", job).split()
        return {name: value for name, _, value in (word.partition("=") for word in words)}

    def reaches(self, job, *states, seconds=60):
        """Wait until a job is in one of the states, and return its state."""
        awaited(
            lambda: self.job(job)["JobState"] in states,
            seconds,
            lambda: f"{self.job(job)}\n{self.output(job)}\n{self.network.logs()}",
        )
        return self.job(job)["JobState"]

    def start_again(self, job, seconds=60):
        """Start a requeued job after two seconds; SLURM itself would wait for two minutes.

        SLURM waits because slurmd rejects a job that starts in the same second in which it was
        killed: "already killed, do not launch batch job". slurm_cred_revoked counts whole seconds.
        """
        self.reaches(job, "PENDING", seconds=seconds)
        self.run("scontrol", "update", f"jobid={job}", "StartTime=now+2seconds")
        self.reaches(job, "RUNNING")

    def processes(self, job):
        """Return the environments of a job's living processes, by pid on the real machine."""
        environments = {pid: environ(pid) for pid in psutil.pids()}
        mark = {**self.conf, "SLURM_JOB_ID": job}
        return {
            pid: variables
            for pid, variables in environments.items()
            if mark.items() <= variables.items()
        }


@contextmanager
def cluster():
    """Yield a cluster, and remove it afterwards; skip the test without the requirements."""
    daemons = ("slurmctld", "slurmd", "munged")
    with place_for_hosts("SLURM on virtual hosts", daemons, "slurm-wlm munge ") as (place, stack):
        if not any(Path("/sys/fs/cgroup").iterdir()):
            pytest.skip("slurmd needs /sys/fs/cgroup mounted")
        yield Slurm(place, stack)
