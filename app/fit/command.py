"""`fit`, `validate`, `test` and `predict`: Lightning's command line, with this application's defaults."""

import contextlib
import os
import re
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.callbacks import ProgressBar as LightningBar
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from rich import get_console
from torch.distributed.elastic.multiprocessing.errors import record

import app.data
import app.modules
from app.callbacks import PredictionWriter, TestFigures
from app.errors import ExitStatus, UserError, one_line
from app.fit.checkpoint_file import CheckpointFiles
from app.fit.checkpoints import check_checkpoint
from app.fit.configuration import Flags, shared_settings
from app.fit.flag_rules import leaves
from app.fit.memory import agree_micro_batch
from app.fit.resolved import Resolved
from app.fit.rules import check, check_trainer
from app.fit.run_options import Run, decide, default_name, release_folders
from app.launch.agree import agree, connect, gather_objects
from app.launch.cluster_environment import OWN_AGENT, Launched, environment_of, launched, may_resume
from app.launch.elastic import RUN_DIR, STOPPED, launch, note
from app.launch.failures import explaining_errors
from app.launch.process import end_in_order, end_undisturbed, requeue, trust_flags
from app.launch.rendezvous import NodeRendezvous
from app.launch.signals import Signals, StopTogether, cause
from app.launch.spawn import SpawnLauncher
from app.launch.watchdog import watched
from app.loop.straight_step import StraightLoop
from app.monitor.header import Header
from app.monitor.loggers import Tracker, make_loggers, tracking_mode
from app.monitor.nonfinite import NonFinite
from app.monitor.progress_bar import ProgressBar
from app.monitor.rank_times import RankTimes
from app.monitor.run_record import RunRecord
from app.monitor.step_profiler import StepProfile
from app.monitor.step_trace import StepTrace, profile_lines, profile_table
from app.monitor.summary import report
from app.record import Record, mark_failed
from app.system import lightning_patches
from app.system.machine import busy, free_cores, usable_cores
from app.system.tracebacks import MADE_BY, blamed, users_part


def run(argv: Sequence[str]) -> int:
    """Run a command line of Lightning's; a rank leaves what ends it in torch elastic's error file.

    Args:
        argv: The arguments of `python -m app`.

    Returns:
        Exit code.

    Raises:
        UserError: For what a user did wrong.
        RankError: When another rank has failed.
    """
    run_rank = record(_run) if "TORCHELASTIC_ERROR_FILE" in os.environ else _run
    return run_rank(argv) or 0


def _run(argv: Sequence[str]) -> int:
    lightning_patches.hide_lines()
    try:
        with explaining_errors():
            return CLI(argv).exit_code
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        return ExitStatus.of(end).code
    finally:
        release_folders()
        end_undisturbed()


def _has_failed(directory: str, reason: str) -> None:
    """Say in a run's record and its report why it has failed."""
    mark_failed(directory, reason)
    _report(directory)


def _report(directory: str) -> None:
    """Write the report of a run, for which alone matplotlib is imported: a fifth of what all imports take."""
    from app.monitor.report import leave_report

    leave_report(directory)


