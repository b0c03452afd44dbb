"""`verify`: equal trainings pass, and each mistake is named."""

import json
import math
from collections.abc import Sequence
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import QUIET, App, error_of, fork_app, output_of
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, pad_sequence

from app.lab.verify import same_training
from app.lab.verify.causes import Case, Cause, causes
from app.lab.verify.differences import Difference, Recorded, Step, _gradients, differences
from app.lab.verify.proof import Prover, Settings
from app.lab.verify.recording import contents, singles, tensors
from app.lab.verify.verdict import Result, Verdict

CPU = ["--trainer.accelerator", "cpu"]
RECORDING = ["--trainer.callbacks+=app.lab.verify.recording.Recording"]
WAYS = {
    "ddp": ["--trainer.strategy", "ddp_fork", "--trainer.devices", "2"],
    "dp": ["--trainer.strategy", "dp", "--trainer.devices", "2"],
    "accumulation": ["--trainer.accumulate_grad_batches", "2", "--data.batch_size", "4"],
    "ragged": ["--trainer.accumulate_grad_batches", "2", "--data.batch_size", "10"],
}
RECORDED: dict[tuple[str, ...], Recorded] = {}  # recorded references, shared by several tests
REFERENCES = {"ragged": ["--data.batch_size", "20"]}


class Runs:
    """Runs of one training in several variants, compared as `verify` does."""

    def __init__(self, root: Path, model: str, data: str, *flags: str) -> None:
        self.root, self.key = root, (model, data, *flags)
        self.flags = [
            "--model",
            f"faulty_code.{model}",
            "--data",
            f"faulty_code.{data}",
            *CPU,
            *QUIET,
            *flags,
        ]
        sampled = data in ("Stock", "Halved", "OwnBatches", "Repeated")
        self.flags += [
            "--trainer.use_distributed_sampler",
            str(sampled).lower(),
            "--run.test",
            "false",
        ]

    def record(
        self, name: str, *flags: str, steps: int = 16, earlier: Recorded | None = None
    ) -> Recorded:
        recording = [
            *RECORDING,
            f"--trainer.callbacks.steps={steps}",
            "--trainer.callbacks.epoch_steps=8",
        ]
        way = [*self.flags, *flags, *recording, "--run.root", str(self.root), "--run.name", name]
        output_of(*fork_app("fit", *way))
        return Recorded(self.root / name / "version_0", earlier)

    def resumed(self, *flags: str) -> Recorded:
        earlier = self.record("stopped", *flags, steps=4)
        last = self.root / "stopped" / "version_0" / "checkpoints" / "last.ckpt"
        return self.record("resumed", *flags, "--ckpt_path", str(last), earlier=earlier)

    def case(self, way: str, *flags: str) -> tuple[dict[str, Difference], list[Cause]]:
        key = (*self.key, *flags, *REFERENCES.get(way, []))
        if key not in RECORDED:
            RECORDED[key] = self.record(
                "reference", "--trainer.devices", "1", *REFERENCES.get(way, []), *flags
            )
        reference = RECORDED[key]
        recorded = (
            self.resumed(*flags) if way == "resume" else self.record("way", *WAYS[way], *flags)
        )
        differing = differences(reference, recorded)
        return differing, causes(
            Case(reference, recorded, differing, 2 if way in ("ddp", "dp") else 1)
        )


@pytest.mark.parametrize("way", ["ddp", "dp"])
def test_a_right_one(way: str, tmp_path: Path) -> None:
    """A correct training passes for any world size, also with a smaller last batch."""
    assert Runs(tmp_path, "Model", "Data").case(way) == ({}, [])


