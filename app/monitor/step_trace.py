"""Trace of some steps for each rank, and the bottleneck: `--profile`."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import PassThroughProfiler
from rich.table import Column, Table
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from app.launch.agree import gather_objects
from app.monitor.step_clock import StepClock
from app.record import Profile, ProfiledRank
from app.system.torch_patches import all_threads

OPERATIONS = ("aten::", "autograd::", "c10d::", "gloo:", "record_param_comms")  # on a CPU; all else is Python
SHARES = ("data", "forward", "backward", "communication", "optimizer", "rest")
# a remedy for the largest share, on a GPU and on a CPU
REMEDIES = {
    "host": ("--model.cuda_graph true, or a larger --data.batch_size", "a larger --data.batch_size"),
    "data": ("--data.placement device", "--data.placement memory, or more --data.num_workers"),
    "communication": (
        "--trainer.strategy ddp_bf16, or a larger --data.batch_size",
        "--trainer.strategy dp, fewer --trainer.devices, or a larger --data.batch_size",
    ),
    "device": (
        "--trainer.precision bf16-mixed, --model.channels_last true or --model.compile default",
        "--model.compile default, or more cores (OMP_NUM_THREADS)",
    ),
}


class StepTrace(Callback):
    """Traces 8 steps of every rank with torch's profiler, after `StepClock` has timed its own.

    The trace is `trace_rankN.json.gz` in the run's directory, for https://ui.perfetto.dev; the parts of a step are
    marked in it.

    Attributes:
        rows: After training, each rank's phases, the share of a step without an operation, and the trace's file.
    """

    steps = 8

    def __init__(self) -> None:
        self.rows: list[ProfiledRank] = []
        self._seen = 0
        self._profile: profile | None = None
        self._idle: float | None = None
        self._file: str | None = None
        self._ended_now = False

    @property
    def timing(self) -> bool:
        """Whether tracing has disturbed the step that ends now."""
        return self._profile is not None or self._ended_now

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begin after the steps that are timed, and end 8 steps later."""
        self._seen += 1
        self._ended_now = False
        first = StepClock.skipped + StepClock.window + 1
        if self._seen == first:
            cuda = trainer.strategy.root_device.type == "cuda"
            activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * cuda]
            self._profile = profile(activities=activities, acc_events=True, experimental_config=all_threads())
            self._before, trainer.profiler = trainer.profiler, _Marks()  # type: ignore[attr-defined]
            self._profile.start()
        elif self._seen == first + self.steps:
            self._end(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End before a validation, which is no step."""
        self._end(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather all ranks' results. Collective."""
        self._end(trainer)
        timed = next((c.time_per_step for c in trainer.callbacks if isinstance(c, StepClock)), None)  # type: ignore[attr-defined]
        phases = vars(timed) if timed else {}
        self.rows = gather_objects(ProfiledRank(**phases, rank=trainer.global_rank, host=self._idle, trace=self._file))

    def _end(self, trainer: Trainer) -> None:
        if self._profile is None:
            return
        trace, self._profile, self._ended_now = self._profile, None, True
        trainer.profiler = self._before  # type: ignore[attr-defined]
        trace.stop()
        directory = trainer.strategy.broadcast(trainer.log_dir)
        assert directory is not None
        Path(directory).mkdir(parents=True, exist_ok=True)  # of another node, where it is not shared
        self._file = str(Path(directory, f"trace_rank{trainer.global_rank}.json.gz"))
        trace.export_chrome_trace(self._file)
        events = trace.events() or []
        kind = DeviceType.CUDA if any(event.device_type == DeviceType.CUDA for event in events) else DeviceType.CPU
        marks = [event.time_range for event in events if event.name == _Marks.STEP]
        if marks:
            begins, ends = marks[0].start, max(mark.end for mark in marks)
            work = (
                (event.time_range.start, event.time_range.end)
                for event in events
                if event.device_type == kind and (kind == DeviceType.CUDA or event.name.startswith(OPERATIONS))
            )
            self._idle = round(1 - _covered(work, begins, ends) / (ends - begins), 4)


class _Marks(PassThroughProfiler):
    """Marks the parts of a step in the trace, each with the name that Lightning's profilers know it by."""

    STEP = "step: training_step"

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[str, record_function] = {}

    def start(self, action_name: str) -> None:
        self._open[action_name] = mark = record_function(f"step: {action_name.rsplit('.', 1)[-1]}")
        mark.__enter__()

    def stop(self, action_name: str) -> None:
        self._open.pop(action_name).__exit__(None, None, None)


def _covered(intervals: Iterable[tuple[float, float]], begins: float, ends: float) -> float:
    """Return the total length that intervals cover between two times."""
    total, until = 0.0, begins
    for start, end in sorted(intervals):
        start, end = max(start, until), min(end, ends)
        if end > start:
            total, until = total + end - start, end
    return total


def profile_table(rows: Sequence[ProfiledRank]) -> Table:
    """Make a table with each rank's milliseconds per phase, and the host's share without any operation."""
    names = [*("comm." if name == "communication" else name for name in SHARES), "host"]
    title = "milliseconds of a step; host: share without any operation"
    table = Table("rank", *(Column(name, justify="right") for name in names), title=title)
    for row in rows:
        idle = "" if row.host is None else f"{row.host:.0%}"
        table.add_row(str(row.rank), *(f"{getattr(row, name):.2f}" if row.n else "" for name in SHARES), idle)
    return table


def limit(rows: Sequence[ProfiledRank], cuda: bool) -> str:
    """Name the bottleneck of a run and a remedy, in one sentence.

    Args:
        rows: `StepTrace.rows`.
        cuda: Whether the run was on a GPU.
    """
    known = [row for row in rows if row.n]
    if not known:
        return "training was too short for --profile: it looks at the steps 6 to 34"
    slowest = max(known, key=lambda row: row.step - row.communication)
    shares = {"data": slowest.data / slowest.step, "communication": slowest.communication / slowest.step}
    shares["host"] = slowest.host or 0.0
    name = max(shares, key=lambda key: shares[key])
    said = {
        "host": "Python: no operation runs meanwhile",
        "data": "the data: reading, moving and augmenting a batch",
        "communication": "waiting for the other ranks",
    }
    of = f" of rank {slowest.rank}" if len(rows) > 1 else ""
    if shares[name] < 1 / 3:
        return f"the device limits the run: it computes for most of a step{of}; try {REMEDIES['device'][not cuda]}"
    return f"{shares[name]:.0%} of a step{of} is {said[name]}; try {REMEDIES[name][not cuda]}"


def profile_lines(profiled: Profile) -> Iterator[str]:
    """Write the lines below the table of a profiled run."""
    yield f"limited by      {profiled.limit}"
    files = [row.trace for row in profiled.ranks if row.trace]
    if files:
        yield f"traces          {', '.join(files)}: open them at https://ui.perfetto.dev"
