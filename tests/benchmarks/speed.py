"""Cost of this application compared with hand-written loops, measured in turn: A B A B.

    python tests/benchmarks/speed.py                     everything, about 20 minutes on two cores
    python tests/benchmarks/speed.py overhead --turns 9  one item, more often

Each contender runs in a separate process, with the item's number of threads. A table lists the
median and range of each figure, and of its ratio to the first contender's figure. Both figures of a
ratio are from the same turn, so that load by other programs affects both.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORES = len(os.sched_getaffinity(0))

# -- items: threads and contenders; the first contender is the reference
# -------------------------------------------

ITEMS = {
    "overhead": (1, "overhead_raw overhead_stock overhead_ours"),
    "lenet": (CORES, "lenet_raw lenet_ours"),
    "start": (CORES, "start_import start_ours start_quickstart"),
    "ddp": (1, "ddp_raw ddp_ours"),
    "loader": (1, "loader_lightning loader_exact"),
    "shards": (1, "shards_plain shards_ours"),
    "live": (1, "shards_ours live"),
    "one": (CORES, "one_plain one_ours"),
    "crops": (1, "crops_torchvision crops_ours"),
}


def measure(contender, threads):
    """Run a contender in a separate process, and return its figures."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("contenders.py")), contender],
        env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{contender} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def table(contenders, turns):
    """Yield lines of Markdown: median and range of each figure, and of its ratio to the first."""
    first = contenders[0]
    figures = set(turns[0][first]).intersection(*turns[0].values())
    for figure in sorted(figures):
        yield f"\n| {figure}, n = {len(turns)} | median | range | × {first} | range |"
        yield "|---|---|---|---|---|"
        for name in contenders:
            values = [turn[name][figure] for turn in turns]
            ratios = [turn[name][figure] / turn[first][figure] for turn in turns]
            yield f"| {name} | {_spread(values)} | {_spread(ratios)} |"


def _spread(values):
    return f"{statistics.median(values):.4g} | {min(values):.4g}-{max(values):.4g}"


def read(arguments):
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("items", nargs="*", choices=[*ITEMS, []], help="by default all")
    parser.add_argument("--turns", type=int, default=5)
    return parser.parse_args(arguments)


def main():
    """Measure each item in turns, and print its tables."""
    import contenders  # beside this script

    arguments = read(sys.argv[1:])
    for item in arguments.items or ITEMS:
        threads, contender_names = ITEMS[item]
        names = contender_names.split()
        turns = [{name: measure(name, threads) for name in names} for _ in range(arguments.turns)]
        described = [f"\n* {name}: {getattr(contenders, name).__doc__}" for name in names]
        print(f"\n## {item}, {threads} thread(s)", *described, sep="")
        print(*table(names, turns), sep="\n", flush=True)


if __name__ == "__main__":
    main()