RATE = ["learning rate"]
FAULTS: list[tuple[str, str, str, Sequence[str], str]] = [
    ("Model", "Stock", "ddp", ["samples", "evaluation"], "the batch size is that of each rank: 16 samples a step, 8 in|"
     "1 of 21 samples are evaluated twice: the shares are padded"),
    ("Model", "Halved", "ddp", ["samples"], "another order: here by DistributedSampler, there by RandomSampler"),
    ("Model", "Repeated", "ddp", ["samples"], "another order: here by DistributedSampler, there by RandomSampler"),
    ("PlainMean", "OwnBatches", "ddp", ["samples"], "a step has 2 samples, 8 in the reference (an epoch has 31"),
    ("Weighted", "Data", "ddp", ["loss"], "the loss of a batch is not the mean over its samples"),
    ("Model", "Unshared", "ddp", ["samples"], "every rank sees all samples: the same 61 in the first epoch on each"),
    ("Model", "SeedOfTheRank", "ddp", ["samples"], "ranks draw their shares from different permutations"),
    ("Model", "NoSetEpoch", "ddp", ["samples"], "every epoch has the same order: the sampler's set_epoch is never"),
    ("Model", "SplitByChance", "ddp", ["evaluation"], "each process draws its own split: "),
    ("Model", "SplitByChance", "dp", ["evaluation"], "each run draws its own split: "),
    ("Model", "Noisy", "ddp", ["samples"], "the same samples with other pixels: augmentation uses the global"),
    ("Model", "DropsLast", "ddp", ["evaluation"], "1 of 21 samples are not evaluated"),
    ("LogsItsOwn", "Data", "ddp", ["evaluation"], "each rank has its own val_loss: logged without sync_dist"),
    ("MeanOfMeans", "Data", "ddp", ["evaluation"], "a mean of the ranks' values, not the value over all samples: "),
    ("ScaledRate", "Data", "ddp", RATE, "the learning rate is 2 times the reference's from the first step on"),
    ("ByEpoch", "Stock", "ddp", RATE, "StepLR advances with each epoch, which has 4 steps, 8 in the reference"),
    ("ByEstimate", "Stock", "ddp", RATE, "its total_steps is 200, 400 in the reference"),
    ("LosesItsSchedule", "Data", "resume", RATE, "the schedule is lost on resume: step 5"),
    ("Normalised", "Data", "ddp", ["loss"], "BatchNorm normalises each replica's part of a batch by itself: net.2"),
    ("Dropping", "Data", "ddp", ["loss"], "dropout (net.1) drawn from torch's global random state"),
    ("Dropping", "Data", "dp", ["loss"], "torch's global random state, which is drawn in another order"),
    ("Dropping", "Data", "resume", ["loss"], "from torch's global random state, whose state is lost on resume"),
    ("Remembers", "Data", "dp", ["loss"], "attributes that forward sets are lost with dp's replicas: mean"),
    ("DriftsOnOneRank", "Data", "ddp", ["loss"], "parameters differ between ranks at the end: net.1.bias were changed"),
    ("CountsItsOwn", "Data", "ddp", ["weights"], "buffers are computed from each rank's own share: seen"),
    ("ClipsTooEarly", "Data", "ddp", ["gradients"], "hooks of parameters change each rank's gradients before"),
    ("PlainMean", "Data", "ddp", ["gradients"], "a mean of means, of unequal shares (3, 2 samples)"),
    ("Sum", "Data", "ddp", ["loss"], "the loss is a sum over a rank's samples: "),
    ("Model", "Data", "accumulation", ["gradients"], "a mean of means, of unequal shares (4, 1 samples)"),
    ("Model", "Data", "ragged", ["gradients"], "the last window of an epoch accumulates 1 of 2 batches, divided as if"),
    ("ByBatch", "Data", "accumulation", RATE, "the learning rate advances with each of the"),
    ("PlainMean", "Stock", "resume", ["samples"], "lost on resume: step 5 repeats those of step 1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "data", "way", "columns", "text"), FAULTS, ids=lambda value: str(value)[:40]
)
def test_a_mistake_is_named(
    model: str, data: str, way: str, columns: Sequence[str], text: str, tmp_path: Path
) -> None:
    differing, reasons = Runs(tmp_path, model, data).case(way)
    assert differing.keys() >= set(columns), differing
    for line in text.split("|"):
        assert any(line in cause.text for cause in reasons), [cause.text for cause in reasons]
    assert all(cause.remedy for cause in reasons)


def test_what_a_callback_loses(tmp_path: Path) -> None:
    """A resumed run lacks a callback's average of the weights, which no checkpoint holds: `verify` names it."""
    differing, reasons = Runs(tmp_path, "Model", "Data").case(
        "resume", "--trainer.callbacks+=faulty_code.Average"
    )
    assert "evaluation" in differing
    assert any(
        cause.text == "state that is in no checkpoint: Average.average" for cause in reasons
    ), reasons


def test_the_same_fault_of_several_ways_is_reported_once() -> None:
    causes = [
        Cause(f"the batch size is that of each rank: {n} samples", "divide it") for n in (16, 32)
    ]
    loss = {"loss": Difference("step 1", "")}
    ways = [
        Result(f"ddp × {2 * n}", [], differences=loss, causes=[cause])
        for n, cause in enumerate(causes, 1)
    ]
    lines = [*Verdict(SimpleNamespace(), [*ways, Result("dp × 2", [], failed="why")]).explained()]  # type: ignore[arg-type]
    assert [line.split(":")[0] for line in lines] == [
        *(
            "ddp × 2",
            "  loss, step 1",
            "  because the batch size is that of each rank",
            "  do      divide it",
        ),
        *("  also    ddp × 4", "dp × 2", "  does not run"),
    ]


def test_samples_and_losses_that_are_not_seen() -> None:
    recorded: Any = SimpleNamespace(steps=[SimpleNamespace(samples=[], loss=math.nan)])
    assert [Result("ddp", [], recorded).cell(column) for column in ("samples", "rate", "loss")] == [
        "—",
        "✓",
        "—",
    ]


def test_a_cause_of_the_evaluation_does_not_explain_the_loss() -> None:
    causes = [
        Cause("each rank has its own val_loss", "self.log(…, sync_dist=True)", changes_loss=False)
    ]
    result = Result("ddp", [], differences={"loss": Difference("step 1", "")}, causes=causes)
    assert "  the cause of the loss is not known" in result.explained()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_runs")
def test_a_variant_with_a_rank_s_batch_size() -> None:
    """Such a variant is not repeated with --run.global_order, because this flag would divide the size again."""
    flags, half = {"trainer.accelerator": "cpu"}, {"trainer.devices": 2, "data.batch_size": 4}
    ways = {"half": {"trainer.strategy": "ddp", **half}}
    outcome = same_training(
        "faulty_code.Model", "faulty_code.Stock", quick=True, steps=4, flags=flags, ways=ways
    )
    assert [result.remedied is None for result in outcome.results] == [False, True, False], repr(
        outcome
    )


def test_a_run_on_one_device_that_failed_stays_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each variant reports the failure of the run on one device, because it would be compared with that run."""
    prover = Prover(Settings(), [], {"data": "Synthetic"}, tmp_path)
    failed = SimpleNamespace(status="failed", error="why", time_limit=None)
    monkeypatch.setattr("app.lab.verify.proof.run_fit", lambda *_: failed)
    assert [
        prover._again(name, {}, {"run.threads": 1})[1].failed for name in ("ddp × 2", "dp × 2")
    ] == ["why", "why"]


RATE_AND_NORM = ["the learning rate is 2 times", "BatchNorm normalises each"]
PIXELS_AND_DROPOUT = ["the same samples with other pixels", "dropout (net.1) drawn from"]
HIDDEN = [
    ("ScaledAndNormalised", "Stock", RATE_AND_NORM, "still different learning rate"),
    ("Dropping", "NoisyStock", PIXELS_AND_DROPOUT, "the same training"),
]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_runs")
@pytest.mark.parametrize(("model", "data", "named", "removed"), HIDDEN)
def test_causes_behind_other_samples(model: str, data: str, named: list[str], removed: str) -> None:
    """An ordinary loader gives both runs different samples, which hides other mistakes.

    `verify` finds these mistakes, because it repeats both runs with the same order of samples.
    """
    flags = {"trainer.accelerator": "cpu", "data.batch_size": 8}
    outcome = same_training(
        f"faulty_code.{model}", f"faulty_code.{data}", quick=True, steps=8, flags=flags
    )
    causes = outcome.results[0].by_effect
    for text in ("the batch size is that of each rank", *named):
        assert any(cause.text.startswith(text) and cause.remedy for cause in causes), repr(outcome)
    effects = [cause.effect or 0.0 for cause in causes]
    assert effects == sorted(effects, reverse=True)
    assert effects[0] > 0
    assert f"  with    --run.global_order true --run.virtual_devices 4: {removed}" in repr(outcome)
    assert max(map(len, repr(outcome).splitlines()[1:5])) < 80


@pytest.mark.slow
def test_bits(app: App, tmp_path: Path) -> None:
    """If an operation differs on rank 1 only, `--bits` names it and its module. If none differs, it names none."""
    flags = [
        *OURS,
        "--quick",
        "--steps",
        "4",
        "--bits",
        "true",
        "--run.virtual_devices",
        "4",
        "--run.threads",
        "1",
    ]
    report, out = verdict(app, tmp_path, *flags, "--model", "faulty_code.Jitters", code=1)
    assert [way["first_operation"] for way in report["ways"]] == [
        "step 1, shard 3: mul in Jitters.network.noise",
        None,
    ]
    report, out = verdict(app, tmp_path, *flags)
    assert "The same bits in all 3 ways of running" in out


# -- the command
# ----------------------------------------------------------------------------------------------------

OURS = [
    "--data",
    "Synthetic",
    "--data.images",
    "203",
    "--data.batch_size",
    "20",
    "--data.flip",
    "true",
]


def verdict(app: App, folder: Path, *flags: str, code: int = 0) -> tuple[dict[str, Any], str]:
    file = folder / "found.json"
    ended, out = app("verify", *CPU, *flags, "--root", folder, "--json", file)
    assert ended == code, out
    return json.loads(file.read_text()), out


def test_a_wrong_gradient_beside_much_larger_ones() -> None:
    norms = {"large.weight": 1000.0, "small.weight": 1.0, "none.bias": 1e-9}
    recorded = {"epoch": 0, "samples": [], "labels": [], "loss": 1.0}
    there = Step(0, [{**recorded, "gradients": norms}])
    for name, value, differs in (("small.weight", 1.01, True), ("none.bias", 3e-9, False)):
        here = Step(0, [{**recorded, "gradients": {**norms, name: value}}])
        assert [place.figures.split()[2] for place in _gradients(here, there, 1e-5)] == [
            name
        ] * differs


@pytest.mark.parametrize("padding", [0, 9])
def test_a_padded_sample_is_the_same_in_any_batch(padding: int) -> None:
    """A sample's id does not depend on its padding. It is the same without padding, in the longest sample of a batch.

    If the padding is not 0, the batch's mask shows where it is.
    """

    def batch(*samples: list[int]) -> dict[str, Tensor]:
        filled = list(map(torch.tensor, samples))
        tokens, labels = (
            pad_sequence(filled, batch_first=True, padding_value=value) for value in (padding, -100)
        )
        return {"tokens": tokens, "mask": (labels != -100).long(), "labels": labels}

    (first, _), _ = contents(None, batch([5, 6], [7, 8, 9]), 0)
    (again, other), _ = contents(None, batch([5, 6], [5, 6, 6, 3, 0, 4]), 0)
    (longest,), _ = contents(None, batch([5, 6]), 0)
    assert first == again == longest != other


def test_samples_of_a_batch_that_is_not_stacked() -> None:
    targets = [{"boxes": torch.rand(1 + i, 4), "label": torch.tensor(i)} for i in range(4)]
    samples = [(torch.rand(3, 8 + i, 8), target) for i, target in enumerate(targets)]
    dicts = [{"image": image, **target} for image, target in samples]
    for batch in (
        tuple(zip(*samples, strict=True)),
        samples,
        dicts,
        {"pixels": torch.rand(4, 3, 9, 9), "of": targets},
    ):
        assert [len(set(ids)) for ids in contents(None, batch, 0)] == [4, 4]
        assert [len(singles(single)) for single in singles(batch)] == [1] * 4
    assert (
        len(
            tensors(
                [
                    pack_sequence(targets[0]["boxes"]),
                    make_dataclass("Rows", ["x"], frozen=True)(samples),
                ]
            )
        )
        == 14
    )


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
def test_every_way(app: App, tmp_path: Path) -> None:
    """Every variant passes, except an added one whose global batch is half of the reference's."""
    (tmp_path / "ways.yaml").write_text(
        "half the batch: {data.batch_size: 10, trainer.devices: 1}\n"
    )
    report, out = verdict(
        app, tmp_path, *OURS, "--ways", str(tmp_path / "ways.yaml"), "--steps", "20", code=1
    )
    same = {way["name"]: way["same"] for way in report["ways"]}
    assert same.pop("half the batch") is False, out
    assert len(same) == 7, out
    assert all(same.values()), out
    assert "Not the same training as on one device: half the batch." in out
    page = (tmp_path / "verify" / "version_0" / "report.html").read_text()
    assert "<h1>Not the same training as on one device: half the batch.</h1>" in page
    assert page.count("<svg") == page.count("aria-label=") == 2
    assert "src=" not in page, "it needs no other file"


@pytest.mark.slow
def test_the_mlp(app: App, tmp_path: Path) -> None:
    """The MLP passes with Adam, a schedule, augmentation, and unequal shares in evaluation."""
    flags = [
        "--model",
        "FashionMLP",
        "--model.repeats",
        "1",
        "--model.scheduler",
        "StepLR",
        "--data",
        "Synthetic",
    ]
    flags += [
        "--model.scheduler.step_size",
        "1",
        "--data.like",
        "FashionMNIST",
        "--data.crop_padding",
        "2",
    ]
    report, out = verdict(app, tmp_path, *flags, *OURS[2:], "--quick", "true", "--steps", "20")
    assert [way["same"] for way in report["ways"]] == [True, True], out
    assert not any(way["rounding"] for way in report["ways"])


@pytest.mark.slow
def test_rounding_is_proven(app: App, tmp_path: Path) -> None:
    """A difference by rounding, which a high learning rate amplifies, is accepted, because it vanishes in float64."""
    flags = ["--model.optimizer", "Adam", "--model.optimizer.lr", "0.01", "--data.images", "403"]
    flags += ["--quick", "true", "--steps", "60"]
    report, out = verdict(app, tmp_path, *OURS, *flags)
    way = report["ways"][0]
    assert way["rounding"], out
    assert 0 < way["in_float64"] < 1e-10
    assert way["same"]
    assert "rounding (" in out


REFUSED = [
    (["--steps", "3"], "--steps 3: give 4 or more"),
    (["--trainer.devices", "2"], "--trainer.devices is a flag of the variants: leave it out"),
    (["--run.root", "x"], "run.root is set by verify itself"),
    (["--ways", "none.yaml"], "--ways none.yaml: there is no such file"),
    (
        ["--trainer.callbacks+=X", "--trainer.callbacks+=Y"],
        "--trainer.callbacks+= is given twice: put the list into",
    ),
    (["--nonsense", "1"], "--nonsense: there is no such flag"),
    (["--model", "no.Such"], "--model no.Such: No module named 'no'"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_what_cannot_be(flags: list[str], message: str, app: App, tmp_path: Path) -> None:
    assert message in error_of(*app("verify", *OURS, *flags))
    assert not list(tmp_path.rglob("version_*"))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_runs")
def test_in_a_test_of_ones_own() -> None:
    """`same_training` works in a user's own test, and shows Lightning's message about a variant that does not run."""
    flags = {"trainer.use_distributed_sampler": "false", "trainer.accelerator": "cpu"}
    outcome = same_training(
        "faulty_code.PartlyUsed", "faulty_code.Data", quick=True, steps=8, flags=flags
    )
    assert not outcome
    assert "ddp_find_unused_parameters_true" in repr(outcome)
    assert (
        "Not the same training as on one device: ddp × 2, in the first 4 of 8 batches of an epoch."
        in repr(outcome)
    )
