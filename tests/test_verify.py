"""`verify`: equal trainings pass, and each mistake is named."""

import json
import math
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from forked import fork_app
from harness import QUIET, SLOW, options, slow
from torch.nn.utils.rnn import pack_sequence, pad_sequence

from app.lab.verify import same_training
from app.lab.verify.causes import Case, Cause, causes
from app.lab.verify.differences import EXACT, Difference, Recorded, differences, effect, first_bits
from app.lab.verify.proof import Prover, Settings
from app.lab.verify.recording import FOLDER, contents, singles, tensors
from app.lab.verify.verdict import Result, Verdict

VARIANTS = {
    "ddp": ["--trainer.strategy=ddp_fork", "--trainer.devices=2"],
    "dp": ["--trainer.strategy=dp", "--trainer.devices=2"],
    "accumulation": ["--trainer.accumulate_grad_batches=2", "--data.batch_size=4"],
    "ragged": ["--trainer.accumulate_grad_batches=2", "--data.batch_size=10"],
}
CPU = {"trainer.accelerator": "cpu"}
RECORDED = {}  # recorded references, shared by several tests


class Runs:
    """Runs of one training in several variants, compared as `verify` does."""

    def __init__(self, root: Path, model: str, data: str, *flags: str):
        self.root = root
        self.flags = [f"--model=faulty_code.{model}", f"--data=faulty_code.{data}", *flags]
        sampled = data in ("Stock", "Halved", "OwnBatches", "Repeated")  # by Lightning's sampler
        self.flags += options(accelerator="cpu", use_distributed_sampler=sampled, test=False)
        self.flags += options(loader="lightning", on_divergence="warn")

    def record(self, name, *flags, steps=16, earlier=None):
        recording = [
            "--trainer.callbacks+=app.lab.verify.recording.Recording",
            f"--trainer.callbacks.steps={steps}",
            "--trainer.callbacks.epoch_steps=8",
        ]
        place = options(root=self.root, name=name)
        fork_app("fit", *QUIET, *self.flags, *flags, *recording, *place)
        return Recorded(self.root / name / "version_0", earlier)

    def resumed(self):
        earlier = self.record("stopped", steps=4)
        last = self.root / "stopped/version_0/checkpoints/last.ckpt"
        return self.record("resumed", f"--ckpt_path={last}", earlier=earlier)

    def case(self, variant):
        alone = ["--trainer.devices=1"]
        if variant == "ragged":
            alone += ["--data.batch_size=20"]
        key = (*self.flags, *alone)
        if key not in RECORDED:
            RECORDED[key] = self.record("reference", *alone)
        recorded = (
            self.resumed() if variant == "resume" else self.record("variant", *VARIANTS[variant])
        )
        replicas = 2 if variant in ("ddp", "dp") else 1
        differing = differences(RECORDED[key], recorded)
        return differing, causes(Case(RECORDED[key], recorded, differing, replicas))


@pytest.mark.parametrize("variant", ["ddp", "dp"])
def test_correct_training_passes(variant, tmp_path):
    """The last batch is smaller, and the shares have unequal sizes."""
    assert Runs(tmp_path, "Model", "Data").case(variant) == ({}, [])


