"""Run items of `gpu_items.py` one after the other, each in a separate process with a time limit.

`gpu_day.sh` starts it. If an item fails or times out, its figures so far are kept, and the next
item runs. Without a GPU, every item is skipped. `GPU_DAY_DEVICE=cpu` tests the items on the CPU,
with small sizes.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from app.system.files import write_json

TRIED = os.environ.get("GPU_DAY_DEVICE") == "cpu"
PATIENCE = 3 if TRIED else 1  # factor of the time limits, larger on the CPU because it is slower
# items of each call, with their time limits in seconds
CALLS = {
    "A": {"versions": 20, "step": 40, "synchronisations": 35},
    "B": {"resnet": 60, "apart": 75},
    "C": {"same_bits": 110, "gpu_tests": 80, "dp": 20, "commands": 85},
}


def why_not():
    """Return why nothing can be measured here, or None."""
    if TRIED:
        return None
    ask = "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 3)"
    code = subprocess.run([sys.executable, "-c", ask], check=False).returncode
    return {0: None, 3: "no CUDA device"}.get(code, "torch cannot be imported")


def run(item, seconds, folder):
    """Run an item, and kill all of its processes when it ends or times out."""
    began = time.monotonic()
    figures = folder / f"{item}.json"
    log = folder / f"{item}.log"
    command = [sys.executable, str(Path(__file__).with_name("gpu_items.py")), item, str(figures)]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = "ok" if process.wait(seconds) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = f"cut off after {seconds:.0f} s"
        finally:
            # SIGINT first, because pytest then ends its children
            for number in (signal.SIGINT, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(3)
    recorded = json.loads(figures.read_text()) if figures.exists() else {}
    seconds = round(time.monotonic() - began, 1)
    end = log.read_text(errors="replace").splitlines()[-12:]
    return {"item": item, "status": status, "seconds": seconds, "figures": recorded, "end": end}


def report(rows, folder):
    """Write the results so far to two files."""
    write_json(folder / "results.json", rows)
    lines = ["| item | status | s | found |", "|---|---|---|---|"]
    for row in rows:
        text = "; ".join(f"{name}: {value}" for name, value in row["figures"].items())
        end = " ".join(row["end"][-1:])
        line = f"| {row['item']} | {row['status']} | {row['seconds']} | {text or end} |"
        lines.append(line.replace("\n", " "))
    (folder / "results.md").write_text("\n".join(lines) + "\n")


def main(chosen, folder):
    """Run the chosen items, by default all. A group's name in `CALLS` stands for its items.

    Print each item's status, and exit with 1 if an item failed or timed out.
    """
    limits = {item: limit for call in CALLS.values() for item, limit in call.items()}
    items = [item for name in chosen or CALLS for item in CALLS.get(name, [name])]
    unknown = [item for item in items if item not in limits]
    if unknown:
        raise SystemExit(
            f"gpu_day.sh: there is no {unknown[0]!r}: give wheels, {', '.join([*CALLS, *limits])}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    reason = why_not()
    rows = []
    for item in items:
        row = {
            "item": item,
            "status": f"skipped: {reason}",
            "seconds": 0.0,
            "figures": {},
            "end": [],
        }
        if not reason:
            row = run(item, limits[item] * PATIENCE, folder)
        rows.append(row)
        print(f"{item:<18}{row['status']:<26}{row['seconds']:>6} s", flush=True)
        report(rows, folder)
    print(f"{folder}/results.json, {folder}/results.md")
    sys.exit(int(any(not row["status"].startswith(("ok", "skipped")) for row in rows)))


if __name__ == "__main__":
    main(sys.argv[1:], Path(os.environ.get("OUT", "runs/gpu_day")).absolute())
