"""What a comparison advises, on made-up results with known answers."""

from typing import Any

import pandas as pd
import pytest

from app.compare.advice import advice
from app.compare.results import COLUMNS


def made_up(*rows: dict[str, Any]) -> pd.DataFrame:
    """Results with a range of ±`spread` around samples_per_s, in three runs."""
    table = []
    for row in rows:
        rate, spread = row["samples_per_s"], row.pop("spread", 0.01)
        times = {f"{phase}_ms": 1.0 for phase in ("data", "communication", "optimizer", "rest")}
        base = {
            "nodes": 1,
            "replicas": row["devices"],
            "n": 3,
            "precision": "32-true",
            "samples_per_s_min": rate * (1 - spread),
            "samples_per_s_max": rate * (1 + spread),
            "memory_main_percent": 10.0,
            "memory_others_percent": float("nan"),
            "forward_backward_ms": 20.0,
            "launch_ms": 10.0,
            "accelerator": "cuda",
            "placement": "memory",
            "global_batch": 64,
        }
        table.append(base | times | row)
    return pd.DataFrame(table, columns=list(COLUMNS))


def told(*rows: dict[str, Any]) -> str:
    table = made_up(*rows)
    commands = {row["variant"]: f"python -m app fit --run.name {row['variant']}" for row in rows}
    return "\n".join(advice(table, rows[0]["variant"], commands))


ONE = {"variant": "one", "devices": 1, "samples_per_s": 1000.0}
FOUR = {"variant": "four", "devices": 4, "samples_per_s": 3600.0}


def test_advice_doubts_what_cannot_be() -> None:
    assert "four: more than the ideal**" in told(ONE, FOUR | {"samples_per_s": 9000.0, "efficiency": 2.25})
    assert "more than the ideal" not in told(ONE, FOUR | {"efficiency": 0.9})


def test_advice_names_the_fastest_and_the_best_for_each_device() -> None:
    said = told(ONE, FOUR)
    assert "**Fastest: four**, 3,600 samples/s. It is 3.60 times as fast as one, more than runs of the same" in said
    assert "**Best for each device: one**, 1,000 samples/s" in said
    assert "python -m app fit" in said


def test_advice_does_not_claim_what_is_within_the_spread() -> None:
    said = told(ONE, FOUR | {"samples_per_s": 1050.0, "spread": 0.1})
    assert "No real difference to one" in said
    said = told(ONE, FOUR | {"samples_per_s": 1050.0, "spread": 0.03})
    assert "No real difference to one" in said, "apart by less than the runs of one differ"
    assert "one is as fast with 1 device(s)**: take that" in said
    assert "--run.name one" in said, "the command is that of the one to take"
    said = told(ONE | {"n": 1}, FOUR | {"n": 1})
    assert "in a single run: whether that is more than chance is not known" in said
    assert "No real difference" not in said


@pytest.mark.parametrize(
    ("figures", "limit"),
    [
        ({"data_ms": 30.0}, "Data loading limits one"),
        ({"communication_ms": 30.0}, "Communication limits one"),
        ({"rest_ms": 30.0}, "Launch overhead limits one"),
        ({"memory_main_percent": 97.0}, "Memory limits one"),
        ({}, "own computation limits one"),
    ],
)
def test_advice_names_what_limits(figures: dict[str, float], limit: str) -> None:
    assert limit in told(ONE | figures)


def test_advice_suggests_only_what_was_not_tried() -> None:
    assert "more devices or `--trainer.precision bf16-mixed`" in told(ONE)
    tried = told(ONE, FOUR | {"samples_per_s": 900.0, "precision": "bf16-mixed"})
    assert "more devices" not in tried
    assert "bf16" not in tried
    assert "more devices" not in told(ONE | {"accelerator": "cpu"})
    assert "--data.placement device" in told(ONE | {"data_ms": 30.0})
    assert "--data.num_workers" in told(ONE | {"data_ms": 30.0, "placement": "disk"})


def test_a_gpu_that_waits_for_the_host() -> None:
    assert "Launch overhead limits one" in told(ONE | {"launch_ms": 19.0})
    assert "Launch overhead" not in told(ONE | {"launch_ms": 19.0, "accelerator": "cpu"})


def test_advice_does_not_recommend_what_diverged_or_took_other_steps_unsaid() -> None:
    said = told(ONE, FOUR | {"not_finite_since": 2})
    assert "The loss of four is not finite" in said
    assert "**Fastest: one**" in said
    assert "compare losses, too" in told(ONE, FOUR | {"global_batch": 256})


def test_advice_without_results() -> None:
    assert "Nothing was measured" in told(ONE | {"samples_per_s": float("nan")})


def test_advice_names_a_slow_rank() -> None:
    slow = "rank 3 (node 1): 18 % slower than the median, in data"
    assert f"**four: {slow}**, in each of its runs" in told(ONE, FOUR | {"slow_rank": slow})
    assert "slower than the median" not in told(ONE, FOUR)