# model, data and variant, with a part of the cause
FAULTS = {
    "Model Stock ddp": "that of each rank: 16 samples a step, 8 in",
    "Model Halved ddp": "1 of 21 samples are evaluated twice: the shares are padded",
    "Model Repeated ddp": "here by DistributedSampler, there by RandomSampler",
    "PlainMean OwnBatches ddp": "2 samples a step, 8 in the reference",
    "Weighted Data ddp": "the loss of a batch is not the mean over its samples",
    "Model Unshared ddp": "all samples: the same 61 in the first epoch on",
    "Model SeedOfTheRank ddp": "draw their shares from different permutations",
    "Model NoSetEpoch ddp": "the same order: the sampler's set_epoch is never",
    "Model SplitByChance ddp": "each process draws its own split: ",
    "Model SplitByChance dp": "each process draws its own split: ",
    "Model Noisy ddp": "other pixels: augmentation uses the global",
    "Model DropsLast ddp": "1 of 21 samples are not evaluated",
    "LogsItsOwn Data ddp": "has its own val_loss: logged without sync_dist",
    "MeanOfMeans Data ddp": "of the ranks' values, not the value over all",
    "ScaledRate Data ddp": "is 2 times the reference's from the first step on",
    "ByEpoch Stock ddp": "StepLR advances with each epoch, which has 4 steps, 8",
    "ByEstimate Stock ddp": "its total_steps is 200, 400 in the reference",
    "LosesItsSchedule Data resume": "the schedule is lost on resume: step 5",
    "Normalised Data ddp": "each replica's part of a batch by itself: net.2",
    "Dropping Data ddp": "dropout (net.1) drawn from torch's global random state",
    "Dropping Data dp": "dropout (net.1) drawn from torch's global random state",
    "Dropping Data resume": "dropout (net.1) drawn from torch's global random state",
    "Remembers Data dp": "that forward sets are lost with dp's replicas: mean",
    "DriftsOnOneRank Data ddp": "differ between ranks at the end: net.1.bias were",
    "CountsItsOwn Data ddp": "computed from each rank's own share: seen",
    "ClipsTooEarly Data ddp": "parameters change each rank's gradients",
    "PlainMean Data ddp": "a mean of means, of unequal shares (3, 2 samples)",
    "Sum Data ddp": "the loss is a sum over a rank's samples: ",
    "Model Data accumulation": "of unequal shares (4, 1 samples)",
    "Model Data ragged": "of an epoch accumulates 1 of 2 batches",
    "ByBatch Data accumulation": "the learning rate advances with each of the",
    "PlainMean Stock resume": "of samples is lost on resume, from step 5 on",
}


CASES = [slow(fault) if fault.endswith("ddp") else fault for fault in FAULTS]


@pytest.mark.parametrize("fault", CASES)
def test_mistake_is_named_with_its_remedy(fault, tmp_path):
    model, data, variant = fault.split()
    reasons = Runs(tmp_path, model, data).case(variant)[1]
    assert FAULTS[fault] in "\n".join(cause.text for cause in reasons)
    assert all(cause.remedy for cause in reasons)


def test_callback_state_that_no_checkpoint_holds_is_named(tmp_path):
    average = "--trainer.callbacks+=faulty_code.Average"
    differing, reasons = Runs(tmp_path, "Model", "Data", average).case("resume")
    assert "evaluation" in differing
    assert "state that is in no checkpoint: Average.average" in [cause.text for cause in reasons]


def test_fault_of_several_variants_is_reported_once():
    loss = {"loss": Difference("step 1", "")}
    two = Cause("the batch size is that of each rank: 16 samples", "divide it")
    four = Cause("the batch size is that of each rank: 32 samples", "divide it")
    results = [
        Result("ddp × 2", [], differences=loss, causes=[two]),
        Result("ddp × 4", [], differences=loss, causes=[four]),
        Result("dp × 2", [], failed="why"),
    ]
    verdict = Verdict(SimpleNamespace(), results)
    assert list(verdict.explained()) == [
        "ddp × 2",
        "  loss, step 1: ",
        f"  because {two.text}",
        "  do      divide it",
        "  also    ddp × 4",
        "dp × 2",
        "  does not run: why",
    ]


def test_cause_of_the_evaluation_does_not_explain_the_loss():
    cause = Cause("each rank has its own val_loss", "log it", changes_loss=False)
    result = Result("ddp", [], differences={"loss": Difference("step 1", "")}, causes=[cause])
    assert "  the cause of the loss is not known" in result.explained()


@SLOW
@pytest.mark.usefixtures("forked_runs")
def test_variant_with_its_own_batch_size_keeps_it():
    """The other variants have the batch of one device, by --run.global_batch."""
    half = {"trainer.strategy": "ddp", "trainer.devices": 2, "data.batch_size": 4}
    outcome = same_training(
        "faulty_code.Model",
        "faulty_code.Stock",
        quick=True,
        steps=4,
        flags=CPU,
        variants={"half": half},
    )
    assert outcome, repr(outcome)
    assert [result.per_rank for result in outcome.results] == [16, 8, 8]
    assert "with --run.global_batch 8: without it, the DataLoader's batch is that of" in repr(
        outcome
    )


def test_failed_reference_fails_each_variant(tmp_path, monkeypatch):
    prover = Prover(Settings(), [], {"data": "Synthetic"}, tmp_path)
    failed = SimpleNamespace(status="failed", error="why", time_limit=None, wall_s=1.0)
    monkeypatch.setattr("app.lab.verify.proof.run_fit", lambda *_: failed)
    for name in ("ddp × 2", "dp × 2"):
        assert prover._run(name, {"run.threads": 1}).failed == "why"


