"""Command `python -m app replay`: repeats a step, and reports its samples, largest loss first.

The run's seed, a checkpoint and the step's number determine a step. `replay` resumes the run from
the nearest earlier checkpoint on one device, and scores the step's samples with the weights before
the step. Each sample is scored as a batch of one, without dropout and with BatchNorm's running
statistics, so that a bad sample does not affect the others. --step worst selects the first step
with a non-finite loss, or else the sharpest rise of the loss.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from jsonargparse import Namespace
from jsonargparse.typing import PositiveInt
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from app.command.checkpoint_file import read
from app.command.configuration import split_flags
from app.command.parser import PlainParser
from app.data.batches import GlobalBatches, tensors
from app.data.exact_loader import ExactLoader
from app.errors import UserError
from app.lab.runs import CommandLine, run_fit
from app.lab.verify.recording import loss_of, singles
from app.launch.signals import stop_training
from app.modules import ImageClassifier
from app.monitor.image_grid import draw_images
from app.monitor.loggers import claim_version
from app.monitor.report import read_metrics
from app.record import Record
from app.system.files import write_text
from app.system.page import Section, code, page, short, table
from app.system.random_streams import own_streams
from app.system.torch_files import load
from app.training.buffers import Buffers

USAGE = "python -m app replay --config runs/NAME/version_N/config.yaml --step N [--FLAG VALUE ...]"
FILE = "replay.pt"
UNKNOWN = "—"  # label or prediction of a sample without one
MOST_IMAGES = 25  # largest number of images in the report
TIMEOUT = 7 * 86400.0  # of the run, in seconds


class Replay(Callback):
    """Callback that records the samples of the step with the largest loss in a range of steps.

    Args:
        first: First step of the range, counted from 1.
        last: Last step of the range.
    """

    def __init__(self, first: int, last: int) -> None:
        self.first = first
        self.last = last
        self._step: dict[str, Any] = {"step": 0}
        self._worst: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reject manual optimization, because scoring a sample would then train on it.

        Raises:
            UserError: When the module optimizes manually.
        """
        if not pl_module.automatic_optimization:
            raise UserError(
                f"{type(pl_module).__name__} optimizes manually, and replay needs automatic "
                "optimization"
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Score the batch's samples with the weights before the step."""
        step = trainer.global_step + 1
        if not self.first <= step <= self.last:
            return
        if step != self._step["step"]:
            epoch = trainer.current_epoch + 1
            self._step = {"step": step, "epoch": epoch, "loss": 0.0, "samples": []}
        samples = self._step["samples"]
        names = names_of(trainer, batch_idx) or itertools.count(len(samples))
        # Lightning's Trainer does not declare its data module
        class_names = getattr(trainer.datamodule, "class_names", [])  # type: ignore[attr-defined]
        classes: dict[Any, Any] = dict(enumerate(class_names))
        with untouched(pl_module, trainer.strategy.root_device):
            for name, one in zip(names, singles(batch), strict=False):
                row = score(pl_module, one, batch_idx)
                for column in ("label", "predicted"):
                    row[column] = str(classes.get(row[column], row[column]))
                samples.append({"sample": str(name), **row})

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the step if its loss is the largest so far; a non-finite loss is the largest."""
        if trainer.global_step >= self.last:
            stop_training(trainer, batch_idx)
        if not self._step["step"]:
            return
        self._step["loss"] += loss_of(outputs)
        if not self._worst or key(self._step["loss"]) > key(self._worst["loss"]):
            self._worst = self._step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the step with the largest loss."""
        if self._worst:
            torch.save(self._worst, Path(str(trainer.log_dir), FILE))


def key(loss: float) -> float:
    """Return a sort key of a loss; non-finite losses are largest."""
    return loss if math.isfinite(loss) else math.inf


def names_of(trainer: Trainer, batch_idx: int) -> list[Any]:
    """Return the file or number of each sample of a batch; [] without a global order."""
    loader = trainer.train_dataloader
    if isinstance(loader, ExactLoader):
        return loader.batch_sampler.samples(batch_idx)
    if not isinstance(loader, GlobalBatches):
        return []
    return [loader.split.name(row) for row in loader.samples(batch_idx).tolist()]


@contextmanager
def untouched(module: LightningModule, device: torch.device) -> Iterator[None]:
    """Evaluate in a `with` block; then restore logging, buffers, modes and random streams."""
    buffers = Buffers(module)
    modes = [(layer, layer.training) for layer in module.modules()]
    buffers.save()
    module.log = module.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign, assignment]
    module.eval()
    try:
        with own_streams(device), torch.no_grad():
            yield
    finally:
        del module.log, module.log_dict
        for layer, mode in modes:
            layer.training = mode
        buffers.restore(buffers.changed())


