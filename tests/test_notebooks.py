"""Every notebook runs from top to bottom with small parameters, and is stored with its outputs."""

import os
import re
import subprocess
import sys

import nbformat
import pytest
from harness import ROOT, SLOW

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SMALL = {"LAB_DATA": "synthetic", "LAB_SIZE": "400", "LAB_EPOCHS": "1", "LAB_BATCHES": "16 256"}
SMALL |= {"LAB_REPEATS": "2", "LAB_MEGABYTES": "1"}


@SLOW
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(notebook, tmp_path):
    flags = "-p no:cacheprovider -p no:xdist -o addopts= --nbmake --nbmake-timeout=480"
    command = [sys.executable, "-m", "pytest", *flags.split(), str(notebook)]
    env = {**os.environ, **SMALL, "LAB_RUNS": str(tmp_path / "runs")}
    done = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=560, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_stored_with_its_pictures(notebook):
    """A notebook shows its pictures where people find it, and nothing of the executing machine."""
    content = nbformat.read(notebook, as_version=nbformat.NO_CONVERT)
    nbformat.validate(content)
    assert (content.nbformat, content.nbformat_minor) == (4, 5)
    assert content.metadata.kernelspec.name == "python3"
    assert "pip install -e '.[notebook]'" in content.cells[0].source
    assert notebook.stat().st_size < 300_000
    outputs = [output for cell in content.cells for output in cell.get("outputs", ())]
    data = [output.data for output in outputs if "data" in output]
    pictures = [each.pop(kind, None) for each in data for kind in ("image/png", "image/jpeg")]
    assert any(pictures), f"jupyter execute --inplace {notebook.relative_to(ROOT)}"
    assert not any("execution" in cell.metadata for cell in content.cells)
    assert not re.search(r"/(tmp|home|root|usr|Users)/|Traceback", str(outputs))
