"""The ranks of a run come together; then rank zero decides, all hear it, every node checks, and all hear who cannot."""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import Trainer
from torch import distributed
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from app.errors import UserError
from app.launch.cluster_environment import Launched, launch_id, launched
from app.launch.failures import name_nodes, own_addresses
from app.launch.process import AGENT
from app.launch.rendezvous import Deadline, NodeRendezvous, host_store
from app.system.interconnect import use_interface_to
from app.system.lightning_patches import process_group_backend

Decide = Callable[[list[str]], dict[str, Any]]
Check = Callable[[dict[str, Any]], None]
STORE = "app/store"  # key in the agents' store: port of the one that rank zero hosts


def gather_objects(mine: Any) -> list[Any]:
    """One picklable object of each rank, in order of rank, on every rank. Collective."""
    if not distributed.is_available() or not distributed.is_initialized():
        return [mine]
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, mine)
    return everyone


def agree(decide: Decide, check: Check, node: int) -> dict[str, Any]:
    """Have rank zero decide, and every rank check what it has decided. Collective, where there is a process group.

    Args:
        decide: Called in rank zero with the ids of the launchers of this run; gives what can be pickled.
        check: Called with the decision on each rank, for what may be wrong with it there.
        node: Number of this node, for the others to name it.

    Raises:
        UserError: On every rank, when rank zero cannot decide, or the decision will not do on one of them.
    """
    ids, nodes = zip(*gather_objects((launch_id(), (node, own_addresses()))), strict=True)
    name_nodes(list(nodes), node)
    launchers = sorted(set(filter(None, ids)))
    decision: list[Any] = [None, None]
    several = distributed.is_available() and distributed.is_initialized()
    if not several or distributed.get_rank() == 0:
        try:
            decision[0] = decide(launchers)
        except UserError as error:
            decision[1] = str(error)
    if several:
        distributed.broadcast_object_list(decision, 0)
    decided, wrong = decision
    if wrong is not None:
        raise UserError(wrong)
    failure: Exception | None = None
    try:
        check(decided)
    except Exception as error:
        failure = error
    reasons = gather_objects((node, failure and (str(failure) or type(failure).__name__)))
    if failure is not None:
        raise failure
    for other, reason in reasons:
        if reason is not None:
            raise UserError(reason if other == node else f"node {other}: {reason}")
    return decided


@contextmanager
def nodes_together(rendezvous: NodeRendezvous | None, timeout: float) -> Iterator[None]:
    """A process group of the first processes of all nodes, in which they agree before each starts its ranks.

    Args:
        rendezvous: How they meet; None where there is one node.
        timeout: Seconds to wait for another node.
    """
    if rendezvous is None:
        yield
        return
    store, limit = distributed.PrefixStore("nodes", rendezvous.store()), timedelta(seconds=timeout)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = rendezvous.master_addr, str(rendezvous.master_port)
    use_interface_to(rendezvous.master_addr)
    distributed.init_process_group(
        "gloo", store=store, rank=rendezvous.rank, world_size=rendezvous.world_size, timeout=limit
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()


def connect(trainer: Trainer, environment: ClusterEnvironment, timeout: float) -> None:
    """Begin the process group of the ranks, which Lightning then takes as it is. Collective.

    Does nothing in a process that a launcher has not started as one of several ranks.

    Args:
        trainer: The run's.
        environment: The trainer's.
        timeout: Seconds to wait for another rank, now and in every communication to come.

    Raises:
        UserError: When the ranks do not come together in time.
    """
    strategy: Any = trainer.strategy
    launcher = launched()
    if launcher is None and trainer.world_size > 1 and environment and environment.creates_processes_externally:
        launcher = Launched("the launcher", trainer.num_nodes, None, trainer.world_size)  # mpirun, or the user's own
    if launcher is None or launcher.world_size == 1:
        return
    if launcher.nodes > 1:
        use_interface_to(environment.main_address)
    place = f"{environment.main_address}:{environment.main_port}"
    what = f"all {launcher.world_size} processes of {launcher.by} at {place}"
    with _ending_at(Deadline(timeout), what, trainer.local_rank == 0), _explained(place):
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            begin_process_group(strategy, trainer.global_rank, launcher.world_size, timeout, key=STORE)
        strategy.setup_environment()


def begin_process_group(strategy: Any, rank: int, world_size: int, timeout: float, key: str) -> None:
    """Begin a process group in a store that rank zero hosts, of whose port the agents' store tells.

    The agents' store outlives the ranks, and what those of an earlier round have left there makes the next ones wait
    for processes that are gone. Source: https://github.com/pytorch/pytorch/issues/135712.

    Args:
        strategy: The run's.
        rank: Of this process.
        world_size: Number of ranks.
        timeout: Seconds to wait for another rank.
        key: Under which the port is told.
    """
    limit, address = timedelta(seconds=timeout), os.environ["MASTER_ADDR"]
    agents = distributed.TCPStore(address, int(os.environ["MASTER_PORT"]), timeout=limit)
    if rank == 0:
        store = host_store(address, 0, timeout)
        agents.set(key, str(store.port))
    else:
        store = _join(address, agents, key, limit)
    strategy.accelerator.setup_device(strategy.root_device)
    distributed.init_process_group(
        process_group_backend(strategy),
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=limit,
        device_id=strategy.root_device if strategy.root_device.type != "cpu" else None,
    )


def _join(address: str, agents: distributed.TCPStore, key: str, limit: timedelta) -> distributed.TCPStore:
    """The store of rank zero; one that is gone may have left its port."""
    ends = time.monotonic() + limit.total_seconds()
    while True:
        port = int(agents.get(key))
        try:
            socket.create_connection((address, port), timeout=1).close()  # TCPStore would log what it cannot reach
            store = distributed.TCPStore(address, port, timeout=timedelta(seconds=5))
        except (OSError, distributed.DistNetworkError):
            if time.monotonic() > ends:
                raise
            time.sleep(0.05)
        else:
            store.set_timeout(limit)
            return store


@contextmanager
def _explained(place: str) -> Iterator[None]:
    """Say in one line why processes did not come together, in which gloo's own errors are RuntimeErrors."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        if "EADDRINUSE" in str(error):
            raise UserError(f"{place} is in use: set MASTER_PORT to another port") from error
        raise UserError(f"no process group at {place}: {str(error).splitlines()[0]}") from error


@contextmanager
def _ending_at(deadline: Deadline, what: str, say: bool) -> Iterator[None]:
    """End this process when time is up: torch waits longer than it was told where a foreign listener has the port."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.5):
            try:
                deadline.check(what, say=say)
            except UserError as error:
                if "TORCHELASTIC_ERROR_FILE" in os.environ:
                    get_error_handler().record_exception(error)
                if AGENT not in os.environ:  # which says it
                    print(f"error: {error}", file=sys.stderr, flush=True)
                os._exit(2)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()