BATCHNORM = "BatchNorm normalises each replica's part"
NAMED = {  # model and data: the causes in ddp × 2
    "PlainMean Stock": [],  # the batch of a rank
    "Normalised Stock": [BATCHNORM],
    "Normalised Halved": [BATCHNORM],
    "PlainMean Hidden": [],  # no samples are seen
    "Model NoisyStock": ["the same samples with other pixels"],
    "ScaledRate Stock": ["the learning rate is 2 times the reference's"],
    "DriftsOnOneRank Stock": ["parameters differ between ranks at the end: net.1.bias"],
    "Model Padded": ["1 of 21 samples are evaluated twice"],
    "ScaledAndNormalised Stock": ["the learning rate is 2 times the reference's", BATCHNORM],
    "Dropping NoisyStock": ["dropout (net.1) drawn from", "the same samples with other pixels"],
}


@SLOW
@pytest.mark.usefixtures("forked_runs")
@pytest.mark.parametrize("names", NAMED)
def test_each_mistake_in_a_users_code_is_named_and_only_it(names):
    """The reference's samples are dealt to any loader, so they hide no other cause."""
    model, data = names.split()
    outcome = same_training(
        f"faulty_code.{model}", f"faulty_code.{data}", quick=True, steps=8, flags=CPU
    )
    causes = outcome.results[0].causes
    assert len(causes) == len(NAMED[names]), repr(outcome)
    for text in NAMED[names]:
        assert any(cause.text.startswith(text) for cause in causes), repr(outcome)
    effects = [cause.effect or 0.0 for cause in causes]
    assert effects == sorted(effects, reverse=True)
    assert ("with --run.global_batch 8" in outcome.conclusion) == (data != "Halved")


OURS = ["--data=Synthetic", *options(images=203, batch_size=20, flip=True)]


@SLOW
def test_first_module_with_different_bits_is_named(app, tmp_path):
    flags = [*OURS, *options(virtual_devices=4, threads=1)]
    flags += ["--quick", "--steps=4", "--bits=true"]
    report, out = verdict(app, tmp_path, *flags, "--model=faulty_code.Jitters", code=1)
    outputs = [variant["first_bits"] for variant in report["variants"]]
    assert outputs == ["step 1: the output of Jitters.network.noise", None]
    report, out = verdict(app, tmp_path, *flags)
    assert "The same bits in all 3 variants" in out


def verdict(app, folder, *flags, code=0):
    file = folder / "found.json"
    ended, out = app.run(
        "verify", "--trainer.accelerator=cpu", *flags, "--root", folder, "--json", file
    )
    assert ended == code, out
    return json.loads(file.read_text()), out


NORMS = {"w": 1000.0, "small": 1.0, "none": 1e-9, "overflow": math.inf}
STEP = {
    "epoch": 0,
    "samples": [["a", "b"]],
    "labels": [],
    "counts": [2],
    "losses": [1.0],
    "loss": 1.0,
    "rates": [1e-6],
    "gradients": NORMS,
}
RANK = {
    "weighs": False,
    "steps": [STEP, STEP],
    "evaluation": ["v", "w"],
    "metrics": {"acc": 0.5},
    "attributes": {},
    "optimizers": {"momentum": 0.9},
    "digests": {"w": 1},
    "weights": {"w": torch.tensor([1.0, 4.0])},
    "parameters": ["w"],
}


def second(**values):
    """Return a rank's facts with a change of its second step."""
    return RANK | {"steps": [STEP, STEP | values]}


