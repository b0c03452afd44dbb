"""Commands `fit`, `validate`, `test` and `predict`: LightningCLI with this application's defaults."""

import contextlib
import functools
import os
import re
import shlex
import traceback
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from torch.distributed.elastic.multiprocessing.errors import record

import app.data
import app.modules
from app.command.assembly import callbacks, drop_callbacks, patch, plugins
from app.command.checkpoint_file import FLAG, read
from app.command.checkpoints import check_checkpoint
from app.command.configuration import Flags, shared_settings
from app.command.flag_rules import leaves
from app.command.outcome import can, close, end_early, exit_code, record_of, stopped_by
from app.command.rules import check
from app.command.run_options import decide, is_recorded, release_folders, requested_checkpoint
from app.data.global_order import put_in_order
from app.errors import ExitStatus, UserError, one_line
from app.launch.agree import agree, connect, gather_objects
from app.launch.elastic import RUN_DIR, launch, note
from app.launch.failures import explaining_errors
from app.launch.process import end_in_order, end_undisturbed, trust_flags
from app.launch.rendezvous import NodeRendezvous
from app.launch.signals import ended_in_time
from app.launch.spawn import SpawnLauncher
from app.launch.watchdog import watched
from app.modules.networks import checkpoint_of
from app.monitor.loggers import make_loggers, trackers, tracking_mode
from app.monitor.run_record import RunRecord
from app.record import Record
from app.system import lightning_patches
from app.system.lightning_patches import replace_launcher, set_timeout, start_method
from app.system.machine import busy, usable_cores
from app.system.patches import expects
from app.system.torch_files import check_exists
from app.system.torch_patches import end_process_group
from app.system.tracebacks import MADE_BY, blamed, users_part

_CLI = "lightning.pytorch.cli:LightningCLI"


def run(argv: Sequence[str]) -> int:
    """Run fit, validate, test or predict. Under torch elastic, a rank writes its exception to the error file.

    Args:
        argv: The arguments of `python -m app`.

    Returns:
        Exit code.

    Raises:
        UserError: For an error that the user can correct.
        RankError: When another rank has failed.
    """
    run_rank = record(_run) if "TORCHELASTIC_ERROR_FILE" in os.environ else _run
    return run_rank(argv) or 0


def _run(argv: Sequence[str]) -> int:
    lightning_patches.hide_lines()
    try:
        with explaining_errors(in_run=False):
            return CLI(argv).exit_code
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        return ExitStatus.of(end).code
    finally:
        release_folders()
        end_process_group()
        end_undisturbed()


