"""Command `python -m app replay`: repeats a training step, and reports its samples, the largest loss first.

The run's seed, a checkpoint and the step's number determine a step. `replay` resumes the run from
the nearest earlier checkpoint on one device, and scores the step's samples with the weights before
the step. Each sample is scored as a batch of one, without dropout and with BatchNorm's running
statistics, so that a bad sample does not affect the others. --step worst selects the first step
with a non-finite loss, or else the sharpest rise of the loss.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import Namespace
from jsonargparse.typing import PositiveInt
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import get_total_norm

from app.command.checkpoint_file import read
from app.command.configuration import split_flags
from app.command.parser import PlainParser
from app.data.batches import GlobalBatches, tensors
from app.data.global_order import GlobalSampler, order_of
from app.data.shares import Shards
from app.errors import UserError
from app.lab.runs import CommandLine, run_fit
from app.lab.verify.recording import singles
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
from app.training.virtual_devices import seed_of_shard

USAGE = "python -m app replay --config runs/NAME/version_N/config.yaml --step N [--FLAG.OF.FIT VALUE ...]"
FILE = "replay.pt"
SHOWN = 25  # largest number of images in the report
LIMIT = 7 * 86400.0  # timeout of the run in seconds


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
        """Reject manual optimization, because scoring a sample calls `training_step`, which would then train on it.

        Raises:
            UserError: When the module optimizes manually.
        """
        if not pl_module.automatic_optimization:
            raise UserError(
                f"{type(pl_module).__name__} optimizes manually, and replay needs automatic optimization"
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Score the batch's samples, and compute each shard's gradient norm, with the weights before the step."""
        step = trainer.global_step + 1
        epoch = trainer.current_epoch
        if not self.first <= step <= self.last:
            return
        if step != self._step["step"]:
            names = list(getattr(trainer.datamodule, "class_names", []))  # type: ignore[attr-defined]
            self._step = {
                "step": step,
                "epoch": epoch + 1,
                "losses": [],
                "samples": [],
                "norms": [],
                "names": names,
            }
        shards = (
            batch
            if isinstance(batch, Shards)
            else Shards([batch], 0, [size := len(singles(batch))], size)
        )
        files = iter(names_of(trainer, batch_idx))
        for number, (shard, count) in enumerate(
            zip(shards, shards.counts, strict=True), shards.first
        ):
            with untouched(pl_module, trainer.strategy.root_device):
                for one in singles(shard)[:count]:
                    row = {"sample": next(files, len(self._step["samples"])), "shard": number + 1}
                    self._step["samples"].append(row | score(pl_module, one, batch_idx))
            with untouched(
                pl_module, trainer.strategy.root_device
            ) as seed:  # restores BatchNorm's statistics
                seed(seed_of_shard(trainer, 5, batch_idx, number))
                self._step["norms"].append(
                    gradient_norm(pl_module, shard, batch_idx) if count else 0.0
                )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the step if its loss is the largest so far; a non-finite loss counts as the largest."""
        if trainer.global_step >= self.last:
            stop_training(trainer, batch_idx)
        if trainer.global_step < self.first or self._step["step"] < self.first:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self._step["losses"].append(math.nan if loss is None else float(loss))
        self._step["loss"] = sum(self._step["losses"])
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
    """Return the file or index of each sample of a batch; an empty list if the loader has no global order."""
    loader = trainer.train_dataloader
    if isinstance(loader, GlobalBatches):
        rows = loader.samples(batch_idx).tolist()
        files = loader.split.names
        return [files[row] for row in rows] if files else rows
    order = order_of(loader)
    return order.samples(batch_idx) if isinstance(order, GlobalSampler) else []


@contextmanager
def untouched(module: LightningModule, device: torch.device) -> Iterator[Callable[[int], None]]:
    """Protect a training from the code of a `with` block: disable logging; restore buffers, modes, random streams.

    Yields:
        A function that seeds the random streams.
    """
    buffers = Buffers(module)
    modes = [(layer, layer.training) for layer in module.modules()]
    buffers.save()
    module.log = module.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign, assignment]
    try:
        with own_streams(device) as seed:
            yield seed
    finally:
        del module.log, module.log_dict
        for layer, mode in modes:
            layer.training = mode
        buffers.restore(buffers.changed())


def mean_loss(module: LightningModule, batch: Any, index: int) -> Tensor:
    """Return a batch's mean loss."""
    if (
        isinstance(module, ImageClassifier)
        and type(module).training_step is ImageClassifier.training_step
    ):
        return module.recipe.criterion(module(batch[0]), batch[1]).mean()
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    output: Any = module.training_step(batch, index) if takes_index else module.training_step(batch)
    return output["loss"] if isinstance(output, dict) else output


