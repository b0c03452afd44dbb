"""Run record: the only package that reads and writes `run.json`.

Every field of `Record` has a default, because a run may end early and older versions wrote fewer
fields. Field names are the names in the file; `app/monitor/README.md` explains them.
"""

from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval

from app.errors import ExitStatus
from app.system.files import read_json, write_json

PHASES = (
    "data",
    "forward_backward",
    "communication",
    "optimizer",
    "rest",
)  # phases of a step, without overlap

# Larger numbers show that a file is damaged, and are rejected. Losses and learning rates have no
# limit.
LIMIT = 1e15
Int = Annotated[int, Interval(gt=-LIMIT, lt=LIMIT)]
Float = Annotated[float, Interval(gt=-LIMIT, lt=LIMIT)]
Count = Annotated[int, Interval(gt=0, lt=LIMIT)]
Positive = Annotated[float, Interval(gt=0, lt=LIMIT)]


@dataclass
class Epoch:
    """Metrics and throughput of an epoch; `whole` is false if the run stopped within the epoch.

    `val_samples` is the number of samples that the validation saw, or None if it is unknown;
    `metrics` are the other logged metrics.
    """

    epoch: Int
    whole: bool = True
    seconds: Float | None = None
    samples_per_s: Float | None = None
    lr: float | None = None
    train_loss: float | None = None
    val_loss: float | None = None
    val_acc: Float | None = None
    val_samples: Int | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class Metrics:
    """Loss and accuracy (0 to 1) over a split; null if the model did not log them.

    `samples` is their number, or None if it is unknown.
    """

    loss: float | None = None
    acc: Float | None = None
    samples: Int | None = None


@dataclass
class TrainLoss:
    """Training loss of the last epoch."""

    last: float | None = None


@dataclass
class Throughput:
    """Samples per second of all ranks: median, minimum and maximum of `n` logging windows."""

    median: Positive | None = None
    min: Positive | None = None
    max: Positive | None = None
    n: Int = 0
    unit: str = "samples/s"


@dataclass
class Phases:
    """Milliseconds of each phase of a step, from `n` steps.

    `launch` is the host's time to launch forward and backward.
    """

    data: Float = 0.0
    forward_backward: Float = 0.0
    communication: Float = 0.0
    optimizer: Float = 0.0
    rest: Float = 0.0
    forward: Float = 0.0
    backward: Float = 0.0
    launch: Float = 0.0
    n: Int = 0
    unit: str = "ms"

    @property
    def step(self) -> float:
        """Milliseconds of the whole step."""
        return sum(getattr(self, phase) for phase in PHASES)


@dataclass
class RankTime:
    """Median milliseconds of a rank's step: data, compute, and wait for others' gradients."""

    rank: Int
    node: Int
    data: Float
    compute: Float
    wait: Float
    slow: bool | None = None
    unit: str = "ms"


@dataclass
class DeviceMemory:
    """Memory of a rank on a device, in GiB; see `peak_memory` in `app/monitor/README.md`."""

    rank: Int
    device: str
    allocated_gib: Float | None = None
    reserved_gib: Float | None = None
    in_use_gib: Float | None = None
    host_rss_gib: Float = 0.0
    total_gib: Float | None = None


@dataclass
class Course:
    """Time series of training.

    Attributes:
        samples_per_s: Rows of the seconds since training began, and the samples/s.
        memory_gib: Rows of the seconds since training began, and each rank's memory in GiB.
    """

    samples_per_s: list[list[Float]] = field(default_factory=list)
    memory_gib: list[list[Float]] = field(default_factory=list)


@dataclass
class RateSearch:
    """Suggested learning rate of `--run.find_lr`, and the loss at each rate that was tried."""

    suggestion: float | None = None
    lr: list[float] = field(default_factory=list)
    loss: list[float | None] = field(default_factory=list)


@dataclass
class Checkpoints:
    """Paths of the best and the last checkpoint."""

    best: str | None = None
    last: str | None = None


@dataclass
class Model:
    """Class names of module and network, and the numbers of all and of trainable parameters."""

    name: str
    parameters: Int
    trainable: Int | None = None


@dataclass
class DataSet:
    """Name, classes, number of images of each split, shape of an image, and folder or original."""

    name: str
    classes: Int
    images: dict[str, Int | None] = field(default_factory=dict)
    class_names: list[str] = field(default_factory=list)
    shape: list[Int] = field(default_factory=list)
    place: str | None = None


@dataclass
class Hardware:
    """Processor, number of cores, and names of the GPUs."""

    cpu: str
    cores: Int
    gpus: list[str] = field(default_factory=list)


@dataclass
class Part:
    """Part of a training: from its start, or from a resume, until it stops.

    A resumed run lists the earlier parts in `Record.parts`. An earlier part's `train_s` covers only
    that part, but the record's `train_s` covers all parts.
    """

    # outcome
    status: str = "running"
    error: str | None = None
    command: str | None = None
    resumed_from: str | None = None
    launchers: list[str] = field(default_factory=list)

    # configuration
    strategy: str | None = None
    devices: Count | None = None
    world_size: Count = 1

    # results
    steps: Int = 0
    repeated: Int = 0  # of them, because a part ended after its last checkpoint
    setup_s: Float | None = None
    train_s: Float | None = None


