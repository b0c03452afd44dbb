"""Script of the GPU measurements. It skips them without a GPU, and limits the time of each.

`.ci/run` runs all measurements with small sizes.
"""

import json
import os
import subprocess
import sys

import pytest
from benchmarks import gpu_day
from harness import ROOT, SLOW

SCRIPT = ROOT / "tests/benchmarks/gpu_day.sh"


def run_script(folder, *items, python=sys.executable):
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": python, "OUT": str(folder)}
    return subprocess.run(
        ["bash", SCRIPT, *items], env=hidden, capture_output=True, text=True, timeout=120
    )


@SLOW
def test_without_a_gpu_everything_is_skipped(tmp_path):
    done = run_script(tmp_path, "A", "dp")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [row["item"] for row in rows] == ["versions", "step", "synchronisations", "dp"]
    assert {row["status"] for row in rows} == {"skipped: no CUDA device"}
    table = (tmp_path / "results.md").read_text().splitlines()
    assert len(table) == len(rows) + 2
    assert all("skipped: no CUDA device" in line for line in table[2:])
    assert run_script(tmp_path, "lenett").stderr.startswith(
        "gpu_day.sh: there is no 'lenett': give wheels, A, B, C, "
    )


def test_an_item_that_fails_or_hangs_leaves_its_figures(tmp_path, monkeypatch):
    (tmp_path / "gpu_items.py").write_text(
        "import pathlib, sys, time\n"
        "pathlib.Path(sys.argv[2]).write_text('{\"a\": 1}')\n"
        "time.sleep(60 if sys.argv[1] == 'hangs' else 0)\n"
        "raise SystemExit('it broke' if sys.argv[1] == 'fails' else 0)\n"
    )
    monkeypatch.setattr(gpu_day, "__file__", str(tmp_path / "gpu_day.py"))
    monkeypatch.setattr(gpu_day, "why_not", lambda: None)
    monkeypatch.setattr(gpu_day, "CALLS", {"A": {"fails": 60, "hangs": 2, "works": 60}})
    with pytest.raises(SystemExit, match="1"):
        gpu_day.main(["A"], tmp_path / "out")
    rows = {row["item"]: row for row in json.loads((tmp_path / "out/results.json").read_text())}
    statuses = {item: row["status"] for item, row in rows.items()}
    assert statuses == {"fails": "failed", "hangs": "cut off after 2 s", "works": "ok"}
    assert all(row["figures"] == {"a": 1} for row in rows.values())
    assert rows["fails"]["end"] == ["it broke"]
    assert "a: 1" in (tmp_path / "out/results.md").read_text()
    assert (tmp_path / "out/fails.log").read_text() == "it broke\n"


def test_a_machine_without_the_wheels(tmp_path):
    bare = tmp_path / "python3"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    done = run_script(tmp_path, "A", python=str(bare))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(
        "run gpu_day.sh wheels where there is a network, and copy .wheels along\n"
    )
    assert done.stderr.count("\n") == 1