def gradient_norm(module: LightningModule, batch: Any, index: int) -> float:
    """Return the gradient norm of a batch's mean loss."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        gradients = torch.autograd.grad(
            mean_loss(module, batch, index), parameters, allow_unused=True
        )
    return float(get_total_norm([gradient for gradient in gradients if gradient is not None]))


@torch.no_grad()
def score(module: LightningModule, sample: Any, index: int) -> dict[str, Any]:
    """Return loss, label, predicted class and image of a sample, given as a batch of one."""
    outputs: list[Tensor] = []
    module.eval()
    with register_module_forward_hook(
        lambda _module, _args, output: outputs.extend(tensors(output))
    ):
        loss = float(mean_loss(module, sample, index))
    module.train()
    leaves = tensors(sample)
    label = next(
        (int(leaf) for leaf in leaves if leaf.numel() == 1 and not leaf.is_floating_point()), None
    )
    logits = next(
        (output for output in reversed(outputs) if output.ndim == 2 and label is not None), None
    )
    image = next((leaf[0].float().cpu() for leaf in leaves if leaf.ndim == 4), None)
    return {
        "loss": loss,
        "label": label,
        "predicted": None if logits is None else int(logits.argmax()),
        "image": image,
    }


def run(arguments: list[str]) -> int:
    """Repeat a step, and write its report.

    Args:
        arguments: The arguments after `replay`.

    Raises:
        UserError: For invalid flags, or when the run cannot be repeated.
    """
    options, flags = _parse(arguments)
    config = next((Path(value) for flag, value in flags if flag == "--config"), None)
    if config is None or not config.with_name("run.json").exists():
        problem = "" if config is None else f" {config}: there is no run.json beside it"
        raise UserError(
            f"--config{problem}: name the config.yaml of a run, such as runs/NAME/version_0/config.yaml"
        )
    try:
        record = Record.load(config.with_name("run.json"))
    except ValueError as error:
        raise UserError(f"--config {config}: {error}: give another run's") from error
    first, last = (
        worst(record, config.with_name("metrics.csv"))
        if options.step == "worst"
        else (options.step,) * 2
    )
    if first > record.steps + 1:
        raise UserError(f"--step {first}: the run took {record.steps:,} steps")
    folder = claim_version(config.with_name("replay"))
    words = [word for flag, value in flags for word in (flag, value)]
    words += ["--trainer.strategy=auto", "--trainer.devices=1", "--trainer.num_nodes=1"]
    words += ["--trainer.enable_checkpointing=false", "--run.wandb=off", "--run.on_nonfinite=warn"]
    words += [f"--trainer.callbacks+={__name__}.Replay"]
    words += [f"--trainer.callbacks.first={first}", f"--trainer.callbacks.last={last}"]
    # resume only with a global order, because another loader would yield other samples after a
    # resume
    checkpoint = (
        before(config.with_name("checkpoints"), first) if record.global_batch_size else None
    )
    if checkpoint is not None:
        words += ["--ckpt_path", str(checkpoint)]
    print(
        f"replay  step {first:,}{f' to {last:,}' * (last > first)}, from {checkpoint or 'the beginning'}",
        flush=True,
    )
    result = run_fit(words, LIMIT, folder)
    if result.status != "completed" or not (folder / "version_0" / FILE).exists():
        raise UserError(f"the run cannot be repeated: {result.error or 'it ended before the step'}")
    step = load(folder / "version_0" / FILE)
    samples = sorted(step["samples"], key=lambda sample: -key(sample["loss"]))
    rows = [described(sample, step["names"]) for sample in samples]
    title = f"Step {step['step']:,}, epoch {step['epoch']}: loss {step['loss']:.4g}"
    command = str(CommandLine(["replay", *arguments]))
    sample, shard, label, predicted, loss = rows[0]
    print(
        f"{title}\nlargest loss {loss}: sample {sample} (shard {shard}), label {label}, predicted {predicted}"
    )
    print(
        f"report  {write_report(title, samples, rows, step['norms'], command, folder / 'report.html')}"
    )
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
    rows = read_metrics(metrics)
    names = {
        name
        for row in rows
        for name in row
        if name.endswith("loss_step") or name in ("loss", "train_loss")
    }
    # prefer any other name to "train_loss", which may be an epoch's mean
    name = min(names, key=lambda name: (name == "train_loss", name), default="")
    losses = [(int(row["step"]) + 1, row[name]) for row in rows if name in row]
    if not record.steps:
        raise UserError("--step worst: the run took no step: give another run")
    if len(losses) in (0, 1, len(record.epochs)):  # no windows, or epochs' means
        return 1, record.steps
    rises = [key(after) - before for (_, before), (_, after) in itertools.pairwise(losses)]
    place = rises.index(max(rises))
    return losses[place][0] + 1, losses[place + 1][0]


def before(folder: Path, step: int) -> Path | None:
    """Return the last checkpoint before a step, or None.

    Raises:
        UserError: When a checkpoint is damaged.
    """
    made = [(read(path)["global_step"], path) for path in folder.glob("*.ckpt")]
    return max(((steps, path) for steps, path in made if steps < step), default=(0, None))[1]


def described(sample: dict[str, Any], names: list[str]) -> list[str]:
    """Return a sample's cells for the table: file or index, shard, label, prediction, loss."""
    numbers = (sample["label"], sample["predicted"])
    classes = [
        "—" if number is None else names[number] if names else str(number) for number in numbers
    ]
    return [str(sample["sample"]), str(sample["shard"]), *classes, f"{sample['loss']:.4g}"]