@dataclass
class Record(Part):
    """Record of a run: configuration, outcome and measurements."""

    run_dir: str | None = None
    config: str | None = None
    checkpoint: Checkpoints = field(default_factory=Checkpoints)
    tracker: str | None = None
    parts: list[Part] = field(default_factory=list)

    # configuration
    num_nodes: Count = 1
    live: bool = False
    replicas: Count = 1
    threads: Count | None = None
    precision: str | None = None
    placement: str | None = None
    global_batch_size: Count | None = None
    not_exact: list[str] = field(default_factory=list)
    virtual_devices: Count | None = None
    shards: list[int] = field(default_factory=list)
    max_epochs: Int | None = None
    max_steps: Int | None = None
    lr: float | None = None
    found_lr: RateSearch | None = None
    seed: Int | None = None
    loop: str | None = None
    loop_reason: str | None = None
    channels_last: bool | None = None
    compile: str | bool | None = None
    matmul_precision: str | None = None
    benchmark: bool | None = None
    fused: bool | None = None
    optimizers: list[str] = field(default_factory=list)
    recipe: dict[str, str] = field(default_factory=dict)

    # model, data and machine
    model: Model | None = None
    data: DataSet | None = None
    images_left_out: dict[str, Int] | None = None
    files_left_out: dict[str, Int] | None = None
    duplicates: Int = 0
    hardware: Hardware | None = None
    versions: dict[str, str | None] = field(default_factory=dict)

    # results
    steps_per_epoch: Float | None = None  # None for a loader without a length
    probe: Epoch | None = None  # epoch -1: validation of the fitted head, before training
    epochs: list[Epoch] = field(default_factory=list)
    train_loss: TrainLoss | None = None
    validation: Metrics | None = None
    test: Metrics | None = None
    tested: str | None = None
    not_finite_since: Int | None = None
    not_finite_step: Int | None = None

    # speed
    throughput: Throughput = field(default_factory=Throughput)
    time_per_step: Phases | None = None
    ranks: list[RankTime] = field(default_factory=list)
    others_cores: Float | None = None
    course: Course = field(default_factory=Course)
    peak_memory: list[DeviceMemory] = field(default_factory=list)

    # set by the command that started the run
    wall_s: Positive | None = None
    time_limit: Float | None = None

    @classmethod
    def load(cls, path: Path) -> "Record":
        """Read and check a record.

        Args:
            path: The file.

        Raises:
            ValueError: When the file is unreadable or a field is invalid; the message names file
                and field.
        """
        # imported late, because a new run reads no record
        from pydantic import TypeAdapter, ValidationError

        try:
            return TypeAdapter(cls).validate_python(_without_nulls(read_json(path)))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise ValueError(f"{path} cannot be read ({place}: {first['msg'][:80]})") from error

    def save(self, path: Path) -> None:
        """Write the record atomically; infinity and NaN become null.

        Raises:
            OSError: When the file cannot be written.
        """
        write_json(path, asdict(self))

    def last_part(self) -> Part:
        """Return the training since its start or its last resume, which has ended."""
        part = Part(**{field.name: getattr(self, field.name) for field in fields(Part)})
        if part.status == "running":
            part.status = "failed"
            part.error = "the run was killed, or the machine went down"
        part.train_s = (self.train_s or 0.0) - self.earlier_s
        return part

    @property
    def earlier_s(self) -> float:
        """Seconds of training in earlier parts."""
        return sum(part.train_s or 0.0 for part in self.parts)

    @property
    def best_epoch(self) -> Epoch | None:
        """The epoch, or probe, with the highest accuracy, and of equal ones the lowest loss."""
        rows = [row for row in (self.probe, *self.epochs) if row and row.val_acc is not None]
        return max(rows, key=lambda row: (row.val_acc, -(row.val_loss or 0.0)), default=None)

    @property
    def finished(self) -> bool:
        """Whether training reached the requested epochs or steps."""
        epochs = max((row.epoch + 1 for row in self.epochs if row.whole), default=0)
        return reaches(epochs, self.max_epochs) or self.ended_by_steps

    @property
    def ended_by_steps(self) -> bool:
        """Whether training reached the requested steps."""
        return reaches(self.steps, self.max_steps)

    @property
    def accelerator(self) -> str:
        """Type of the devices, such as `cuda`; guessed from the GPUs if no memory is recorded."""
        if self.peak_memory:
            return self.peak_memory[0].device.partition(":")[0]
        if self.hardware and self.hardware.gpus:
            return "cuda"
        return "cpu"


def mark_ended(directory: str, end: ExitStatus) -> None:
    """Write the end of a run into its record, on behalf of a process that could not.

    Args:
        directory: Directory of the run.
        end: How the run ended.
    """
    path = Path(directory, "run.json")
    with suppress(ValueError, OSError):  # a damaged file, or a full disk
        record = Record(run_dir=directory)
        if path.exists():
            record = Record.load(path)
        record.status = end.status
        record.error = end.reason
        record.save(path)


def _without_nulls(value: Any) -> Any:
    """Drop nulls, so that the fields get their defaults."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return list(map(_without_nulls, value))
    return value


def reaches(reached: int, limit: int | None) -> bool:
    """Return whether a limit is reached; None and negative numbers are no limits."""
    return limit is not None and 0 <= limit <= reached
