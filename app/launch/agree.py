"""Process group of a run's ranks, and their agreement: rank zero decides, all ranks check."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from lightning import Trainer
from torch import distributed

from app.errors import UserError
from app.launch.cluster_environment import launch_id
from app.launch.rendezvous import Deadline, host_store, reach_store
from app.system.addresses import use_interface_to, use_loopback
from app.system.connections import call_apart, form

STORE = "app/store"  # key of rank zero's port in the agents' store
Decision = dict[str, Any]  # rank zero's decision, picklable


def gather_objects(mine: Any) -> list[Any]:
    """Gather every rank's picklable object on every rank, in order of rank. Collective."""
    if not distributed.is_initialized():
        return [mine]
    everyone = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, mine)
    return everyone


def host_group(timeout: float) -> Any:
    """Create a gloo group of all ranks for this application's own collective calls. Collective.

    Collective calls of the user's code run in the default group. If only one rank makes such a
    call, by mistake, the call times out. In a shared group, gloo would instead match this call with
    one of our calls, and abort the process because the sizes differ.

    Args:
        timeout: Seconds to wait for another rank.
    """
    return form(lambda: distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout)))


def agree(
    decide: Callable[[list[str]], Decision],
    check: Callable[[Decision], None],
    node: int,
    settings: dict[str, str],
) -> Decision:
    """Let rank zero decide, and every rank check the decision. Collective.

    Args:
        decide: Function called on rank zero with the ids of the run's launchers; returns a
            picklable decision.
        check: Function called with the decision on each rank; raises a UserError if the rank cannot
            follow it.
        node: Number of this node.
        settings: Flags and values of this process, which must be equal on all ranks.

    Raises:
        UserError: On every rank, when settings differ, rank zero cannot decide, or a rank rejects
            the decision.
    """
    ranks = gather_objects((launch_id(), node, settings))
    expected = ranks[0][-1]
    for rank, (_, number, given) in enumerate(ranks):
        place = f"node {number}" if number else f"rank {rank}"
        for flag in expected | given:
            value = expected.get(flag, "not set")
            other = given.get(flag, "not set")
            if value != other:
                raise UserError(
                    f"--{flag} is {value} on node 0 and {other} on {place}: give the same"
                )
    decided: Decision | UserError = {}
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        launchers = {launcher for launcher, _, _ in ranks}
        try:
            decided = decide(sorted(launchers - {None}))
        except UserError as error:
            decided = error
    decided = gather_objects(decided)[0]
    if isinstance(decided, UserError):
        raise decided
    failure: Exception | None = None
    try:
        check(decided)
    except Exception as error:
        failure = error
    reason = failure and (str(failure) or type(failure).__name__)
    reasons = gather_objects((node, reason))
    if failure is not None:
        raise failure
    for other_node, reason in reasons:
        if reason is not None:
            if other_node != node:
                reason = f"node {other_node}: {reason}"
            raise UserError(reason)
    return decided


def connect(trainer: Trainer, timeout: float) -> None:
    """Initialize the process group under a launcher; Lightning then uses it. Collective.

    Args:
        trainer: The run's trainer.
        timeout: Seconds to wait for another rank.

    Raises:
        UserError: When ranks are missing at the deadline, or the process group cannot be created.
    """
    strategy: Any = trainer.strategy
    environment = getattr(strategy, "cluster_environment", None)
    if environment is None or trainer.world_size == 1 or distributed.is_initialized():
        return
    # whether a launcher, or the user's ClusterEnvironment plugin, has started the processes
    if not environment.creates_processes_externally:
        return
    if trainer.num_nodes > 1:
        use_interface_to(environment.main_address)
    else:
        use_loopback()
    place = f"{environment.main_address}:{environment.main_port}"
    missing = f"all {trainer.world_size} processes at {place}"

    def begin() -> distributed.TCPStore | None:
        store = None
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = use_own_store(trainer.global_rank, timeout)
        elif trainer.global_rank == 0:  # torch's own store would listen on all interfaces
            store = host_store(environment.main_address, environment.main_port, timeout)
        strategy.setup_environment()
        return store  # keeps the store alive until the group exists

    try:  # in a thread, because torch ignores its timeout if another program listens at the address
        deadline = Deadline(timeout, quiet=trainer.local_rank != 0)
        call_apart(begin, lambda: deadline.check(missing))
    except (RuntimeError, OSError) as error:  # gloo raises RuntimeError
        raise UserError(f"no process group at {place}: {str(error).splitlines()[0]}") from error
    if strategy.root_device.type == "cuda":
        # again, because `begin` has set the device only in another thread
        torch.cuda.set_device(strategy.root_device)


def use_own_store(rank: int, timeout: float) -> distributed.TCPStore:
    """Host a store on rank zero for the process group, and publish its port in the agents' store.

    The agents' store outlives the ranks. If the process group used it, keys of an earlier attempt
    would make restarted ranks wait for processes that have ended.
    Source: https://github.com/pytorch/pytorch/issues/135712.

    Returns:
        The store. The caller must keep a reference until the process group exists.
    """
    address = os.environ["MASTER_ADDR"]
    agents = reach_store(address, int(os.environ["MASTER_PORT"]))
    store = None
    if rank == 0:
        store = host_store(address, 0, timeout)
        agents.set(STORE, str(store.port))
    while store is None:  # `connect` limits the time
        # there may be no port yet, or that of an earlier attempt's closed store
        with suppress(OSError, distributed.DistError):
            store = reach_store(address, int(agents.get(STORE)))
        time.sleep(0.05)
    os.environ["MASTER_PORT"] = str(store.port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    return store
