"""Advice of `compare`, on made-up results with known answers."""

from math import nan

import pandas as pd
import pytest
from jsonargparse import Namespace

from app.lab.compare.advice import ACCURACY, BUSY, verdict
from app.lab.compare.results import COLUMNS, tabulate
from app.lab.compare.runner import Outcome
from app.lab.variant import Variant
from app.record import DataSet, DeviceMemory, Epoch, Record, Throughput


def made_up(*rows):
    """Return a table of results from rows of some columns, as if each row came from three runs.

    The runs' samples/s differ from the row's `samples_per_s` by at most the fraction `spread`, by
    default 0.01.
    """
    fixed = {
        "threads": 1,
        "n": 3,
        "global_batch": 64,
        "accelerator": "cuda",
        "placement": "memory",
        "others_cores": 0.0,
        "memory_main_percent": 10.0,
        "memory_others_percent": float("nan"),
        "data_ms": 1.0,
        "communication_ms": 1.0,
        "optimizer_ms": 1.0,
        "rest_ms": 0.5,
        "forward_backward_ms": 20.0,
        "launch_ms": 10.0,
    }
    table = []
    for row in rows:
        rate = row["samples_per_s"]
        spread = row.get("spread", 0.01)
        ends = {"samples_per_s_min": rate * (1 - spread), "samples_per_s_max": rate * (1 + spread)}
        table.append(fixed | ends | {"replicas": row["devices"]} | row)
    return pd.DataFrame(table, columns=COLUMNS)


def judged(*rows, cores=4, usable=4):
    """Return the verdict on rows; the first is the baseline."""
    return verdict(made_up(*rows), str(rows[0]["variant"]), cores, usable)


def told(*rows):
    result = judged(*rows)
    return "\n".join([result.conclusion, *result.cautions, *result.advice])


ONE = {"variant": "one", "devices": 1, "samples_per_s": 1000.0}
FOUR = {"variant": "four", "devices": 4, "samples_per_s": 3600.0}


def test_advice_names_the_fastest():
    """The conclusion has its lead over the baseline, or else over the second."""
    middle = FOUR | {"variant": "two", "samples_per_s": 2000.0}
    for rows in ((ONE, middle, FOUR), (FOUR | {"n": 2}, ONE | {"n": 2})):
        assert judged(*rows).conclusion.endswith(", 3.60 times as fast as one")
    text = told(ONE, FOUR)
    assert text.startswith("four is the fastest: 3,600 samples/s, 3.60 times as fast as one\n")
    assert (
        "**Take four**: it is 3.60 times as fast as one, more than the spread of its runs." in text
    )


@pytest.mark.parametrize("spread", [0.1, 0.03])
def test_no_verdict_from_runs_that_overlap(spread):
    """Variants tie if their ranges overlap, or their medians differ by less than one range."""
    text = told(ONE, FOUR | {"samples_per_s": 1050.0, "spread": spread})
    assert text.startswith(
        "No winner: 2 variants are as fast as each other, within the spread of their runs\n"
    )
    assert "**Take one**: it is as fast as any, on 1 of the 4 devices that others take." in text
    assert "the fastest" not in text
    assert "that others take" not in told(FOUR, FOUR | {"variant": "other"})


def test_images_of_an_accuracy_are_told_only_with_it():
    assert "measure" not in told(ONE | {"val_images": 9.0}, FOUR)


def test_no_verdict_from_single_runs():
    text = told(ONE | {"n": 1}, FOUR | {"n": 1})
    assert text.startswith("four was the fastest, in a single run of each: 3,600 samples/s\n")
    assert "a single run of each does not tell a difference from chance. Give `--repeats 3`" in text
    near = FOUR | {"samples_per_s": 1001.0, "n": 1}
    assert judged(ONE | {"n": 1}, near).places == {"four": 1, "one": 2}


def test_variants_that_tie_share_the_first_place():
    """Variants that are as fast as the fastest share the first place."""
    near = FOUR | {"variant": "near", "samples_per_s": 3590.0, "n": 2}
    touching = ONE | {"samples_per_s_max": 3564.0, "n": 1}  # the slowest run of `four`
    assert judged(ONE, FOUR | {"n": 1}, near).places == {"four": 1, "near": 1, "one": 3}
    assert judged(touching, FOUR | {"n": 2}).places == {"four": 1, "one": 1}


CPU = {"accelerator": "cpu", "threads": 4}


def test_machine_is_busy_if_its_cores_do_not_suffice():
    message = "The machine was busy: other programs took up to 1.5 of its 4 cores"
    assert f"**{message}.**" in told(FOUR, ONE | CPU | {"threads": 1, "others_cores": 1.5})
    assert judged(FOUR, ONE | CPU | {"others_cores": 1.5}).conclusion == message
    for others, cores, usable in ((0.3, 4, 4), (20.0, 64, 8)):  # cores enough for both
        free = judged(FOUR, ONE | {"others_cores": others}, cores=cores, usable=usable)
        assert not free.cautions
    enough = 4 - (1 - BUSY) * 4
    assert not judged(FOUR, ONE | {"others_cores": enough}).cautions


LOADS = [
    (0.0, 1, False),
    # without the other programs, `slow` would be at most twice as fast; FOUR is 3.6 times as fast
    (0.5, 1, False),
    (0.75, 1, True),
    (3.0, 1, True),
    (0.75, 2, False),  # the slow variant uses only two of the four cores
]