def mean_loss(module: Any, batch: Any, index: int) -> Any:
    """Return a batch's mean loss."""
    if type(module).training_step is ImageClassifier.training_step:
        return module.recipe.criterion(module(batch[0]), batch[1]).mean()
    arguments = [batch]
    if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2):
        arguments.append(index)
    return module.training_step(*arguments)


def score(module: LightningModule, sample: Any, index: int) -> dict[str, Any]:
    """Return loss, label, predicted class and image of a sample, given as a batch of one."""
    outputs: list[Tensor] = []

    def note(_module: nn.Module, _args: Any, output: Any) -> None:
        outputs.extend(tensors(output))

    with register_module_forward_hook(note):
        loss = loss_of(mean_loss(module, sample, index))
    leaves = tensors(sample)
    labels = [leaf for leaf in leaves if leaf.numel() == 1 and not leaf.is_floating_point()]
    images = [leaf for leaf in leaves if leaf.ndim == 4]
    logits = [output for output in outputs if output.ndim == 2]
    row: dict[str, Any] = {"loss": loss, "label": UNKNOWN, "predicted": UNKNOWN, "image": None}
    if labels:
        row["label"] = int(labels[0])
    if labels and logits:
        row["predicted"] = int(logits[-1].argmax())
    if images:
        row["image"] = images[0][0].float().cpu()
    return row


def run(arguments: list[str]) -> int:
    """Repeat a step, and write its report.

    Args:
        arguments: The arguments after `replay`.

    Raises:
        UserError: For invalid flags, or when the run cannot be repeated.
    """
    options, flags = _parse(arguments)
    # the first config is the run's
    name = dict(reversed(flags)).get("--config")
    if name is None:
        raise UserError("--config: name the config.yaml of a run: runs/NAME/version_0/config.yaml")
    config = Path(name)
    try:
        record = Record.load(config.with_name("run.json"))
    except ValueError as error:
        raise UserError(f"--config {config}: {error}: name the config.yaml of a run") from error
    first = last = options.step
    if options.step == "worst":
        first, last = worst(record, config.with_name("metrics.csv"))
    if first > record.steps + 1:
        raise UserError(f"--step {first}: the run took {record.steps:,} steps")
    folder = claim_version(config.with_name("replay"))
    words = [
        *itertools.chain.from_iterable(flags),
        "--trainer.strategy=auto",
        "--trainer.devices=1",
        "--trainer.num_nodes=1",
        "--trainer.enable_checkpointing=false",
        "--run.wandb=off",
        "--run.on_nonfinite=warn",
        f"--trainer.callbacks+={__name__}.Replay",
        f"--trainer.callbacks.first={first}",
        f"--trainer.callbacks.last={last}",
    ]
    checkpoint = None
    # another loader than one with a global order would yield other samples after a resume
    if record.global_batch_size:
        checkpoint = before(config.with_name("checkpoints"), first)
    if checkpoint is not None:
        words += ["--ckpt_path", str(checkpoint)]
    if record.global_batch_size and record.data is None:
        words += ["--run.global_batch", str(record.global_batch_size)]
    steps = f"step {first:,}"
    if last > first:
        steps += f" to {last:,}"
    print(f"replay  {steps}, from {checkpoint or 'the beginning'}", flush=True)
    result = run_fit(words, TIMEOUT, folder)
    file = folder / "version_0" / FILE
    if result.status != "completed" or not file.exists():
        raise UserError(f"the run cannot be repeated: {result.error or 'it ended before the step'}")
    step = load(file)
    samples = sorted(step["samples"], key=lambda sample: key(sample["loss"]), reverse=True)
    title = f"Step {step['step']:,}, epoch {step['epoch']}: loss {step['loss']:.4g}"
    report = folder / "report.html"
    write_text(report, report_of(title, samples, str(CommandLine(["replay", *arguments]))))
    print(title)
    print(
        f"largest loss {samples[0]['loss']:.4g}: sample {samples[0]['sample']}, "
        f"label {samples[0]['label']}, predicted {samples[0]['predicted']}"
    )
    print(f"report  {report}")
    return 0