CHANGES = [  # rank, its facts, and differences
    (0, RANK, {}),
    (1, RANK | {"steps": [STEP]}, {"samples": "end: 1 steps, 2 in the reference"}),
    (
        1,
        second(samples=[["a", "c"]]),
        {"samples": "step 2: 4 samples, 3 of them among the 4 of the reference"},
    ),
    (
        0,
        second(rates=[1.00001e-6]),
        {"learning rate": "step 2: learning rate of group 0 1.00001e-06, 1e-06 in the reference"},
    ),
    (1, second(loss=3.0), {"loss": "step 2: 2, 1 in the reference"}),
    (1, second(loss=math.nan), {"loss": "step 2: nan, 1 in the reference"}),
    (0, second(gradients=NORMS | {"none": 3e-9}), {}),
    (
        0,
        second(gradients=NORMS | {"small": 1.01}),
        {"gradients": "step 2: norm of small 1.01, 1 in the reference"},
    ),
    (
        0,
        RANK | {"weights": {"w": torch.tensor([1.0015, 4.0])}},
        {"weights": "w: differs by up to 0.0015"},
    ),
    (1, RANK | {"digests": {"w": 2}}, {"weights": "w: differs between ranks"}),
    (
        1,
        RANK | {"evaluation": ["v", "w", "w"]},
        {"evaluation": "samples: 1 samples too many, 0 too few, of 4"},
    ),
    (
        1,
        RANK | {"metrics": {"acc": 0.5015}},
        {"evaluation": "rank 1: acc 0.5015, 0.5 in the reference"},
    ),
    (0, RANK | {"metrics": {"acc": 0.500008}}, {}),
    (
        0,
        RANK | {"metrics": {"acc": 0.500012}},
        {"evaluation": "rank 0: acc 0.500012, 0.5 in the reference"},
    ),
    (
        0,
        RANK | {"optimizers": {"momentum": 0.8}},
        {"optimizer": "rank 0: momentum 0.8, 0.9 in the reference"},
    ),
]


def recorded(folder, *ranks):
    """Return the recording of a run from the facts of its ranks."""
    (folder / FOLDER).mkdir(parents=True)
    for rank, facts in enumerate(ranks):
        torch.save(facts, folder / FOLDER / f"rank_{rank}.pt")
    return Recorded(folder)


@pytest.mark.parametrize(("rank", "facts", "expected"), CHANGES)
def test_differences_by_hand(rank, facts, expected, tmp_path):
    ranks = [RANK, RANK]
    reference = recorded(tmp_path / "reference", *ranks)
    ranks[rank] = facts
    found = differences(reference, recorded(tmp_path / "variant", *ranks))
    assert reference.first_epoch == {"a": 4, "b": 4}
    assert {column: str(place) for column, place in found.items()} == expected


@pytest.mark.parametrize(("weight", "differs"), [(1 + 1e-9, True), (1 + 1e-11, False)])
def test_rounding_in_float64(weight, differs, tmp_path):
    runs = []
    for value in (1.0, weight):
        weights = torch.tensor([value], dtype=torch.float64)
        runs.append(recorded(tmp_path / str(value), RANK | {"weights": {"w": weights}}))
    assert ("weights" in differences(*runs, EXACT)) == differs


def test_effect_by_hand():
    """The largest difference of the losses of common steps."""
    runs = [SimpleNamespace(losses=pd.Series(losses)) for losses in ([3.0, 5.0, 9.0], [4.0, 3.0])]
    assert effect(*runs) == 2
    runs[0].losses[1] = math.nan
    assert effect(*runs) == math.inf


@pytest.mark.parametrize(("norm", "differs"), [(0.8e-8, False), (1.2e-8, True)])
def test_gradients_of_zero(norm, differs, tmp_path):
    """If all are 0, the tolerance is that of a norm of 1."""
    runs = []
    for value in (0.0, norm):
        step = STEP | {"gradients": {"w": value}}
        runs.append(recorded(tmp_path / str(value), RANK | {"steps": [step]}))
    assert ("gradients" in differences(*runs)) == differs


@pytest.mark.parametrize(
    ("steps", "column", "has"),
    [
        ([], "gradients", False),
        ([STEP | {"samples": [[]]}], "samples", False),
        ([STEP | {"samples": [[]]}], "gradients", True),
        ([STEP], "samples", True),
        ([STEP], "loss", True),
        ([STEP | {"loss": math.nan}], "loss", False),
    ],
)
def test_recorded_columns(steps, column, has, tmp_path):
    assert recorded(tmp_path, RANK | {"steps": steps}).has(column) == has


def test_first_different_bits_by_hand():
    def run(*ranks):
        step = SimpleNamespace(ranks=[{"bits": bits} for bits in ranks])
        return SimpleNamespace(steps=[step])

    reference = run({"a": ["1", "2"], "b": ["3"]})
    assert first_bits(reference, run({"a": ["2"]}, {"a": ["1"], "b": ["4"]})) == "step 1: the b"
    assert first_bits(reference, SimpleNamespace(steps=[])) is None
    # modules that run less often have no counterpart
    assert first_bits(reference, run({"a": ["1"], "b": ["3"]})) is None


