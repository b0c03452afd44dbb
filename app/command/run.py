"""Commands `fit`, `validate`, `test` and `predict`, from the command line to the exit code."""

import functools
import gc
import hashlib
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from jsonargparse import Namespace
from lightning import LightningDataModule
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn

from app.command.arguments import leaves
from app.command.assembly import drop_callbacks, patch, trainer_arguments
from app.command.checkpoints import check_checkpoint
from app.command.configuration import Flags, shared_settings
from app.command.decision import decide, release_folders
from app.command.live import Live
from app.command.outcome import can, close, end_early, exit_code, record_of, stopped_by
from app.command.rate_search import RATES, search
from app.command.rules import check
from app.command.run_options import is_recorded
from app.data import ImageData
from app.data.exact_loader import Exactness
from app.errors import CAUSES, ExitStatus, UserError
from app.launch.agree import agree, connect, gather_objects
from app.launch.elastic import ENDED, PROCESS, RUN_DIR, STOPPED, launch, launch_apart, note
from app.launch.failures import error_file, explaining_errors
from app.launch.live import ENDED as ENDED_RUN
from app.launch.live import JOINED, LIVE, choose_device, open_run
from app.launch.process import end_in_order, end_undisturbed, is_worker
from app.launch.rendezvous import NodeRendezvous
from app.launch.signals import Signals, ended_in_time
from app.launch.spawn import SpawnLauncher
from app.launch.watchdog import watched
from app.modules import ImageClassifier
from app.monitor.loggers import make_loggers, trackers, tracking_mode
from app.monitor.run_record import RunRecord
from app.record import RateSearch
from app.system import lightning_patches
from app.system.machine import busy, usable_cores, versions
from app.system.torch_patches import end_process_group
from app.system.tracebacks import MADE_BY
from app.system.trust import local_modules


@error_file()
def run(argv: Sequence[str]) -> int:
    """Run fit, validate, test or predict. A rank of torch elastic writes an error file.

    Args:
        argv: The arguments of `python -m app`.

    Returns:
        Exit code.

    Raises:
        UserError: For an error that the user can correct.
        RankError: When another rank has failed.
    """
    lightning_patches.hide_lines()
    note(PROCESS, str(os.getpid()))
    try:
        if LIVE in os.environ and is_worker():
            choose_device()
        cli = Flags(argv)
        prepare_process(cli)
        with explaining_errors():
            if cli.resolved.agent_processes:
                code = start_ranks(cli)
            elif cli.resolved.live:
                code = train_live(cli)
            else:
                code = train(cli)
        note(ENDED)
        return code
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        return ExitStatus.of(end).code
    finally:
        release_folders()
        end_process_group()
        end_undisturbed()


def train(cli: Flags, live: Live | None = None) -> int:
    """Train or evaluate as one rank, and return the exit code.

    Args:
        cli: The command's flags.
        live: Membership and newest state of a rank of a live run.
    """
    build(cli, cli.config)
    connect_ranks(cli)
    if live is not None and live.state.decided:
        prepare_data(cli)
        decided = live.decided()
    else:
        decided = decide_together(cli)
    precision = cli.trainer.precision_plugin
    if decided["checkpoint"] is not None and isinstance(precision, DoublePrecision):
        precision.convert_module(cli.model)  # before Lightning loads float64 weights
    found = None
    if cli.config.run.find_lr and cli.command == "fit":
        found = find_rate(cli, decided)
    recorder = None
    if is_recorded(cli.config.trainer):
        recorder = add_record(cli, decided)
        recorder.record.found_lr = found or recorder.record.found_lr
    if live is not None:
        live.attach(cli.trainer, decided)
    return execute(cli, decided["checkpoint"], recorder, live)


