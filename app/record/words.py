"""Functions that format the figures of a run record as text."""

import math
from collections.abc import Iterator, Mapping, Sequence

from app.errors import printable
from app.record import PHASES, Hardware, Record

# a phase other than forward and backward is the bottleneck if it takes at least this share of a
# step
OVERHEAD = 0.35
BUSY = 0.1  # other programs may take this share of the cores without disturbing a run
# launching GPU work is the bottleneck if it takes at least this share of forward and backward
LAUNCH_BOUND = 0.9
BOTTLENECKS = {  # name and remedy of each phase
    "forward_backward": (
        "The model's own computation",
        "more devices, `--trainer.precision bf16-mixed`, `--model.compile default` or a larger "
        "`--data.batch_size`",
    ),
    "data": ("Data loading", "`--data.placement device`, or less augmentation"),
    "communication": ("Communication", "a larger `--data.batch_size`, or fewer devices"),
    "optimizer": ("The optimizer", "a larger `--data.batch_size`"),
    "rest": (
        "Launch overhead",
        "a larger `--data.batch_size`, or `--model.compile reduce-overhead` on a GPU",
    ),
}


def duration(seconds: float) -> str:
    """Format seconds: `20 µs`, `7.39 ms`, `7.4 s`, `4:10`, `1:02:03`."""
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if 1 <= factor * seconds < 999.5:
            return f"{factor * seconds:.3g} {unit}"
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}"


def counted(number: int, noun: str) -> str:
    """Format a number of things: `1 epoch`, `2,000 epochs`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}s"


def listed(names: Sequence[str]) -> str:
    """Format names: `cat, dog`; of more than ten, the first ten and the number of the others."""
    text = printable(", ".join(names[:10]))
    if len(names) > 10:
        text += f" and {len(names) - 10:,} more"
    return text


def settings(record: Record, device: str = "") -> Iterator[tuple[str, str]]:
    """Yield names and texts of a run's settings, such as `("precision", "32-true")`.

    Args:
        record: The run record.
        device: Name of a device; by default `CPU` or `GPU`.
    """
    model = record.model
    data = record.data
    if model:
        text = f"{model.name.rpartition(', ')[2]}, {model.parameters:,} parameters"
        if model.trainable is not None and model.trainable < model.parameters:
            text += f", {model.trainable:,} of them trainable"
        if data:
            text += f", {' × '.join(map(str, data.shape))} → {data.classes} classes"
        yield "network", text
    if data:
        verbs = {"train": "train", "val": "validate", "test": "test"}
        counts = [
            f"{data.images[split]:,} to {verbs[split]}" for split in verbs if data.images.get(split)
        ]
        yield "images", f"{data.name} ({data.place}): {', '.join(counts)}"
        yield "classes", listed(data.class_names)
    if record.strategy:
        text = f"{way_of_running(record, device)}, {counted(record.threads or 0, 'thread')}"
        if record.world_size > 1:
            text += " each"
        yield "runs on", text
    if record.global_batch_size:
        yield "batch", batch(record)
    if record.precision:
        yield "precision", record.precision
    for optimizer in record.optimizers:
        yield "optimizer", optimizer
    if record.recipe:
        yield "recipe", ", ".join(f"{name} {value}" for name, value in record.recipe.items())


def batch(record: Record) -> str:
    """Format the global batch and each device's share: `64 = 2 × 32`."""
    size = record.global_batch_size
    assert size is not None
    text = f"{size:,}"
    if record.replicas > 1:
        text += f" = {record.replicas} × {size / record.replicas:g}"
    if record.virtual_devices:
        text += f", in {record.virtual_devices} shards"
    return text


def accuracy(share: float, samples: int | None) -> str:
    """Format an accuracy, 0 to 1, with its 95 % interval: `34.8 % (18.8 to 55.1)`.

    The interval is Wilson's: https://doi.org/10.1080/01621459.1927.10502953.

    Args:
        share: Share of the samples that are classified correctly.
        samples: Number of samples, or None if it is unknown; then, the text has no interval.
    """
    text = f"{100 * share:.1f} %"
    if not samples:
        return text
    count = samples / 1.96**2  # in units of the squared normal quantile
    middle = 2 * count * share + 1
    margin = math.sqrt(4 * count * share * (1 - share) + 1)
    scale = 50 / (count + 1)
    return f"{text} ({scale * (middle - margin):.1f} to {scale * (middle + margin):.1f})"


def way_of_running(record: Record, device: str = "") -> str:
    """Format strategy, devices and nodes: `ddp, 4 × GPU on 2 nodes`, or `one CPU`.

    Args:
        record: The run record.
        device: Name of a device; by default `CPU` or `GPU`.
    """
    if not device:
        device = "CPU" if record.accelerator == "cpu" else "GPU"
    if record.replicas == 1:
        return f"one {device}"
    text = f"{record.strategy}, {record.replicas} × {device}"
    if record.live:
        text += ", live"
    elif record.num_nodes > 1:
        text += f" on {record.num_nodes} nodes"
    return text


def taken_cores(others: float | None, hardware: Hardware | None) -> str:
    """Format the cores that other programs took: `1.8 of 2 cores`, or nothing if few."""
    if others is None or hardware is None or others <= BUSY * hardware.cores:
        return ""
    return f"{others:.1f} of {hardware.cores} cores"


def time_taken(record: Record) -> str:
    """Format the seconds of a training and of its set-up, and its throughput."""
    text = f"{duration(record.train_s or 0.0)} training"
    if record.parts:
        text += f" in {len(record.parts) + 1} parts"
    text += f", {duration(record.setup_s or 0.0)} set-up"
    speed = record.throughput
    if speed.median:
        text += f", {speed.median:,.0f} samples/s (median of {counted(speed.n, 'window')})"
    taken = taken_cores(record.others_cores, record.hardware)
    if taken:
        text += f"; other programs took {taken}"
    return text


def bottleneck(
    milliseconds: Mapping[str, float], gpu: bool, placement: str | None, taken: str
) -> tuple[str, str]:
    """Return a step's bottleneck with its share of the step, and a remedy, in Markdown.

    If other programs disturbed the CPU that computes or loads the data, they are the bottleneck:
    the phases then say little.

    Args:
        milliseconds: Milliseconds of each phase, and of `launch`.
        gpu: Whether a GPU computes.
        placement: Placement of the images, such as `disk` or `memory`.
        taken: Cores that other programs took, as text of `taken_cores`.
    """
    overheads = [phase for phase in PHASES if phase != "forward_backward"]
    phase = max(overheads, key=milliseconds.__getitem__)
    step = sum(milliseconds[name] for name in PHASES)
    if milliseconds[phase] < OVERHEAD * step:
        phase = "forward_backward"
    if taken and (not gpu or phase == "data"):  # workers load the data on the CPU
        return f"Other programs: {taken}", "again when they are done"
    time = milliseconds[phase]
    if phase == "forward_backward" and gpu and milliseconds["launch"] >= LAUNCH_BOUND * time:
        phase = "rest"
    name, remedy = BOTTLENECKS[phase]
    if phase == "data" and placement == "disk":
        remedy = "another `--data.num_workers`, or `--data.placement memory`"
    return f"{name}: {time / step:.0%} of a step", remedy
