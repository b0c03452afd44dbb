"""`fit`, `validate`, `test` and `predict`: Lightning's command line, with this application's defaults."""

import contextlib
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelSummary
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

import app.data
import app.modules
from app.callbacks import PredictionWriter, TestFigures
from app.errors import UserError, nearest, one_line
from app.fit.checkpoints import RunCheckpoint, check_checkpoint
from app.fit.parser import Parser, find_class, spell_out_strategy
from app.fit.run_options import Run, decide
from app.launch.agree import agree
from app.launch.cluster_environment import plan_processes, started_anew
from app.launch.launchers import ProcessLauncher, use_our_launcher
from app.launch.rendezvous import Cluster
from app.launch.sharing import gather_objects
from app.launch.signals import Signals, StopTogether, cause
from app.monitor.loggers import SaveConfig, Tracker, make_loggers
from app.monitor.run_record import RunRecord
from app.monitor.step_profiler import StepProfile
from app.monitor.summary import NetworkSummary, report
from app.parallel import refuse_impossible


class CLI(LightningCLI):
    """Lightning's command line with this application's models, data, record and tracking.

    Args:
        chosen: Sections of which the user has chosen the class; the others get a default one. A default that
            is set regardless would leave its `init_args` behind: `--model FashionMLP` would train with
            CIFARCNN's loss and optimizer, since jsonargparse keeps what the new class accepts.
    """

    def __init__(self, chosen: dict[str, str]) -> None:
        self.chosen = chosen
        self.command = shlex.join(["python", "-m", "app", *sys.argv[1:]])
        self.asked_for: str | None = None
        self.checkpoint: str | None = None
        self.decided: dict[str, Any] = {}  # by rank zero
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            parser_class=Parser,
            save_config_callback=SaveConfig,
            save_config_kwargs={"save_to_log_dir": False},
            seed_everything_default=42,
            trainer_defaults={"max_epochs": 50, "enable_autolog_hparams": False},  # SaveConfig logs them all
            auto_configure_optimizers=False,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the run's name and tracking, and the callbacks that are on by default."""
        classes = {"model": "app.modules.CIFARCNN", "data": "app.data.CIFAR10"}
        parser.set_defaults({key: {"class_path": path} for key, path in classes.items() if key not in self.chosen})
        parser.chosen = classes | self.chosen  # type: ignore[attr-defined]
        chosen = {section: find_class(section, name) or object for section, name in (classes | self.chosen).items()}
        ours = {"model": app.modules.ImageClassifier, "data": app.data.ImageData}
        self.linked = all(issubclass(chosen[section], ours[section]) for section in ours)
        if self.linked:
            parser.link_arguments("data.num_classes", "model.init_args.num_classes", apply_on="instantiate")
        parser.add_class_arguments(Run, "run")
        parser.add_class_arguments(Cluster, "cluster")
        parser.add_lightning_class_args(RunCheckpoint, "best_checkpoint")
        parser.add_lightning_class_args(RunCheckpoint, "last_checkpoint")
        parser.add_lightning_class_args(LearningRateMonitor, "lr_monitor")
        parser.set_defaults(
            {
                "best_checkpoint.monitor": "val_acc",
                "best_checkpoint.mode": "max",
                "best_checkpoint.filename": "best",
                "best_checkpoint.enable_version_counter": False,
                "last_checkpoint.filename": "last",
                "last_checkpoint.save_on_train_epoch_end": True,
                "last_checkpoint.enable_version_counter": False,
                "lr_monitor.logging_interval": "epoch",
            }
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's, less what is set here."""
        common = {"model", "datamodule", "weights_only"}
        return {
            "fit": {*common, "train_dataloaders", "val_dataloaders"},
            "validate": {*common, "dataloaders", "verbose"},
            "test": {*common, "dataloaders", "verbose"},
            "predict": {*common, "dataloaders", "return_predictions"},
        }

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Let options follow the name of a strategy."""
        self.config = parser.parse_args(spell_out_strategy(sys.argv[1:]))

    def _parse_ckpt_path(self) -> None:
        """Leave the model as it was asked for: one from another checkpoint is an error, not a substitute."""

    def before_instantiate_classes(self) -> None:
        """Settle what depends on other settings."""
        config = self.config[self.subcommand]
        trainer = config.trainer
        if isinstance(trainer.strategy, str):
            names = ["auto", *StrategyRegistry.available_strategies()]
            if trainer.strategy not in names:
                raise UserError(f"--trainer.strategy {trainer.strategy}: unknown{nearest(trainer.strategy, names)}")
        if trainer.accumulate_grad_batches < 1:
            raise UserError(f"--trainer.accumulate_grad_batches {trainer.accumulate_grad_batches}: give 1 or more")
        if self.linked and any(word.startswith("--model.num_classes") for word in sys.argv):
            raise UserError("--model.num_classes comes from the data: leave it out")
        self.asked_for = config.ckpt_path
        config.ckpt_path = None  # the saved config is for new runs, too; the record says what was resumed

    def _set_seed(self) -> None:
        try:
            super()._set_seed()
        except ValueError as error:
            raise UserError(f"--seed_everything: {error}") from error

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        return super()._prepare_subcommand_kwargs(subcommand) | {"ckpt_path": self.checkpoint}

    def instantiate_classes(self) -> None:
        """Build data, model and trainer; check data and checkpoint before any process is started."""
        try:
            super().instantiate_classes()
        except (MisconfigurationException, ValueError, TypeError) as error:
            raise UserError(one_line(str(error))) from error
        refuse_impossible(self.trainer)
        config = self.config[self.subcommand]
        if isinstance(self.datamodule, app.data.ImageData):
            if isinstance(self.model, app.modules.ImageClassifier):
                self.model.check_image_shape(self.datamodule.image_shape)
            if self.subcommand == "fit":
                self.datamodule.check_world_size(self.trainer.world_size)
            if self.trainer.is_global_zero:
                self.datamodule.prepare_data()
        try:
            decided = agree(self.trainer, self._decide, self._check, config.cluster.timeout)
        except UserError:
            if self.decided.get("version"):
                with contextlib.suppress(OSError):  # not empty: something of the user's
                    Path(config.run.root, config.run.name, self.decided["version"]).rmdir()
            raise
        self.checkpoint = decided["checkpoint"]
        if self.checkpoint is not None and isinstance(self.trainer.precision_plugin, DoublePrecision):
            self.trainer.precision_plugin.convert_module(self.model)  # or the weights would be loaded into float32
        record = None if self._keeps_nothing() else self._keep(decided)
        use_our_launcher(self.trainer, config.cluster.timeout, record.on_exception if record else None)

    def _decide(self, launchers: list[str]) -> dict[str, Any]:
        config = self.config_init[self.subcommand]
        self.decided = decide(
            config.run,
            self.command,
            launchers,
            self.asked_for,
            configs=[str(file) for file in self.config[self.subcommand].config or []],
            goes_on=self.subcommand == "fit" and started_anew(),
            keeps=not self._keeps_nothing(),
        )
        return self.decided

    def _check(self, decided: dict[str, Any]) -> None:
        """Refuse a checkpoint that this node cannot use."""
        if decided["checkpoint"] is not None:
            resumed_by = self.trainer if self.subcommand == "fit" else None
            check_checkpoint(decided["checkpoint"], self.model, resumed_by, may_be_finished=decided["may_be_finished"])
        elif self.subcommand != "fit" and isinstance(self.model, app.modules.ImageClassifier):
            raise UserError(f"{self.subcommand} needs weights: give --ckpt_path last, best or a file")

    def _keep(self, decided: dict[str, Any]) -> RunRecord:
        """Give the run its directory, its record and its loggers."""
        run: Run = self.config_init[self.subcommand].run
        loggers = make_loggers(
            run.root, run.name, decided["version"], run.wandb, run.project, run.group, run.tags, decided["tracker"]
        )
        self.trainer.loggers = loggers + self.trainer.loggers
        record = next(callback for callback in self.trainer.callbacks if isinstance(callback, RunRecord))  # type: ignore[attr-defined]
        record.record["resumed_from"], record.record["launchers"] = self.checkpoint, decided["launchers"]
        return record

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Add the callbacks that belong to every run, and what its launcher or its nodes ask for."""
        config = self.config_init[self.subcommand]
        run, trainer = config.run, config.trainer
        parser = self._parser(self.subcommand)
        given = trainer.plugins if isinstance(trainer.plugins, list) else [trainer.plugins] * bool(trainer.plugins)
        plan: dict[str, Any] = {}
        if not any(isinstance(plugin, ClusterEnvironment) for plugin in given):  # which knows better
            plan = plan_processes(trainer.strategy, trainer.devices, trainer.num_nodes, config.cluster)
        meeting = self.config[self.subcommand].cluster
        meeting.init_method = meeting.node_rank = None  # the saved config is for any node
        kwargs["plugins"] = [*given, *filter(None, [plan.pop("environment", None)])]
        kwargs |= plan
        if trainer.enable_checkpointing is False or trainer.fast_dev_run:
            parser.callback_keys = [key for key in parser.callback_keys if not key.endswith("_checkpoint")]
        if trainer.barebones:
            parser.callback_keys = []
        if self._keeps_nothing():
            return super().instantiate_trainer(**kwargs)
        if isinstance(trainer.logger, bool | None):
            kwargs["logger"] = False  # Lightning's own; ours come when the directory is known
        callbacks = trainer.callbacks or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        if trainer.enable_model_summary is not False and not any(isinstance(c, ModelSummary) for c in callbacks):
            kwargs["enable_model_summary"] = False  # Lightning's own
            callbacks = [*callbacks, NetworkSummary()]
        kwargs["callbacks"] = [
            *callbacks,
            StepProfile(),
            RunRecord(self.command, run.warmup_epochs),
            StopTogether(),
            TestFigures(),
            PredictionWriter(),
        ]
        trainer = super().instantiate_trainer(**kwargs)
        trainer._signal_connector = Signals(trainer)
        # max_steps ends training and nothing else; Lightning would take a resumed epoch that is whole for a broken-off
        # one (pytorch-lightning #19617). `bool`, which says False, as spawned processes get the trainer pickled
        trainer.fit_loop._iteration_based_training = bool  # type: ignore[method-assign]
        return trainer

    def _keeps_nothing(self) -> bool:
        """Whether Lightning was asked for a run that leaves no traces."""
        trainer = self.config[self.subcommand].trainer
        return bool(trainer.fast_dev_run or trainer.barebones)

    def predict(self, **kwargs: Any) -> None:
        """Predict without keeping what PredictionWriter has written."""
        self.trainer.predict(return_predictions=False, **kwargs)

    def after_fit(self) -> None:
        """Test the best checkpoint, where there are test images and the model can."""
        data = self.datamodule
        run = self.config[self.subcommand].run
        if not run.test or self._keeps_nothing() or not isinstance(data, app.data.ImageData) or self.stopped_by:
            return
        if "test" in data.source.splits and is_overridden("test_step", self.model):
            best = gather_objects((self._record().get("checkpoint") or {}).get("best"))[0]
            if best is not None and not all(gather_objects(Path(best).is_file())):
                rank_zero_warn(f"{best} is not on every node: testing the last weights instead of the best")
                best = None
            self.trainer.test(self.model, datamodule=data, ckpt_path=best, verbose=False)

    @property
    def stopped_by(self) -> str | None:
        """`Ctrl-C` or `SIGTERM`, where it has ended the run."""
        record = self._record() if isinstance(self.trainer.strategy.launcher, ProcessLauncher) else {}
        interrupted = record.get("status") == "interrupted"
        return cause(self.trainer) or (record["error"].removeprefix("by ") if interrupted else None)

    def _record(self) -> dict[str, Any]:
        """The run's record as it was written: spawned processes leave word only there."""
        directory = getattr(self.trainer.logger, "log_dir", None)
        path = Path(directory or "", "run.json")
        return json.loads(path.read_text()) if directory is not None and path.exists() else {}

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        finally:
            self._close()

    @rank_zero_only
    def _close(self) -> None:
        """End the tracker's run, and say where the run's files are and what to try next."""
        for logger in self.trainer.loggers:
            if isinstance(logger, Tracker):
                logger.finish()
        record = self._record()
        if record and (record["status"] == "completed" or record["train_s"] is not None):
            print("\n".join(["", *report(record, self.trainer.loggers, fitted=self.subcommand == "fit")]))