def train_live(cli: Flags) -> int:
    """Train as a rank of a live run: again after each change of the ranks, from the newest state.

    Returns:
        Exit code.
    """
    build(cli, cli.config)  # so that the other ranks wait less for this one
    prepare_data(cli)
    live = Live(cli)
    live.member.check(identity(cli))
    backend = cli.resolved.options.get("process_group_backend")
    if backend is None:
        backend = "nccl" if cli.resolved.accelerator == "cuda" else "gloo"
    while live.meet(backend):
        cli.resolved = check(cli.command, cli.config)
        reset_seed()
        try:
            code = train(cli, live)
            if cli.trainer.is_global_zero:
                with suppress(RuntimeError):  # node 0 has ended already
                    live.member.store.set(ENDED_RUN, "")
            return code
        except Exception as error:
            live.began = time.monotonic()
            if not live.member.has_changed(error):
                raise
        stopped = Signals.of(cli.trainer).noted
        if stopped:
            if JOINED not in os.environ:
                live.save()
            code = ExitStatus.stopped_by(CAUSES[stopped]).code
            note(STOPPED, str(code))
            return code
        del cli.model, cli.datamodule, cli.config_init, cli.trainer
        gc.collect()  # frees the devices' memory
    return 0


def identity(cli: Flags) -> dict[str, str | None]:
    """Return everything that must be equal on all machines of a live run, by name."""
    code = hashlib.sha256()
    names = {"app", *local_modules()}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] in names and file:
            code.update(Path(file).read_bytes())
    known = {**versions(), **shared_settings(cli.config), "the code": code.hexdigest()[:12]}
    del known["commit"]  # it may change while the code does not
    if isinstance(cli.datamodule, ImageData):
        known["the data"] = str(cli.datamodule.content)
    return known


