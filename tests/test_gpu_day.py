"""The GPU measurements of tests/benchmarks run to their end on a machine without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import gpu_day
from harness import ROOT

SCRIPT = ROOT / "tests" / "benchmarks" / "gpu_day.sh"
HIDDEN = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}


def test_without_a_gpu_everything_is_skipped(tmp_path: Path) -> None:
    done = subprocess.run(["bash", SCRIPT, tmp_path], env=HIDDEN, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [row["item"] for row in rows] == list(gpu_day.LIMITS)
    assert {row["status"] for row in rows} == {"skipped: no CUDA device"}
    table = (tmp_path / "results.md").read_text().splitlines()
    assert len(table) == len(rows) + 2
    assert all("skipped: no CUDA device" in line for line in table[2:])


def test_an_item_that_fails_or_hangs_leaves_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpu_items.py").write_text(
        "import pathlib, sys, time\n"
        "pathlib.Path(sys.argv[2]).write_text('{\"a\": 1}')\n"
        "time.sleep(60 if sys.argv[1] == 'hangs' else 0)\n"
        "raise SystemExit('it broke' if sys.argv[1] == 'fails' else 0)\n"
    )
    monkeypatch.setattr(gpu_day, "__file__", str(tmp_path / "gpu_day.py"))
    monkeypatch.setattr(gpu_day, "why_not", lambda: None)
    monkeypatch.setattr(gpu_day, "LIMITS", {"fails": 60, "hangs": 2, "works": 60})
    gpu_day.main(tmp_path)
    rows = {row["item"]: row for row in json.loads((tmp_path / "results.json").read_text())}
    statuses = {item: row["status"] for item, row in rows.items()}
    assert statuses == {"fails": "failed", "hangs": "cut off after 2 s", "works": "ok"}
    assert all(row["figures"] == {"a": 1} for row in rows.values())
    assert rows["fails"]["said"] == ["it broke"]
    assert "a: 1" in (tmp_path / "results.md").read_text()