@expects(
    *(f"{_CLI}.{name}" for name in ("_parser", "_prepare_subcommand_kwargs", "_run_subcommand"))
)
class CLI(Flags):
    """Command line of one run.

    An agent (torch elastic's parent process of the ranks) only starts this node's ranks. Any other
    process builds and runs model, data and Trainer.

    Args:
        argv: The arguments of `python -m app`.

    Attributes:
        exit_code: Exit code of the process.
        processes: Number of ranks that this process starts as their agent; 0 if it trains itself.
        flags: Configuration of the command.
        is_recorded: Whether the run writes files.
        settings: Flags that must be equal on all nodes.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self.command = shlex.join(["python", "-m", "app", *argv, *trust_flags()])
        self.exit_code = self.processes = 0
        self.requested_checkpoint: str | None = None
        self.checkpoint: str | None = None
        self.decided: dict[
            str, Any
        ] = {}  # rank zero's choice of checkpoint and folder; empty on other ranks
        self.record: RunRecord | None = None
        super().__init__(argv)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments, and reject a missing checkpoint and combinations that cannot work."""
        checkpoint = self.arguments.value(FLAG)
        if checkpoint not in (None, "null", "auto", "best", "last"):
            check_exists(
                checkpoint_of(Path(checkpoint)), FLAG
            )  # because its run's config would be missing, too
        super().parse_arguments(parser, args)
        self.flags = config = self.config[self.config.subcommand]
        self.resolved = check(str(self.config.subcommand), config)
        self.is_recorded = is_recorded(config.trainer)
        MADE_BY.clear()
        for flag, path in leaves(config):
            if flag.endswith(".class_path") and flag.count(".") > 1:
                MADE_BY[resolve_name(path)] = f"--{flag.removesuffix('.class_path')}"
        if (
            config.run.virtual_devices
            and config.run.threads == "auto"
            and "OMP_NUM_THREADS" not in os.environ
        ):
            # divide the cores by the virtual devices, not by the ranks, because the number of
            # threads affects rounding
            config.run.threads = max(usable_cores() // config.run.virtual_devices, 1)
        if config.run.threads != "auto":
            os.environ["OMP_NUM_THREADS"] = str(config.run.threads)  # for child processes
            torch.set_num_threads(config.run.threads)
        self.processes = self.resolved.agent_processes
        self.settings = shared_settings(config)

    def before_instantiate_classes(self) -> None:
        """Remove the checkpoint from the saved config, so that the config can start new runs."""
        self.requested_checkpoint = self.flags.ckpt_path
        self.flags.ckpt_path = None

    def count_classes(self, data: app.data.ImageData) -> int:
        """Return the number of classes; for evaluation, let the data number its classes as the checkpoint does."""
        checkpoint = self.requested_checkpoint
        if self.subcommand != "fit" and checkpoint not in (None, "auto"):
            with contextlib.suppress(UserError):  # rank zero reports it later
                images = (
                    read(Path(requested_checkpoint(self.flags, checkpoint))).get("images") or {}
                )
                data.adopt_classes(images.get("class_names", []))
        return super().count_classes(data)

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        """Pass rank zero's checkpoint. Suppress returned predictions and, for an `ImageClassifier`, result tables."""
        quiet = {"predict": {"return_predictions": False}, "fit": {}}.get(subcommand, self._quiet)
        return {
            **super()._prepare_subcommand_kwargs(subcommand),
            "ckpt_path": self.checkpoint,
            **quiet,
        }

    @property
    def _quiet(self) -> dict[str, bool]:
        return {"verbose": not isinstance(self.model, app.modules.ImageClassifier)}

    def instantiate_classes(self) -> None:
        """Start this node's ranks, or build model, data and Trainer.

        An agent only starts the ranks. Any other process builds the objects, and agrees with all
        ranks on folder and checkpoint.
        """
        config = self.flags
        if self.processes:
            rendezvous = NodeRendezvous(
                config.cluster, config.trainer.num_nodes, self.resolved.devices
            )
            self.exit_code = launch(self.argv, self.processes, rendezvous, end_early)
            return
        try:
            super().instantiate_classes()
        except Exception as error:  # Lightning raises many types without naming a flag
            if isinstance(error, UserError) or users_part(traceback.format_exc()):
                raise
            raise UserError(self._explained(error)) from error
        if isinstance(self.datamodule, app.data.ImageData) and self.subcommand == "fit":
            self.datamodule.virtual_devices = self.resolved.virtual_devices
        elif config.run.global_order:
            for owner in filter(None, (self.datamodule, self.model)):
                seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
                put_in_order(owner, self.resolved.virtual_devices, seed)
        if isinstance(self.datamodule, app.data.ImageData) and isinstance(
            self.model, app.modules.ImageClassifier
        ):
            self.model.check_image_shape(self.datamodule.image_shape)
        self._agree(config.cluster.timeout)

    def _explained(self, error: Exception) -> str:
        """Return an error's message, with the flag that caused the error if this flag is known.

        The cause is the flag that created the failing object or, if unknown, the first flag whose
        name and value the message contains.
        """
        while "jsonargparse" in traceback.extract_tb(error.__traceback__)[-1].filename and (
            cause := error.__cause__ or error.__context__  # the exception that jsonargparse wrapped
        ):
            error = cause  # type: ignore[assignment]
        known = error if isinstance(error, UserError) else blamed(error)
        if known:
            return str(known)
        expected = isinstance(
            error, MisconfigurationException | ValueError | TypeError | ImportError
        )
        text = (
            one_line(str(error))
            if expected
            else f"{type(error).__name__}: {error} (--verbose shows where)"
        )
        words = re.findall(r"-?\w+", text)
        for flag, value in leaves(self.flags):
            if value is not None and {flag.rpartition(".")[2], str(value)} <= {*words}:
                return f"--{flag} {value}: {text}"
        return text

    def _agree(self, timeout: float) -> None:
        """Let rank zero decide directory and checkpoint; then add the run's record and loggers."""
        trainer = self.trainer
        strategy = self.trainer.strategy
        set_timeout(strategy, timeout)
        method = start_method(strategy)
        if method:
            replace_launcher(
                strategy,
                SpawnLauncher(strategy, method, timeout if trainer.world_size > 1 else None),
            )
        connect(trainer, timeout)
        try:
            decided = agree(self._decide, self._check, trainer.node_rank, self.settings)
        except BaseException:
            if self.decided.get("folder"):
                folder = Path(self.flags.run.root, self.decided["folder"])
                with contextlib.suppress(OSError):  # raised for a folder that is not empty
                    folder.rmdir()
                    folder.parent.rmdir()
            raise
        self.checkpoint = decided["checkpoint"]
        if self.checkpoint is not None and isinstance(trainer.precision_plugin, DoublePrecision):
            trainer.precision_plugin.convert_module(
                self.model
            )  # to float64, before Lightning loads float64 weights
        if self.is_recorded:
            self._record(decided)

    def _decide(self, launchers: list[str]) -> dict[str, Any]:
        dump = functools.partial(self._parser(self.subcommand).dump, self.flags, skip_none=False)
        checkpoint = self.requested_checkpoint
        self.decided = decide(
            str(self.subcommand), self.flags, dump, checkpoint, self.command, launchers
        )
        return self.decided

    def _check(self, decided: dict[str, Any]) -> None:
        """Prepare the data on each node, and check the checkpoint."""
        end_in_order()  # from here on, a signal raises an exception, so that work ends cleanly
        if self.trainer.local_rank == 0 and isinstance(self.datamodule, app.data.ImageData):
            self.datamodule.prepare_data(self.subcommand)
        if decided["checkpoint"] is not None:
            resumed_by = self.trainer if self.subcommand == "fit" else None
            check_checkpoint(
                decided["checkpoint"],
                self.model,
                self.datamodule,
                resumed_by,
                decided["may_be_finished"],
            )
        elif self.subcommand != "fit" and isinstance(self.model, app.modules.ImageClassifier):
            raise UserError(
                f"{self.subcommand} needs weights: give --ckpt_path last, best or a file"
            )

    def _record(self, decided: dict[str, Any]) -> None:
        """Add the run's loggers to the Trainer; record checkpoint and launchers, and continue an earlier record."""
        run = self.flags.run
        earlier = decided["earlier"]
        mode = tracking_mode(run.wandb) if self.subcommand == "fit" else "off"
        folder = Path(run.root, decided["folder"])
        loggers = make_loggers(
            folder, mode, run.project, run.group, run.tags, earlier and earlier.tracker
        )
        self.trainer.loggers = loggers + self.trainer.loggers
        callbacks_of_run = self.trainer.callbacks  # type: ignore[attr-defined]
        self.record = next(each for each in callbacks_of_run if isinstance(each, RunRecord))
        self.record.record.resumed_from = self.checkpoint
        self.record.record.launchers = decided["launchers"]
        if self.trainer.is_global_zero:
            if self.subcommand == "fit" and (warning := busy()):
                rank_zero_info(f"warning: {warning}")
            note(RUN_DIR, str(loggers[0].log_dir))
            if earlier:
                self.record.continue_record(folder, earlier)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Add our plugins and callbacks, and drop this node's settings from the saved config."""
        config = self.config_init[self.subcommand]
        saved = self.flags
        resolved = self.resolved
        kwargs |= {"devices": resolved.trainer.devices, "num_nodes": resolved.nodes}
        if resolved.devices == resolved.nodes == 1 and kwargs["devices"] == "auto":
            kwargs["devices"] = 1
        if config.run.global_order:
            kwargs["use_distributed_sampler"] = False
        if (
            resolved.virtual_devices is not None
            and resolved.accelerator == "cuda"
            and self.subcommand == "fit"
        ):
            kwargs["deterministic"] = (
                True  # because nondeterministic kernels would change the bits of the results
            )
        kwargs["plugins"] = plugins(config, resolved)
        saved.cluster.init_method = saved.cluster.node_rank = saved.cluster.log_dir = None
        saved.cluster.max_restarts = 0
        drop_callbacks(self._parser(self.subcommand), config.trainer)
        kwargs |= callbacks(config, self.command) if self.is_recorded else {}
        return patch(super().instantiate_trainer(**kwargs), config.run, self.is_recorded)

    def after_fit(self) -> None:
        """Test the best checkpoint, if model and data define a test."""
        is_tested = (
            self.flags.run.test and self.is_recorded and can("test", self.model, self.datamodule)
        )
        if not is_tested or stopped_by(self.trainer, self._outcome) is not None:
            return
        best = gather_objects(self._outcome.checkpoint.best)[0]
        if best is not None and not all(gather_objects(Path(best).is_file())):
            rank_zero_warn(
                f"{best} is not on every node: testing the last weights instead of the best"
            )
            best = None
        self.trainer.test(self.model, datamodule=self.datamodule, ckpt_path=best, **self._quiet)

    @property
    def _outcome(self) -> Record:
        return record_of(self.trainer, self.record)

    def _run_subcommand(self, subcommand: str) -> None:
        """Run the Trainer's method under the watchdog, then close the run. An agent does nothing here."""
        if self.processes:
            return
        trainer = self.trainer
        launcher = self.trainer.strategy.launcher
        stacks = Path(str(trainer.loggers[0].log_dir), "stacks") if self.record else None
        several = trainer.world_size > 1 and not isinstance(launcher, SpawnLauncher)
        if isinstance(launcher, SpawnLauncher):
            launcher.stacks = stacks
            for tracker in (
                trackers(trainer.loggers) if start_method(trainer.strategy) == "fork" else []
            ):
                tracker.share_with_forks()
        timeout = self.flags.cluster.timeout if several else None
        # Lightning resets the seed only in a run of several processes. Without this call, a hook
        # that draws weights would draw other ones in a run of one process
        reset_seed()
        with (
            watched(timeout, stacks, trainer.global_rank),
            ended_in_time(stacks),
            explaining_errors(),
        ):
            try:
                super()._run_subcommand(subcommand)
            finally:
                rank_zero_only(close)(
                    trainer, self.record, subcommand == "fit", self.model, self.datamodule
                )
        self.exit_code = exit_code(trainer, self._outcome, self.resolved.launcher)