def prepare_process(cli: Flags) -> None:
    """Set the number of threads, and note which flag chose each class, for error messages."""
    run = cli.config.run
    if run.virtual_devices and run.threads == "auto" and "OMP_NUM_THREADS" not in os.environ:
        # divide the cores by the virtual devices, not by the ranks, because the number of threads
        # affects rounding
        run.threads = max(usable_cores() // run.virtual_devices, 1)
    if run.threads != "auto":
        os.environ["OMP_NUM_THREADS"] = str(run.threads)  # for child processes
        torch.set_num_threads(run.threads)
    MADE_BY.clear()
    for flag, path in leaves(cli.config):
        if flag.endswith(".class_path") and flag.count(".") > 1:
            MADE_BY[resolve_name(path)] = f"--{flag.removesuffix('.class_path')}"


def start_ranks(cli: Flags) -> int:
    """Start this node's ranks as their agent, and return the exit code."""
    config = cli.config
    if cli.resolved.live:
        processes = cli.resolved.agent_processes
        os.environ.setdefault("RUST_LOG", "error")  # of torchft, here and in the ranks
        opened = None
        if LIVE not in os.environ:
            text = cli.parser.dump(config, skip_none=False, skip_validation=True)
            opened = open_run(config.cluster, processes, text)
        code = launch_apart(cli.argv, processes, config.cluster, end_early)
        del opened
        return code
    nodes = NodeRendezvous(config.cluster, config.trainer.num_nodes, cli.resolved.devices)
    return launch(cli.argv, cli.resolved.agent_processes, nodes, end_early)


def build(cli: Flags, config: Namespace) -> None:
    """Build model, data and Trainer from a configuration; `config.yaml` gets that of the flags."""
    resolved = cli.resolved
    run = cli.config.run
    replaced = cli.arguments.replaced_callbacks()
    if replaced is not None:
        rank_zero_info(replaced)
    with explaining_errors(leaves(cli.config)):
        cli.config_init = cli.parser.instantiate_classes(config)
        cli.model = cli.config_init.model
        cli.datamodule = cli.config_init.data
        if type(cli.datamodule) is LightningDataModule:  # the model has loaders of its own
            cli.datamodule = None
        arguments = trainer_arguments(cli.config_init, resolved, cli.command_line)
        # drop this node's settings from the saved config
        cluster = cli.config.cluster
        cluster.init_method = cluster.node_rank = cluster.log_dir = None
        cluster.max_restarts = 0
        drop_callbacks(cli.parser, cli.config.trainer)
        cli.trainer = cli.instantiate_trainer(**arguments)
        patch(cli.trainer, cli.config)
    has_our_data = isinstance(cli.datamodule, ImageData)
    if not has_our_data:
        exactness = Exactness(
            resolved.virtual_devices,
            run.global_batch,
            int(os.environ.get("PL_GLOBAL_SEED", 0)),
            replaces_samplers=cli.config.trainer.use_distributed_sampler is not False,
        )
        if run.loader == "exact":
            exactness.put_into(cli.trainer)
        cli.trainer.callbacks.append(exactness)  # type: ignore[attr-defined]
    elif cli.command == "fit":
        cli.datamodule.virtual_devices = resolved.virtual_devices
    if has_our_data and isinstance(cli.model, ImageClassifier):
        cli.model.check_image_shape(cli.datamodule.image_shape)


def connect_ranks(cli: Flags) -> None:
    """Set timeout and launcher, and connect the processes that a launcher has started."""
    trainer = cli.trainer
    timeout = cli.config.cluster.timeout
    lightning_patches.set_timeout(trainer.strategy, timeout)
    method = getattr(trainer.strategy, "start_method", "popen")
    if method != "popen":
        rank_timeout = None if trainer.world_size == 1 else timeout
        launcher = SpawnLauncher(trainer.strategy, method, rank_timeout)
        trainer.strategy.own_launcher = launcher  # type: ignore[attr-defined]
    connect(trainer, timeout)


def prepare_data(cli: Flags) -> None:
    """Prepare our data, once on each node."""
    if cli.trainer.local_rank == 0 and isinstance(cli.datamodule, ImageData):
        cli.datamodule.prepare_data(cli.command)


def decide_together(cli: Flags) -> dict[str, Any]:
    """Let rank zero decide the run's checkpoint and folder, and every rank check them.

    Returns:
        The decision, as `decide` returns it.
    """
    trainer = cli.trainer

    def check_here(decided: dict[str, Any]) -> None:
        """Prepare the data on each node, and check the checkpoint."""
        end_in_order()  # from here on, a signal raises an exception, so that work ends cleanly
        prepare_data(cli)
        checkpoint = decided["checkpoint"]
        if checkpoint is not None:
            resumed_by = trainer if cli.command == "fit" else None
            may_be_finished = decided["may_be_finished"]
            check_checkpoint(checkpoint, cli.model, cli.datamodule, resumed_by, may_be_finished)
        elif cli.command != "fit" and isinstance(cli.model, ImageClassifier):
            raise UserError(f"{cli.command} needs weights: give --ckpt_path last, best or a file")

    decide_here = functools.partial(decide, cli)
    return agree(decide_here, check_here, trainer.node_rank, shared_settings(cli.config))


def find_rate(cli: Flags, decided: dict[str, Any]) -> RateSearch | None:
    """Search for the learning rate, and build the training anew with it. Collective.

    A resumed run takes the rate that it found at its start.

    Returns:
        The search, or None if it is skipped; a line then states the reason.
    """
    settings = [name for name in RATES if cli.config.get(name) is not None]
    found = decided["earlier"] and decided["earlier"].found_lr
    reason = None
    if not cli.model.automatic_optimization:
        reason = f"{type(cli.model).__name__} optimizes manually"
    elif not settings:
        reason = "there is no --model.optimizer.lr, --model.lr or --model.learning_rate"
    elif cli.config.trainer.fast_dev_run:
        reason = "--trainer.fast_dev_run takes too few steps"
    elif decided["checkpoint"] is not None and found is None:
        reason = f"{decided['checkpoint']} has one"
    if reason is not None:
        rank_zero_info(f"--run.find_lr: no search for a learning rate, because {reason}")
        return None
    if found is None:
        found = search(cli.trainer, cli.model, cli.datamodule)
    setting = settings[0]
    config = cli.config.clone()
    text = f"none found, because the loss did not fall in {len(found.lr)} steps"
    if found.suggestion is not None:
        text = f"{found.suggestion:g} found, instead of {config[setting]:g}"
        config[setting] = found.suggestion
    rank_zero_info(f"--{setting.replace('.init_args', '')}: {text}")
    reset_seed()
    build(cli, config)
    connect_ranks(cli)
    return found


def add_record(cli: Flags, decided: dict[str, Any]) -> RunRecord:
    """Add the run's loggers to the Trainer, and start its record or continue the earlier one.

    Returns:
        The callback that fills the record.
    """
    run = cli.config.run
    trainer: Any = cli.trainer
    earlier = decided["earlier"]
    mode = tracking_mode(run.wandb) if cli.command == "fit" else "off"
    folder = Path(run.root, decided["folder"])
    loggers = make_loggers(
        folder,
        mode,
        earlier and earlier.tracker,
        project=run.project,
        group=run.group,
        tags=run.tags,
    )
    trainer.loggers = loggers + trainer.loggers
    recorder = next(each for each in trainer.callbacks if isinstance(each, RunRecord))
    recorder.record.resumed_from = decided["checkpoint"]
    recorder.record.launchers = decided["launchers"]
    if trainer.is_global_zero:
        warning = busy()
        if warning and earlier is None and cli.command == "fit":
            rank_zero_info(f"warning: {warning}")
        note(RUN_DIR, str(loggers[0].log_dir))
        if earlier:
            recorder.continue_record(folder, earlier)
    return recorder


def execute(
    cli: Flags, checkpoint: str | None, recorder: RunRecord | None, live: Live | None = None
) -> int:
    """Run the Trainer's method under the watchdog, close the run, and return the exit code."""
    trainer = cli.trainer
    launcher = trainer.strategy.launcher
    # an ImageClassifier's results are in the closing lines
    verbose = not isinstance(cli.model, ImageClassifier)
    stacks = None
    timeout = None
    if recorder is not None:
        stacks = Path(str(trainer.loggers[0].log_dir), "stacks")
    if isinstance(launcher, SpawnLauncher):
        launcher.stacks = stacks
        if trainer.strategy.start_method == "fork":  # type: ignore[attr-defined]
            for tracker in trackers(trainer.loggers):
                tracker.share_with_forks()
    elif trainer.world_size > 1:
        timeout = cli.config.cluster.timeout
    # Lightning resets the seed only in a run of several processes. Without this call, a hook that
    # draws weights would draw other ones in a run of one process
    reset_seed()
    # errors are explained inside `watched`, because its stacks tell which rank hangs
    with watched(timeout, stacks, trainer.global_rank), ended_in_time(), explaining_errors():
        try:
            arguments = {"datamodule": cli.datamodule, "ckpt_path": checkpoint}
            if cli.command == "fit":
                trainer.fit(cli.model, **arguments)
                if recorder is not None and cli.config.run.test:
                    evaluate_best(cli, recorder, verbose)
            elif cli.command == "predict":
                trainer.predict(cli.model, return_predictions=False, **arguments)
            else:
                evaluate = getattr(trainer, cli.command)
                evaluate(cli.model, verbose=verbose, **arguments)
        finally:
            if live is None or not live.member.has_changed(sys.exc_info()[1]):
                rank_zero_only(close)(
                    trainer, recorder, cli.command == "fit", cli.model, cli.datamodule
                )
    return exit_code(trainer, record_of(trainer, recorder), cli.resolved.launcher)


def evaluate_best(cli: Flags, recorder: RunRecord, verbose: bool) -> None:
    """Test the best checkpoint, unless a signal has ended training.

    Without a test, validate a classifier of images once more, for the figures of its confusions.
    """
    outcome = record_of(cli.trainer, recorder)
    stage = "test"
    if isinstance(cli.model, ImageClassifier) and not can("test", cli.model, cli.datamodule):
        stage = "validate"
    if not can(stage, cli.model, cli.datamodule) or stopped_by(cli.trainer, outcome) is not None:
        return
    best = gather_objects(outcome.checkpoint.best)[0]
    if best is not None and not all(gather_objects(Path(best).is_file())):
        rank_zero_warn(f"{best} is not on every node: testing the last weights instead of the best")
        best = None
    trainer: Any = cli.trainer
    # it would replace the checkpoint's weights, which are an average
    trainer.callbacks = [
        callback for callback in trainer.callbacks if not isinstance(callback, WeightAveraging)
    ]
    cli.model.logs_evaluation = stage == "test"  # the epoch's validation has logged the same
    evaluate = getattr(trainer, stage)
    evaluate(cli.model, datamodule=cli.datamodule, ckpt_path=best, verbose=verbose)
