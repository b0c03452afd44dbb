"""Runs the items of `gpu_items.py` one after the other, each in a process of its own with a time limit.

Started by `gpu_day.sh`. An item that fails or is cut off leaves what it has found, and the others go on. On a machine
without a GPU every item is skipped. `GPU_DAY_DEVICE=cpu` tries the items out there, in small, to test them.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ALL = 585  # seconds for everything
# item of gpu_items.py: seconds at most
LIMITS = {
    "versions": 20, "cpu_beside_gpu": 60, "gpu_tests": 120, "synchronisations": 60, "lenet": 75, "floor": 60, "dp": 30,
    "ddp_gloo": 60, "resume": 60, "fsdp": 40, "nccl": 45, "resnet": 90, "mlp": 45, "transfers": 20, "commands": 90,
    "suite": ALL,
}  # fmt: skip


def why_not() -> str | None:
    """Why nothing can be measured here."""
    if os.environ.get("GPU_DAY_DEVICE") == "cpu":
        return None
    ask = "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 3)"
    code = subprocess.run([sys.executable, "-c", ask], check=False).returncode
    return {0: None, 3: "no CUDA device"}.get(code, "torch cannot be imported")


def run(item: str, seconds: float, folder: Path) -> dict[str, Any]:
    """Run an item, and end all of its processes when time is up."""
    began, figures, log = time.monotonic(), folder / f"{item}.json", folder / f"{item}.log"
    figures.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).with_name("gpu_items.py")), item, str(figures)]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = "ok" if process.wait(seconds) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = f"cut off after {seconds:.0f} s"
        finally:
            for number in (signal.SIGINT, signal.SIGKILL):  # a test that is told ends what it has started
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(10)
    found = json.loads(figures.read_text()) if figures.exists() else {}
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    seconds, said = round(time.monotonic() - began, 1), lines[-12:] if status == "failed" else []
    return {"item": item, "status": status, "seconds": seconds, "figures": found, "said": said}


def report(rows: list[dict[str, Any]], folder: Path) -> None:
    """Write what there is so far."""
    (folder / "results.json").write_text(json.dumps(rows, indent=2))
    lines = ["| item | status | s | found |", "|---|---|---|---|"]
    for row in rows:
        found = "; ".join(f"{name}: {value}" for name, value in row["figures"].items())
        said = " ".join(row["said"][-1:])
        lines.append(f"| {row['item']} | {row['status']} | {row['seconds']} | {found or said} |".replace("\n", " "))
    (folder / "results.md").write_text("\n".join(lines) + "\n")


def main(folder: Path) -> None:
    """Run every item, and say how each went."""
    folder.mkdir(parents=True, exist_ok=True)
    ends, rows, reason = time.monotonic() + ALL, [], why_not()
    for item, limit in LIMITS.items():
        left = ends - time.monotonic()
        row = {"item": item, "seconds": 0.0, "figures": {}, "said": []}
        if skipped := reason or ("no time left" if left < 5 else None):
            row["status"] = f"skipped: {skipped}"
        else:
            row = run(item, min(limit, left), folder)
        rows.append(row)
        print(f"{item:<18}{row['status']:<26}{row['seconds']:>6} s", flush=True)
        report(rows, folder)
    print(f"{folder}/results.json, {folder}/results.md")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