@pytest.mark.parametrize(("others", "one_thread", "explained"), LOADS)
def test_load_explains_a_difference(others, one_thread, explained):
    """Load explains a difference if the slower variant might be as fast on a quiet machine."""
    slow = ONE | CPU | {"others_cores": others, "threads": 4 // one_thread}
    assert judged(FOUR | CPU | {"threads": 1}, slow).is_busy == explained


def test_baseline_that_uses_all_cores_is_named():
    one_thread = CPU | {"threads": 1}
    text = told(ONE | CPU, FOUR | one_thread)
    assert "one already uses all 4 cores: more devices add no cores, so no ideal" in text
    assert "already uses" not in told(ONE | one_thread, FOUR | one_thread)


LIMITS = [
    ({"data_ms": 30.0}, "one is limited by data loading: "),
    ({"communication_ms": 30.0}, "one is limited by communication: "),
    ({"rest_ms": 30.0}, "one is limited by launch overhead: "),
    (
        {"launch_ms": 19.0},
        "one is limited by launch overhead: ",
    ),  # on a GPU: it waits while the host launches kernels
    ({"memory_main_percent": 80.0}, "Memory limits one"),
    ({}, "one is limited by the model's own computation: "),
]


@pytest.mark.parametrize(("figures", "limit"), LIMITS)
def test_advice_names_the_bottleneck(figures, limit):
    assert limit in told(ONE | figures)


def test_remedies_suit_the_variant():
    assert "--data.placement device" in told(ONE | {"data_ms": 30.0})
    assert "--data.num_workers" in told(ONE | {"data_ms": 30.0, "placement": "disk"})
    assert "launch overhead" not in told(ONE | {"launch_ms": 19.0, "accelerator": "cpu"})


def test_diverged_variant_is_not_recommended():
    text = told(ONE, FOUR | {"not_finite_since": 2})
    assert "The loss of four is not finite" in text
    assert "**Take one**" in text
    assert "compare losses, too" in told(ONE, FOUR | {"global_batch": 256})


def test_less_accurate_variant_does_not_win():
    text = told(ONE | {"val_acc": 0.65}, FOUR | {"val_acc": 0.61, "less_accurate": 1.0})
    assert "**four is less accurate than one**: 61.0 %, not 65.0 %" in text
    assert "**Take one**" in text


def test_advice_without_results():
    assert "Nothing was measured" in told(ONE | {"samples_per_s": float("nan")})


def test_table_by_hand(monkeypatch):
    """Figures are medians of the runs; two standard errors of 0.8 on 200 images are 0.08."""
    monkeypatch.setattr("app.lab.compare.results.usable_cores", lambda: 4)
    outcomes = []
    for name, replicas, rates, accuracy in (
        ("one", 2, (90, 100, 130), 0.8),
        ("two", 4, (160, 150, 210), 0.73),
        ("three", 8, (50, 50, 50), 0.71),
    ):
        records = []
        for rate in rates:
            records.append(
                Record(
                    replicas=replicas, throughput=Throughput(rate), global_batch_size=64,
                    threads=1, data=DataSet("x", 10, {"val": 200}),
                    epochs=[Epoch(0, val_acc=0.9), Epoch(1, val_acc=accuracy)],
                    peak_memory=[DeviceMemory(0, "cpu", gib, total_gib=8) for gib in (1, 3, 2)],
                )
            )  # fmt: skip
        outcomes.append(Outcome(Variant(name, [], Namespace()), records, "measured"))
    outcomes[2].records[0].peak_memory[1] = DeviceMemory(1, "cpu")  # unknown
    columns = ["samples_per_s", "samples_per_s_max", "n", "replica_batch", "speed_up", "efficiency"]
    columns += ["best_acc", "less_accurate", "memory_main_percent", "memory_others_percent"]
    columns += ["memory_others_gib"]
    rows = tabulate(outcomes, "one")[columns].to_numpy().tolist()
    assert rows[0] == pytest.approx([100, 130, 3, 32, 1, nan, 0.9, 0, 12.5, 37.5, 3], nan_ok=True)
    assert rows[1:] == [
        [160, 210, 3, 16, 1.6, 0.8, 0.9, 0, 12.5, 37.5, 3],
        [50, 50, 3, 8, 0.5, 0.125, 0.9, 1, 12.5, 37.5, 3],
    ]
    for outcome in outcomes:
        for record in outcome.records:
            record.epochs[1].val_acc = 1.0
    assert not tabulate(outcomes, "one")["less_accurate"].any(), "equal, without any error"
    monkeypatch.setattr("app.lab.compare.results.usable_cores", lambda: 2)
    outcomes[1].status = "slow"
    table = tabulate(outcomes, "one")
    assert table["efficiency"].isna().all(), "the baseline uses all cores"
    assert table["best_acc"].isna().tolist() == [False, True, False]


A = {**ONE, "variant": "a", "val_images": 200.0, "train_s": 90.0, "others_cores": 4.0}
B = {**A, "variant": "b", "train_s": 60.0}


def by_accuracy(one, other):
    """Return the verdict on variants whose runs' accuracies differ by 0.01 from their median."""
    rows = []
    for row, median in ((A, one), (B, other)):
        ends = {"best_acc_min": median - 0.01, "best_acc_max": median + 0.01}
        rows.append(row | ends | {"best_acc": median})
    return verdict(made_up(*rows), "a", 4, 4, ACCURACY)


def test_advice_names_the_most_accurate():
    """By Wilson's formula, 180 of 200 are 85 to 93 %. Other programs change no accuracy."""
    result = by_accuracy(0.8, 0.9)
    assert result.conclusion == "b is the most accurate: 90.00%, 10.00 points above a"
    assert result.advice == [
        "**Take b**: it is 10.00 points above a, more than the spread of its runs.",
        "200 images measure its accuracy: 90.0 % (85.1 to 93.4).",
    ]
    result = by_accuracy(0.8, 0.785)
    assert result.conclusion.startswith("No winner: 2 variants are as accurate as each other,")
    assert result.advice[0] == "**Take b**: it is as accurate as any, and trains in the least time."
