"""An installed wheel contains the configs, and works without the checkout."""

import os
import subprocess
import sys

from harness import QUIET, ROOT, SLOW


@SLOW
def test_installed_wheel_works_in_an_empty_folder(tmp_path):
    source = tmp_path / "source"
    installed = tmp_path / "installed"
    empty = tmp_path / "empty"
    empty.mkdir()
    source.mkdir()
    for name in ("app", "configs", "pyproject.toml", "README.md", "LICENSE"):
        subprocess.run(["cp", "-a", ROOT / name, source], check=True, timeout=20)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([*pip, installed, source], check=True, capture_output=True, timeout=200)

    def run(*words):
        done = subprocess.run(
            [sys.executable, *words], cwd=empty, env={**os.environ, "PYTHONPATH": str(installed)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    assert run("-c", "import app; print(app.__file__)").startswith(str(installed))
    run("-m", "app", "fit", "--config=configs/quickstart.yaml", "--trainer.max_steps=4", *QUIET)
    assert (empty / "runs/quickstart/version_0/report.html").exists()
    compare = ["-m", "app", "compare", "--dry_run=true"]
    out = run(*compare, "--experiment=configs/compare/fashion_scale.yaml")
    assert "configs/fashion_mlp.yaml" in out
    assert "python -m app fit" in run(*compare, "--quick=true")
