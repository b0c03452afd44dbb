"""What rank zero decides before a run begins, told to all ranks: its directory, the checkpoint, the tracker's run."""

import hashlib
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import Trainer
from torch import distributed

from app.errors import UserError
from app.launch.cluster_environment import Launched, launch_id, launched, use_interface_to
from app.launch.messages import Patience
from app.launch.process import PARENT
from app.launch.rendezvous import Rendezvous
from app.system.lightning_patches import cluster_environment, process_group_backend, set_timeout

Decide = Callable[[list[str]], dict[str, Any]]
Check = Callable[[dict[str, Any]], None]
DECIDED = "APP_DECIDED"  # environment of the processes that `ddp` starts: what rank zero has decided, as JSON


def agree(trainer: Trainer, decide: Decide, check: Check, timeout: float) -> dict[str, Any]:
    """Have rank zero decide, and tell all ranks; wait for the other nodes where there are any. Collective.

    Args:
        trainer: The run's; none of its processes has been started by it yet.
        decide: Called in rank zero with the ids of the launchers of this run; gives what JSON can hold.
        check: Called with the decision on each node, for what may be wrong with it there.
        timeout: Seconds to wait for another rank, now and in every communication to come.

    Raises:
        UserError: When rank zero's decision is one, a node's check finds one, or the ranks do not come together in
            time.
    """
    strategy: Any = trainer.strategy
    set_timeout(strategy, timeout)
    if PARENT in os.environ:
        return json.loads(os.environ[DECIDED])
    environment = cluster_environment(trainer)
    launcher = launched()
    own = launch_id()
    if launcher is not None and launcher.world_size > 1:
        decided = _among_tasks(trainer, launcher, decide, check, timeout)
    elif isinstance(environment, Rendezvous):
        devices = getattr(strategy, "num_processes", 1)
        decided = environment.meet(devices, lambda: decide([]), check)
        use_interface_to(environment.main_address)
    elif trainer.world_size > 1 and environment is not None and environment.creates_processes_externally:
        others = Launched("the launcher", trainer.num_nodes, None, trainer.world_size)  # mpirun, or the user's own
        decided = _among_tasks(trainer, others, decide, check, timeout)
    else:
        decided = decide([own] if own else [])
        check(decided)
    os.environ[DECIDED] = json.dumps(decided)
    return decided


def _among_tasks(trainer: Trainer, launcher: Launched, decide: Decide, check: Check, timeout: float) -> dict[str, Any]:
    """Begin the process group early, which Lightning then takes as it is, and decide in it."""
    strategy: Any = trainer.strategy
    environment = cluster_environment(trainer)
    if launcher.nodes > 1:
        use_interface_to(environment.main_address)
    place = f"{environment.main_address}:{environment.main_port}"
    with _deadline(timeout, f"{launcher.world_size} processes of {launcher.by} at {place}", trainer.local_rank == 0):
        ids: list[Any] = [None] * launcher.world_size
        with _explained(environment):
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                _begin_process_group(strategy, timeout)
            strategy.setup_environment()
            distributed.all_gather_object(ids, launch_id())
        word: list[Any] = [None, None]
        if trainer.is_global_zero:
            try:
                word[0] = decide(sorted(set(filter(None, ids))))
            except UserError as error:
                word[1] = str(error)
        with _explained(environment):
            distributed.broadcast_object_list(word, 0)
        decided, wrong = word
        if wrong is None:
            try:
                check(decided)
            except UserError as error:
                wrong = str(error)
            found: list[Any] = [None] * launcher.world_size
            with _explained(environment):
                distributed.all_gather_object(found, wrong)
            wrong = wrong or next(filter(None, found), None)
    if wrong is not None:
        raise UserError(wrong)
    return decided


@contextmanager
def _explained(environment: ClusterEnvironment) -> Iterator[None]:
    """Say in one line why processes did not come together, in which gloo's own errors are RuntimeErrors."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        place = f"{environment.main_address}:{environment.main_port}"
        if "EADDRINUSE" in str(error):
            raise UserError(f"{place} is in use: set MASTER_PORT to another port") from error
        raise UserError(f"no process group at {place}: {str(error).splitlines()[0]}") from error


def _begin_process_group(strategy: Any, timeout: float) -> None:
    """Begin the process group of torchrun's workers among keys of its own.

    The agents' store outlives the workers, and what those of an earlier round have left there makes the next ones wait
    for processes that are gone. Source: https://github.com/pytorch/pytorch/issues/135712.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = timedelta(seconds=timeout)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = distributed.TCPStore(address, port, is_master=False, timeout=limit)
    prefix = agree_on_a_name(distributed.PrefixStore("app", store), rank, world_size)
    strategy.accelerator.setup_device(strategy.root_device)
    distributed.init_process_group(
        process_group_backend(strategy),
        store=distributed.PrefixStore(prefix, store),
        rank=rank,
        world_size=world_size,
        timeout=limit,
        device_id=strategy.root_device if strategy.root_device.type != "cpu" else None,
    )


def agree_on_a_name(store: distributed.Store, rank: int, world_size: int) -> str:
    """Find a name that only the processes that are here now have in common, whatever others have left in the store.

    Each rank writes a word of its own. Rank zero says which words it sees, over and over, for some may be old. A rank
    that finds its own among them confirms that list; when all have confirmed the same one, it is the name.

    Args:
        store: One that all ranks share, and that may hold what earlier processes have written here.
        rank: Of this process.
        world_size: Number of processes.
    """
    mine = uuid.uuid4().hex
    store.set(f"word{rank}", mine)
    while True:
        if rank == 0:
            words = _values(store, [f"word{other}" for other in range(world_size)])
            confirmed = _values(store, [f"confirmed{other}" for other in range(1, world_size)])
            seen = json.dumps(words)
            agreed = all(confirmation == seen for confirmation in confirmed)
            store.set("seen", json.dumps([words, agreed]))
        else:
            (said,) = _values(store, ["seen"])
            words, agreed = json.loads(said or "[[], false]")
            if rank < len(words) == world_size and words[rank] == mine:
                store.set(f"confirmed{rank}", json.dumps(words))
            else:
                agreed = False
        if agreed:
            return hashlib.sha256(json.dumps(words).encode()).hexdigest()
        time.sleep(0.05)


def _values(store: distributed.Store, keys: list[str]) -> list[str | None]:
    return [store.get(key).decode() if store.check([key]) else None for key in keys]


@contextmanager
def _deadline(seconds: float, what: str, say: bool) -> Iterator[None]:
    """End this process when time is up: torch waits longer than it was told where a foreign listener has the port."""
    patience, done = Patience(seconds), threading.Event()

    def watch() -> None:
        while not done.wait(0.5):
            try:
                patience.check(f"all {what}", say=say)
            except UserError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
                os._exit(2)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()