def _parse(arguments: list[str]) -> tuple[Namespace, list[tuple[str, str]]]:
    """Return the options of `replay`, and the flags of `fit`."""
    remaining, flags = split_flags(arguments)
    parser = PlainParser(usage=USAGE, description=__doc__)
    parser.add_argument(
        "--step", type=PositiveInt | Literal["worst"], default="worst", help="number of the step"
    )
    return parser.parse_args(remaining), flags


def worst(record: Record, metrics: Path) -> tuple[int, int]:
    """Return the first and the last step to search.

    If the record names a first step with a non-finite loss, search only this step. Otherwise,
    search the steps between the two successive logged losses with the largest rise; if fewer than
    two were logged, search the whole run.

    Raises:
        UserError: When the run took no step.
    """
    if record.not_finite_step is not None:
        return record.not_finite_step, record.not_finite_step
    if not record.steps:
        raise UserError("--step worst: the run took no step: give another run")
    rows = pd.DataFrame(read_metrics(metrics))
    # `train_loss` comes last, because it may be an epoch's mean
    names = [*rows.filter(regex="loss_step$|^loss$"), *rows.filter(regex="^train_loss$")]
    if not names:
        return 1, record.steps
    rows = rows.dropna(subset=names[0])
    if len(rows) in (1, len(record.epochs)):  # no windows, or epochs' means
        return 1, record.steps
    steps = rows["step"].astype(int) + 1
    rise = rows[names[0]].diff().argmax()
    return int(steps.iloc[rise - 1]) + 1, int(steps.iloc[rise])


def before(folder: Path, step: int) -> Path | None:
    """Return the last checkpoint before a step, or None.

    Raises:
        UserError: When a checkpoint is damaged.
    """
    last = 0
    checkpoint = None
    for path in folder.glob("*.ckpt"):
        steps = read(path)["global_step"]
        if last < steps < step:
            last = steps
            checkpoint = path
    return checkpoint


def report_of(title: str, samples: Sequence[dict[str, Any]], command: str) -> str:
    """Return the report as HTML.

    Args:
        title: Step and loss.
        samples: Samples, the largest loss first.
        command: Command line of `replay`.
    """
    rows = []
    images: list[tuple[Tensor, str]] = []
    for sample in samples:
        label = sample["label"]
        predicted = sample["predicted"]
        loss = f"{sample['loss']:.4g}"
        rows.append((sample["sample"], label, predicted, loss))
        if sample["image"] is not None:
            caption = f"{short(label, 9)}, predicted {short(predicted, 9)}\nloss {loss}"
            images.append((sample["image"], caption))
    sections = [
        Section("Samples", table(("sample", "label", "predicted", "loss"), rows, words=range(3))),
        Section("The command", code(command)),
    ]
    figures = {}
    if images:
        figures["images"] = draw_images(images[:MOST_IMAGES])
        caption = "The samples as the network got them, with label, prediction and loss"
        picture = f"![{caption}](images)"
        sections.insert(0, Section("Images", picture))
    lead = (
        f"{len(samples)} samples, each scored alone with the weights before the step, without "
        "dropout."
    )
    return page(title, lead, sections, figures)