def write_report(
    title: str,
    samples: list[dict[str, Any]],
    rows: list[list[str]],
    norms: list[float],
    command: str,
    file: Path,
) -> Path:
    """Write the report, and return its path.

    Args:
        title: Step and loss.
        samples: Samples, the largest loss first.
        rows: Cells of each sample.
        norms: Gradient norm of each shard.
        command: Command line of `replay`.
        file: Path of the report.
    """
    texts = [
        f"{short(a, 9)}, predicted {short(b, 9)}\nloss {loss}" for _, _, a, b, loss in rows[:SHOWN]
    ]
    shown = [
        (sample["image"], t)
        for sample, t in zip(samples, texts, strict=False)
        if sample["image"] is not None
    ]
    figures = {"images": draw_images(shown)} if shown else {}
    pictures = '![The samples as the network got them, with label, prediction and loss](images "Largest loss first")'
    norm_rows = [(f"shard {number + 1}", f"{norm:.4g}") for number, norm in enumerate(norms)]
    sections = [
        Section("Images", pictures * bool(shown)),
        Section(
            "Samples",
            table(("sample", "shard", "label", "predicted", "loss"), rows, words=range(4)),
        ),
        Section("Gradient norm", table(("shard", "norm"), norm_rows)),
        Section("The command", code(command)),
    ]
    write_text(
        file,
        page(
            title,
            f"{len(samples)} samples, each scored alone with the weights before the step, without dropout.",
            sections,
            figures,
        ),
    )
    return file
