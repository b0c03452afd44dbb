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
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import Namespace
from jsonargparse.typing import PositiveInt
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from app.command.checkpoint_file import read
from app.command.configuration import split_flags
from app.command.parser import PlainParser
from app.data.batches import GlobalBatches, tensors
from app.data.exact_loader import GlobalSampler, order_of
from app.data.shares import Shards
from app.errors import UserError
from app.lab.runs import CommandLine, run_fit
from app.lab.verify.recording import loss_of, singles
from app.launch.signals import stop_training
from app.modules import ImageClassifier
from app.monitor.loggers import claim_version
from app.monitor.report import draw_images, read_metrics
from app.record import Record
from app.system.files import write_text
from app.system.page import Section, code, page, short, table
from app.system.random_streams import own_streams
from app.system.torch_files import load
from app.training.buffers import Buffers

USAGE = "python -m app replay --config runs/NAME/version_N/config.yaml --step N [--FLAG VALUE ...]"
FILE = "replay.pt"
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
            names = getattr(trainer.datamodule, "class_names", [])  # type: ignore[attr-defined]
            self._step = {
                "step": step,
                "epoch": trainer.current_epoch + 1,
                "loss": 0.0,
                "samples": [],
                "names": list(names),
            }
        samples = self._step["samples"]
        names = names_of(trainer, batch_idx) or itertools.count(len(samples))
        with untouched(pl_module, trainer.strategy.root_device):
            for name, one in zip(names, ones(batch), strict=False):
                samples.append({"sample": name, **score(pl_module, one, batch_idx)})

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
    """Return the file or index of each sample of a batch; [] without a global order."""
    loader = trainer.train_dataloader
    if isinstance(loader, GlobalBatches):
        rows = loader.samples(batch_idx).tolist()
        files = loader.split.names
        return [files[row] for row in rows] if files else rows
    order = order_of(loader)
    return order.samples(batch_idx) if isinstance(order, GlobalSampler) else []


def ones(batch: Any) -> list[Any]:
    """Cut a batch into batches of one sample."""
    if not isinstance(batch, Shards):
        return singles(batch)
    samples = []
    for shard, count in zip(batch, batch.counts, strict=True):
        samples += singles(shard)[:count]
    return samples


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


def mean_loss(module: LightningModule, batch: Any, index: int) -> Any:
    """Return a batch's mean loss."""
    step = type(module).training_step
    if isinstance(module, ImageClassifier) and step is ImageClassifier.training_step:
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
    row: dict[str, Any] = {"loss": loss, "label": None, "predicted": None, "image": None}
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
    if name is None or not Path(name).with_name("run.json").exists():
        problem = ""
        if name is not None:
            problem = f" {name}: there is no run.json beside it"
        raise UserError(
            f"--config{problem}: name the config.yaml of a run, such as "
            "runs/NAME/version_0/config.yaml"
        )
    config = Path(name)
    try:
        record = Record.load(config.with_name("run.json"))
    except ValueError as error:
        raise UserError(f"--config {config}: {error}: give another run's") from error
    first = last = options.step
    if options.step == "worst":
        first, last = worst(record, config.with_name("metrics.csv"))
    if first > record.steps + 1:
        raise UserError(f"--step {first}: the run took {record.steps:,} steps")
    folder = claim_version(config.with_name("replay"))
    words = list(itertools.chain.from_iterable(flags))
    words += ["--trainer.strategy=auto", "--trainer.devices=1", "--trainer.num_nodes=1"]
    words += ["--trainer.enable_checkpointing=false", "--run.wandb=off", "--run.on_nonfinite=warn"]
    words += [f"--trainer.callbacks+={__name__}.Replay"]
    words += [f"--trainer.callbacks.first={first}", f"--trainer.callbacks.last={last}"]
    checkpoint = None
    # another loader than one with a global order would yield other samples after a resume
    if record.global_batch_size:
        checkpoint = before(config.with_name("checkpoints"), first)
    if checkpoint is not None:
        words += ["--ckpt_path", str(checkpoint)]
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
    rows = [described(sample, step["names"]) for sample in samples]
    title = f"Step {step['step']:,}, epoch {step['epoch']}: loss {step['loss']:.4g}"
    command = str(CommandLine(["replay", *arguments]))
    sample, label, predicted, loss = rows[0]
    report = folder / "report.html"
    write_report(title, samples, rows, command, report)
    print(f"{title}\nlargest loss {loss}: sample {sample}, label {label}, predicted {predicted}")
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
    rows = read_metrics(metrics)
    names = []
    for name in set().union(*rows):
        if name.endswith("loss_step") or name in ("loss", "train_loss"):
            names.append(name)
    # prefer any other name to "train_loss", which may be an epoch's mean
    name = min(names, key=lambda name: (name == "train_loss", name), default="")
    losses = [(int(row["step"]) + 1, row[name]) for row in rows if name in row]
    if len(losses) in (0, 1, len(record.epochs)):  # no windows, or epochs' means
        return 1, record.steps
    rises = []
    for (step, loss), (step_after, loss_after) in itertools.pairwise(losses):
        rises.append((key(loss_after) - loss, step + 1, step_after))
    _, first, last = max(rises, key=itemgetter(0))
    return first, last


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


def described(sample: dict[str, Any], names: Sequence[str]) -> list[str]:
    """Return a sample's cells for the table: file or index, label, prediction, loss."""
    cells = [str(sample["sample"])]
    for number in (sample["label"], sample["predicted"]):
        if number is None:
            cells.append("—")
        elif names:
            cells.append(names[number])
        else:
            cells.append(str(number))
    return [*cells, f"{sample['loss']:.4g}"]


def write_report(
    title: str, samples: Sequence[Any], rows: Sequence[Sequence[str]], command: str, file: Path
) -> None:
    """Write the report.

    Args:
        title: Step and loss.
        samples: Samples, the largest loss first.
        rows: Cells of each sample.
        command: Command line of `replay`.
        file: Path of the report.
    """
    images = []
    for sample, (_, label, predicted, loss) in zip(samples[:MOST_IMAGES], rows, strict=False):
        if sample["image"] is not None:
            text = f"{short(label, 9)}, predicted {short(predicted, 9)}\nloss {loss}"
            images.append((sample["image"], text))
    sections = [
        Section("Samples", table(("sample", "label", "predicted", "loss"), rows, words=range(3))),
        Section("The command", code(command)),
    ]
    figures = {}
    if images:
        figures["images"] = draw_images(images)
        caption = "The samples as the network got them, with label, prediction and loss"
        picture = f'![{caption}](images "Largest loss first")'
        sections.insert(0, Section("Images", picture))
    lead = (
        f"{len(samples)} samples, each scored alone with the weights before the step, without "
        "dropout."
    )
    write_text(file, page(title, lead, sections, figures))