class CLI(Flags):
    """Reads a command line, builds what it asks for, and runs it; or starts the ranks that do.

    Args:
        argv: The arguments of `python -m app`.

    Attributes:
        exit_code: Of the process.
        processes: Ranks of this node that this process starts as their agent, or 0.
        settings: Flags and their values, as they must be on every node.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self.command = shlex.join(["python", "-m", "app", *argv, *trust_flags()])
        self.exit_code = self.processes = 0
        self.launcher: Launched | None = launched()
        self.asked_for: str | None = None
        self.checkpoint: str | None = None
        self.decided: dict[str, Any] = {}  # by rank zero
        self.rendezvous: NodeRendezvous | None = None  # of nodes whose first processes start the others
        self.record: RunRecord | None = None
        super().__init__(argv)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Read the arguments, and refuse what cannot work before anything is built or started."""
        super().parse_arguments(parser, args)
        config = self.config[self.config.subcommand]
        check(self.config.subcommand, config)
        MADE_BY.clear()
        for flag, path in leaves(config):
            if flag.endswith(".class_path") and flag.count(".") > 1:
                MADE_BY[resolve_name(path)] = f"--{flag.removesuffix('.class_path')}"
        if config.run.threads != "auto":
            os.environ["OMP_NUM_THREADS"] = str(config.run.threads)  # of processes that this one starts
            torch.set_num_threads(config.run.threads)
        self.resolved = Resolved(config, str(self.config.subcommand), self.launcher)
        self.processes = self.resolved.agent_processes
        self.adapts = config.run.threads == "auto" and "OMP_NUM_THREADS" not in os.environ
        if self.adapts and (free := free_cores()) < usable_cores():
            ranks = 1 if self.launcher else self.resolved.processes
            torch.set_num_threads(max(free // ranks, 1))
            if ranks > 1:
                os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # for the processes that this one starts
        self.settings = shared_settings(config)

    def seeds(self) -> bool:
        """Return whether this process trains; an agent's ranks seed themselves."""
        return not self.processes

    def before_instantiate_classes(self) -> None:
        """Keep the checkpoint out of the saved config, which is for new runs, too; the record says what was resumed."""
        config = self.config[self.subcommand]
        self.asked_for, config.ckpt_path = config.ckpt_path, None

    def more_arguments(self) -> dict[str, Any]:
        """The checkpoint that rank zero has found."""
        return {"ckpt_path": self.checkpoint}

    def instantiate_classes(self) -> None:
        """Start the ranks, where this process is to be their agent; else build data, model and trainer, and agree."""
        config = self.config[self.subcommand]
        if self.processes:
            rendezvous = NodeRendezvous(config.cluster, config.trainer.num_nodes, self.resolved.devices)
            self.exit_code = launch(self.argv, self.processes, rendezvous, config.cluster, _has_failed)
            return
        try:
            super().instantiate_classes()
        except UserError:
            raise
        except Exception as error:  # Lightning's refusals are of many types, and say no flag
            if users_part(traceback.format_exc()):
                raise
            raise UserError(self._explained(error)) from error
        check_trainer(self.trainer)
        if isinstance(self.datamodule, app.data.ImageData) and isinstance(self.model, app.modules.ImageClassifier):
            self.model.check_image_shape(self.datamodule.image_shape)
        self._agree(config.cluster.timeout)

    def _explained(self, error: Exception) -> str:
        """Return an error's message with the flag that made the object, or a flag that the message mentions."""
        while "jsonargparse" in traceback.extract_tb(error.__traceback__)[-1].filename and (
            cause := error.__cause__ or error.__context__  # the exception of the class itself
        ):
            error = cause  # type: ignore[assignment]
        if known := error if isinstance(error, UserError) else blamed(error):
            return str(known)
        expected = isinstance(error, MisconfigurationException | ValueError | TypeError | ImportError)
        text = one_line(str(error)) if expected else f"{type(error).__name__}: {error} (--verbose shows where)"
        words = re.findall(r"\w+", text)
        for flag, value in leaves(self.config[self.subcommand]):
            if value is not None and {flag.rpartition(".")[2], str(value)} <= {*words}:
                return f"--{flag} {value}: {text}"
        return text

    def _agree(self, timeout: float) -> None:
        """Have rank zero settle what only one can, and give the run its directory, record and loggers."""
        trainer, strategy = self.trainer, self.trainer.strategy
        lightning_patches.set_timeout(strategy, timeout)
        if method := lightning_patches.start_method(strategy):
            several = timeout if trainer.world_size > 1 else None
            lightning_patches.set_launcher(strategy, SpawnLauncher(strategy, method, several))
        connect(trainer, lightning_patches.cluster_environment(trainer), timeout)
        try:
            decided = agree(self._decide, self._check, trainer.node_rank, self.settings, self.rendezvous)
            self._settle_micro_batch(decided, timeout)
        except BaseException:
            if self.decided.get("folder"):
                folder = Path(self._run_options.root, self.decided["folder"])
                with contextlib.suppress(OSError):  # not empty: something of the user's, or another run
                    folder.rmdir()
                    folder.parent.rmdir()
            raise
        self.checkpoint = decided["checkpoint"]
        if self.checkpoint is not None and isinstance(trainer.precision_plugin, DoublePrecision):
            trainer.precision_plugin.convert_module(self.model)  # or the weights would be loaded into float32
        if self._is_recorded:
            self._record(decided)

    def _settle_micro_batch(self, decided: dict[str, Any], timeout: float) -> None:
        """Replace `--data.micro_batch auto` by what the run that goes on had, or by what fits on every node."""
        data = self.datamodule
        if not isinstance(data, app.data.ImageData) or data.micro_batch != "auto":
            return
        data.micro_batch = decided["micro_batch"] if self.subcommand == "fit" else None
        if self.subcommand == "fit" and data.micro_batch is None:
            config = self.command_parser.dump(self.config[self.subcommand], skip_none=False)
            data.micro_batch = agree_micro_batch(config, self.trainer, self.model, data, self.rendezvous, timeout)

    @property
    def _run_options(self) -> Run:
        return self.config_init[self.subcommand].run

    @property
    def _run_name(self) -> str:
        return self._run_options.name or default_name(self.config[self.subcommand])

    def _decide(self, launchers: list[str]) -> dict[str, Any]:
        self.decided = decide(
            self._run_options,
            self._run_name,
            self.command,
            launchers,
            self.asked_for,
            subcommand=str(self.subcommand),
            config=lambda: self.command_parser.dump(self.config[self.subcommand], skip_none=False),
            configs=[str(file) for file in self.config[self.subcommand].config or []],
            may_resume=self.subcommand == "fit" and may_resume(),
            is_recorded=self._is_recorded,
        )
        return self.decided

    def _check(self, decided: dict[str, Any]) -> None:
        """Make the data ready on each node, and refuse a checkpoint that this rank cannot use."""
        end_in_order()  # from here on there is something to bring to an end
        if self.trainer.local_rank == 0 and isinstance(self.datamodule, app.data.ImageData):
            self.datamodule.prepare_data(self.subcommand)
        if decided["checkpoint"] is not None:
            resumed_by = self.trainer if self.subcommand == "fit" else None
            check_checkpoint(decided["checkpoint"], self.model, self.datamodule, resumed_by, decided["may_be_finished"])
        elif self.subcommand != "fit" and isinstance(self.model, app.modules.ImageClassifier):
            folder = Path(self._run_options.root, self._run_name)
            if not any(folder.glob("version_*/run.json")):
                raise UserError(
                    f"--run.name {folder.name}: there is no such run in {folder.parent}: {self.subcommand} needs "
                    "weights, of a run or by --ckpt_path FILE"
                )
            raise UserError(f"{self.subcommand} needs weights: give --ckpt_path last, best or a file")

    def _record(self, decided: dict[str, Any]) -> None:
        """Give the run its directory, its record and its loggers."""
        run, earlier = self._run_options, decided["earlier"]
        mode = tracking_mode(run.wandb) if self.subcommand == "fit" else "off"
        folder = Path(run.root, decided["folder"])
        loggers = make_loggers(folder, mode, run.project, run.group, run.tags, earlier and earlier.tracker)
        self.trainer.loggers = loggers + self.trainer.loggers
        self.record = next(callback for callback in self.trainer.callbacks if isinstance(callback, RunRecord))  # type: ignore[attr-defined]
        self.record.record.resumed_from, self.record.record.launchers = self.checkpoint, decided["launchers"]
        if self.trainer.is_global_zero:
            if self.subcommand == "fit" and (said := busy()):
                rank_zero_info(f"warning: {said}")
            note(RUN_DIR, str(loggers[0].log_dir))
            if earlier:
                self.record.continue_record(folder, earlier)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Add the callbacks that belong to every run, and what its launcher or its nodes ask for."""
        config = self.config_init[self.subcommand]
        run, trainer = config.run, config.trainer
        parser = self.command_parser
        given = trainer.plugins if isinstance(trainer.plugins, list) else [trainer.plugins] * bool(trainer.plugins)
        asked = self.config[self.subcommand].trainer
        followed, environment = self.resolved.trainer, None
        kwargs |= {"devices": followed.devices, "num_nodes": followed.num_nodes}
        if (asked.strategy, asked.devices, followed.num_nodes, self.launcher) == ("auto", "auto", 1, None):
            kwargs["devices"] = 1  # several only when they are asked for
        if not any(isinstance(plugin, ClusterEnvironment) for plugin in given):  # which knows better
            environment = environment_of(config.cluster, followed.num_nodes)
        if isinstance(environment, LightningEnvironment) and followed.num_nodes > 1:
            self.rendezvous = NodeRendezvous(config.cluster, followed.num_nodes, self.resolved.devices)
            os.environ["NODE_RANK"] = str(self.rendezvous.rank)  # for Lightning's own launcher
        theirs = any(isinstance(plugin, CheckpointIO) for plugin in given)
        theirs = theirs or self.resolved.options.get("checkpoint_io") is not None
        kwargs["plugins"] = [*given, *[CheckpointFiles()] * (not theirs), *filter(None, [environment])]
        cluster = self.config[self.subcommand].cluster
        cluster.init_method = cluster.node_rank = None  # the saved config is for any node, however it is started
        cluster.max_restarts, cluster.log_dir = 0, None
        self.config[self.subcommand].run.profile = False
        if trainer.enable_checkpointing is False or trainer.fast_dev_run:
            parser.callback_keys = [key for key in parser.callback_keys if not key.endswith("_checkpoint")]
        if trainer.barebones:
            parser.callback_keys = []
        if not self._is_recorded:
            return super().instantiate_trainer(**kwargs)
        if isinstance(trainer.logger, bool | None):
            kwargs["logger"] = False  # Lightning's own; ours come when the directory is known
        callbacks = trainer.callbacks or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        if trainer.enable_model_summary is not False and not any(isinstance(c, ModelSummary) for c in callbacks):
            kwargs["enable_model_summary"] = False  # Lightning's own
            callbacks = [*callbacks, Header()]
        if trainer.enable_progress_bar is not False and not any(isinstance(c, LightningBar) for c in callbacks):
            callbacks = [*callbacks, ProgressBar()]  # in place of Lightning's own
        kwargs["callbacks"] = [
            *callbacks,
            StepProfile(),
            *[StepTrace()] * run.profile,
            NonFinite(run.on_nonfinite),
            RankTimes(config.cluster.timeout, self.adapts and self.launcher is None),
            StopTogether(config.cluster.timeout),  # before what reads from the device when there is an error
            RunRecord(self.command, run.warmup_epochs, (config.best_checkpoint, config.last_checkpoint)),
            TestFigures(track=run.track_images),
            PredictionWriter(),
        ]
        trainer = super().instantiate_trainer(**kwargs)
        lightning_patches.replace_signal_connector(trainer, Signals(trainer))
        lightning_patches.count_epochs(trainer)
        lightning_patches.Restoring.put_into(trainer)
        if run.loop == "straight":
            StraightLoop.put_into(trainer)
        return trainer

    @property
    def _is_recorded(self) -> bool:
        """Whether Lightning was not asked for a run that leaves no traces."""
        trainer = self.config[self.subcommand].trainer
        return not (trainer.fast_dev_run or trainer.barebones)

    def test(self, **kwargs: Any) -> None:
        """Test; what is measured of our models is in the report."""
        self.trainer.test(verbose=not isinstance(self.model, app.modules.ImageClassifier), **kwargs)

    def validate(self, **kwargs: Any) -> None:
        """Validate; what is measured of our models is in the report."""
        self.trainer.validate(verbose=not isinstance(self.model, app.modules.ImageClassifier), **kwargs)

    def predict(self, **kwargs: Any) -> None:
        """Predict without keeping what PredictionWriter has written."""
        self.trainer.predict(return_predictions=False, **kwargs)

    def after_fit(self) -> None:
        """Test the best checkpoint, where model and data define a test."""
        if not self._run_options.test or not self._is_recorded or not self._can("test") or self.stopped_by is not None:
            return
        best = gather_objects(self._outcome().checkpoint.best)[0]
        if best is not None and not all(gather_objects(Path(best).is_file())):
            rank_zero_warn(f"{best} is not on every node: testing the last weights instead of the best")
            best = None
        self.test(model=self.model, datamodule=self.datamodule, ckpt_path=best)

    def _can(self, stage: str) -> bool:
        """Return whether model and data have the step and the images of a stage: test, validate or predict."""
        data, name = self.datamodule, "val" if stage == "validate" else stage
        if isinstance(data, app.data.ImageData):
            has_images = name in data.source.splits or (name == "val" and data.val_size > 0)
        else:
            has_images = is_overridden(f"{name}_dataloader", data)
        return has_images and is_overridden("validation_step" if name == "val" else f"{name}_step", self.model)

    @property
    def stopped_by(self) -> str | None:
        """`Ctrl-C`, `SIGTERM` or `SIGUSR1`, where it has ended the run."""
        spawned = self._outcome() if isinstance(self.trainer.strategy.launcher, SpawnLauncher) else Record()
        interrupted = spawned.status == "interrupted"
        return cause(self.trainer) or (str(spawned.error).removeprefix("by ") if interrupted else None)

    def _outcome(self) -> Record:
        """Return the run's record; spawned processes leave theirs in its file alone."""
        if self.record is None:
            return Record()
        if not isinstance(self.trainer.strategy.launcher, SpawnLauncher):
            return self.record.record
        try:
            return Record.load(Path(self.record.record.run_dir or str(self.trainer.loggers[0].log_dir), "run.json"))
        except ValueError:  # no record has been written
            return Record()

    def run_subcommand(self, subcommand: str) -> None:
        """Run the Trainer's method under the watchdog; an agent's ranks have run it already."""
        if self.processes:
            return
        trainer, launcher = self.trainer, self.trainer.strategy.launcher
        stacks = Path(str(trainer.loggers[0].log_dir), "stacks") if self.record else None
        several = trainer.world_size > 1 and not isinstance(launcher, SpawnLauncher)
        if isinstance(launcher, SpawnLauncher):
            launcher.stacks = stacks
            for logger in trainer.loggers if launcher.forks else []:
                if isinstance(logger, Tracker):
                    logger.share_with_forks()
        timeout = self.config[subcommand].cluster.timeout if several else None
        with watched(timeout, stacks, trainer.global_rank), explaining_errors():
            super().run_subcommand(subcommand)
        self.exit_code = self._exit_code()

    def _exit_code(self) -> int:
        stopped_by = self.stopped_by
        if stopped_by == "SIGUSR1":
            stopped_by = None if requeue() else "SIGTERM"
        # what started the others would take anything but 0 for a failure; torchrun has to, to go on without a node
        by = self.launcher.by if self.launcher else None
        says = {OWN_AGENT: self.trainer.local_rank == 0, "srun": self.trainer.is_global_zero}.get(by or "", True)
        if stopped_by is None or not says:
            return 0
        code = ExitStatus.stopped_by(stopped_by).code
        note(STOPPED, str(code))
        return code

    @rank_zero_only
    def after_subcommand(self) -> None:
        """Write the report of a training, end the tracker's run, and say where the files are and what to try next."""
        if sys.exc_info()[0] is not None:
            end_undisturbed()
        if self.subcommand == "fit" and (directory := self._outcome().run_dir):
            _report(directory)
        for logger in self.trainer.loggers:
            if isinstance(logger, Tracker):
                logger.finish()
        outcome = self._outcome()
        if outcome.run_dir and (outcome.status == "completed" or outcome.train_s is not None):
            is_tested = outcome.tested or outcome.test
            stages = ("predict", "test", "validate") if is_tested else ("test", "validate", "predict")
            use = next(filter(self._can, stages), None)
            said = report(outcome, self.trainer.loggers, self.subcommand == "fit", use)
            print("\n".join(["", *said]))
            if outcome.profile:
                get_console().print(profile_table(outcome.profile.ranks))
                print(*profile_lines(outcome.profile), sep="\n")