@pytest.mark.parametrize("padding", [0, 9])
def test_id_of_a_sample_does_not_depend_on_its_padding(padding):
    """If the padding is not 0, the batch's mask shows where it is."""

    def batch(*samples):
        filled = list(map(torch.tensor, samples))
        tokens = pad_sequence(filled, batch_first=True, padding_value=padding)
        labels = pad_sequence(filled, batch_first=True, padding_value=-100)
        return {"tokens": tokens, "mask": (labels != -100).long(), "labels": labels}

    (first, _), _ = contents(None, batch([5, 6], [7, 8, 9]), 0)
    (again, other), _ = contents(None, batch([5, 6], [5, 6, 6, 3, 0, 4]), 0)
    (longest,), _ = contents(None, batch([5, 6]), 0)
    assert first == again == longest != other


def test_unstacked_batch_is_cut_into_samples():
    targets = []
    samples = []
    dicts = []
    for i in range(4):
        target = {"boxes": torch.rand(1 + i, 4), "label": torch.tensor(i)}
        image = torch.rand(3, 8 + i, 8)
        targets.append(target)
        samples.append((image, target))
        dicts.append({"image": image, **target})
    columns = tuple(zip(*samples, strict=True))
    half_stacked = {"pixels": torch.rand(4, 3, 9, 9), "of": targets}
    for batch in (columns, samples, dicts, half_stacked):
        ids, labels = contents(None, batch, 0)
        assert len(set(ids)) == len(set(labels)) == 4
        for single in singles(batch):
            assert len(singles(single)) == 1
    packed = pack_sequence(targets[0]["boxes"])
    rows = make_dataclass("Rows", ["x"], frozen=True)(samples)
    assert len(tensors([packed, rows])) == 14


@SLOW
@pytest.mark.usefixtures("drawn")
def test_every_variant_passes_but_one_with_half_the_batch(app, tmp_path):
    file = tmp_path / "variants.yaml"
    file.write_text("half the batch: {data.batch_size: 10, trainer.devices: 1}\n")
    flags = [*OURS, f"--variants={file}", "--steps=20"]
    report, out = verdict(app, tmp_path, *flags, code=1)
    different = [variant["name"] for variant in report["variants"] if not variant["same"]]
    assert different == ["half the batch"], out
    assert len(report["variants"]) == 8, out
    conclusion = "Not the same training as on one device: half the batch."
    assert conclusion in out
    page = (tmp_path / "verify/version_0/report.html").read_text()
    assert f"<h1>{conclusion}</h1>" in page
    assert page.count("<svg") == page.count("aria-label=") == 2
    assert "src=" not in page, "it needs no other file"


@SLOW
def test_rounding_is_proven_in_float64(app, tmp_path):
    """A high learning rate amplifies the rounding."""
    flags = ["--model.optimizer=Adam", "--model.optimizer.lr=0.01", *OURS]
    flags += ["--data.images=403", "--quick=true", "--steps=60"]
    report, out = verdict(app, tmp_path, *flags)
    variant = report["variants"][0]
    assert variant["rounding"], out
    assert 0 < variant["in_float64"] < 1e-10
    assert variant["same"]
    assert "rounding (" in out


REFUSED = [
    (["--steps=3"], "--steps 3: give 4 or more"),
    (["--trainer.devices=2"], "--trainer.devices is set by verify itself: leave it out, or"),
    (["--run.root=x"], "run.root is set by verify itself"),
    (["--variants=none.yaml"], "--variants none.yaml: there is no such file"),
    (
        ["--trainer.callbacks+=X", "--trainer.callbacks+=Y"],
        "--trainer.callbacks+= is given twice: put the list into",
    ),
    (["--model=no.Such"], "--model no.Such: No module named 'no'"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_impossible_flags_are_rejected_before_a_run(flags, message, app, tmp_path):
    assert message in app.error("verify", *OURS, *flags)
    assert not list(tmp_path.rglob("version_*"))


@SLOW
@pytest.mark.usefixtures("forked_runs")
def test_same_training_shows_why_a_variant_does_not_run():
    flags = CPU | {"trainer.use_distributed_sampler": "false"}
    outcome = same_training(
        "faulty_code.PartlyUsed", "faulty_code.Data", quick=True, steps=8, flags=flags
    )
    assert not outcome
    text = repr(outcome)
    assert "ddp_find_unused_parameters_true" in text
    assert "on one device: ddp × 2, in the first 4 of 8 batches of an epoch." in text
