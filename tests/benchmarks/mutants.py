"""Mutation score: which changes of one expression does the ordinary suite notice?

    python tests/benchmarks/mutants.py FOLDER [--each 24] [--seconds 12]

FOLDER keeps clones of the last commit and all results: a call that was cut off is continued there.
The first call runs the suite once, with a note in front of each statement, which says what tests
reach it. Each mutant then meets the tests that reach its statement, until one fails
or the seconds are over; tests that reach much of its module and little else come first. Later calls
with more `--seconds` try the survivors again.
"""

import argparse
import ast
import copy
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Queue
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent.parent
MODULES = """
command/checkpoint_file command/checkpoints command/outcome command/rate_search data/batches
data/exact_loader data/geometry data/shares data/transforms lab/compare/advice lab/compare/results
lab/verify/differences modules/probe modules/recipe modules/sums modules/weights monitor/nonfinite
monitor/rank_times monitor/windows training/buffers training/comm_hooks training/step training/tree
training/virtual_devices errors
"""
PATHS = [f"app/{name}.py" for name in MODULES.split()]
WORKERS = 2
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["lightning.pytorch.cli", "pandas"])
PAIRS = [
    (ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.And, ast.Or),
]  # fmt: skip
SWAPS = {ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult}
SWAPS |= dict(PAIRS) | {second: first for first, second in PAIRS}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "sum": "len"}
TEXTS = ast.JoinedStr | ast.Raise | ast.Assert  # no results
NOTE = """
import os as _os
def _reach(place, _seen=set()):
    test, _, phase = _os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")
    if phase == "(setup)":
        test = test.partition("::")[0]
    if (place, test) not in _seen:
        try:
            with open(_os.environ["REACHED"], "a") as file:
                file.write(f"{place} {test}\\n")
            _seen.add((place, test))
        except OSError:  # a test limits the size of files
            pass
"""


def changed(node):
    """Return a node with one change, or None for kinds that stay as they are."""
    new = copy.copy(node)
    match node:
        case ast.BinOp(op=op) | ast.AugAssign(op=op) | ast.BoolOp(op=op) if type(op) in SWAPS:
            new.op = SWAPS[type(op)]()
            return new
        case ast.Compare(ops=[op, *more]):
            new.ops = [SWAPS[type(op)](), *more]
            return new
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            return operand
        case ast.Constant(bool() as value):
            return ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            return ast.Constant(value + 1)
        case ast.IfExp(test, body, other):
            return ast.IfExp(test, other, body)
        case ast.Name(name, ast.Load()) if name in NAMES:
            return ast.Name(NAMES[name], ast.Load())
        case ast.If(test=test):
            return ast.UnaryOp(ast.Not(), test)
        case ast.Expr(ast.Call()) | ast.Continue() | ast.Break():
            return ast.Pass()
    return None


def is_simple(node):
    return (
        isinstance(node, ast.stmt) and not isinstance(node, ast.Match) and not hasattr(node, "body")
    )


def statements(tree):
    """Return the simple statements of all functions."""
    found = []
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            found += filter(is_simple, ast.walk(function))
    return found


def noted(path, source):
    """Return a module's source with a call of `_reach` in front of each simple statement."""
    tree = ast.parse(source)
    lines = source.splitlines()
    for line, column in {(node.lineno, node.col_offset) for node in statements(tree)}:
        text = lines[line - 1]
        lines[line - 1] = f'{text[:column]}_reach("{path}:{line}"); {text[column:]}'
    second = tree.body[1].lineno - 1  # after the docstring
    return "\n".join([*lines[:second], NOTE, *lines[second:]])


def mutants(path, source, parent, lines):
    """Yield the mutants of a node's parts; `lines` are those of the statements around it."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, TEXTS) or ast.unparse(node) == "strict=True":  # a check of ours
            continue
        inner = lines
        if isinstance(node, ast.FunctionDef):
            inner = [statement.lineno for statement in statements(node)]
        elif is_simple(node) and not isinstance(parent, ast.ClassDef | ast.Module):
            inner = [node.lineno]
        new = changed(node)
        if new is not None:
            old = node.test if isinstance(node, ast.If) else node
            code = ast.unparse(new)
            name = f"{path}:{old.lineno}:{old.col_offset} {ast.unparse(old)} -> {code}"
            if not isinstance(new, ast.stmt):
                code = f"({code})"
            rows = source.splitlines(keepends=True)
            start = sum(map(len, rows[: old.lineno - 1])) + old.col_offset
            end = sum(map(len, rows[: old.end_lineno - 1])) + old.end_col_offset
            text = source[:start] + code.encode() + source[end:]
            yield {"name": name, "path": path, "lines": inner, "text": text.decode()}
        yield from mutants(path, source, node, inner)


def cloned(source, folder):
    """Clone a repository's last commit."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run(["git", "clone", "-q", source, folder], check=True, timeout=100)
    return folder


def in_fork(place, arguments):
    """Run pytest in a clone, in a process that has imported torch, but nothing of the clone."""
    os.setsid()
    log = os.open(f"{place}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(place)
    paths = [str(place), f"{place}/tests", f"{place}/notebooks"]
    sys.path[:0] = paths
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
        "REACHED": f"{place}.reached",
        "TMPDIR": f"{place}.tmp",
    }
    sys.dont_write_bytecode = True
    code = pytest.main(["-p", "no:cacheprovider", *arguments])
    sys.stdout.flush()
    os._exit(code)


def run_tests(place, arguments, seconds):
    """Run pytest in a clone; return its exit code, negative if it hangs, and its output."""
    temporary = Path(f"{place}.tmp")
    temporary.mkdir(exist_ok=True)
    process = FORKS.Process(target=in_fork, args=(place, arguments))
    process.start()
    process.join(seconds)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    shutil.rmtree(temporary, ignore_errors=True)
    return process.exitcode, Path(f"{place}.log").read_text(errors="replace")


def suite(folder):
    """Run the suite in a clone of the last commit, unless an earlier call has done so.

    Returns:
        Seconds of each test that passes; and for each statement, the tests that reach it.
    """
    report = folder / "report.xml"
    if not report.exists():
        place = cloned(cloned(ROOT, folder / "plain"), folder / "noted")
        for path in PATHS:
            file = place / path
            file.write_text(noted(path, file.read_text()))
        run_tests(place, [f"--junitxml={report}", "-ojunit_family=xunit1"], 7200)
    seconds = {}
    tests_of = defaultdict(set)
    for case in ElementTree.parse(report).iter("testcase"):
        if not {part.tag for part in case} & {"failure", "error", "skipped"}:
            test = f"{case.get('file')}::{case.get('name')}"
            seconds[test] = float(case.get("time", 0))
            tests_of[test].add(test)
            tests_of[case.get("file")].add(test)  # for a line that a fixture reaches
    tests = defaultdict(set)
    for line in (folder / "noted.reached").read_text().splitlines():
        place, _, test = line.partition(" ")
        tests[place] |= tests_of[test]
    return seconds, tests


class Judge:
    """Judges mutants, and keeps the verdicts in a file.

    Args:
        folder: Folder of the clones and results.
        seconds: Seconds of tests for a mutant, as they took in the suite.
    """

    def __init__(self, folder, seconds):
        self.limit = seconds
        self.seconds, self.tests = suite(folder)
        self.width = Counter()
        for place, tests in self.tests.items():
            for test in tests:
                self.width[place.partition(":")[0], test] += 1
                self.width["", test] += 1
        self.results = folder / "results.jsonl"
        self.results.touch()
        self.rows = {}
        for line in self.results.read_text().splitlines():
            row = json.loads(line)
            self.rows[row["name"]] = row
        self.passed = {}  # whether a test passes without a mutant
        self.places = Queue()
        for worker in range(WORKERS):
            self.places.put(cloned(folder / "plain", folder / f"worker{worker}"))

    def is_open(self, mutant):
        """Return whether a mutant has no verdict yet, or one that more tests may change."""
        row = self.rows.get(mutant["name"])
        return row is None or (row["verdict"] != "killed" and row["limit"] < self.limit)

    def chosen(self, mutant):
        """Return the tests for a mutant, those first that reach much of its module."""
        path = mutant["path"]
        tests = set()
        for place, reaching in self.tests.items():
            if place in [f"{path}:{line}" for line in mutant["lines"]]:
                tests |= reaching
        if not mutant["lines"]:
            tests = {test for where, test in self.width if where == path}

        def gain(test):
            return self.width[path, test] ** 2 / self.width["", test] / (0.1 + self.seconds[test])

        chosen = []
        total = 0.0
        for test in sorted(tests, key=gain, reverse=True):
            total += self.seconds[test]
            if total < self.limit or not chosen:
                chosen.append(test)
        return chosen

    def judge(self, mutant):
        """Run tests on a mutant until one fails that passes without it; keep the verdict."""
        chosen = self.chosen(mutant)
        # the first few kill most mutants, and pytest takes seconds to collect all
        parts = list(filter(None, [chosen[:6], chosen[6:]]))
        row = {"name": mutant["name"], "limit": self.limit, "verdict": "survived", "by": ""}
        place = self.places.get()
        file = place / mutant["path"]
        source = file.read_text()
        while parts and row["verdict"] == "survived":
            file.write_text(mutant["text"])
            arguments = ["-n", "0", "-x", *parts[0]]
            code, out = run_tests(place, arguments, 20 + 4 * self.limit)
            file.write_text(source)
            assert "ERROR: not found" not in out, out
            if code == 0:
                del parts[0]
                continue
            named = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", out, re.MULTILINE)
            test = named[1] if named else ""
            if test and test not in self.passed:
                self.passed[test] = run_tests(place, ["-n", "0", test], 300)[0] == 0
            if self.passed.get(test, True):
                row["verdict"] = "killed"
                row["by"] = test or f"exit code {code}"
            else:
                parts[0] += ["--deselect", test]
        self.places.put(place)
        self.rows[mutant["name"]] = row
        with self.results.open("a") as results:
            results.write(json.dumps(row) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--each", type=int, default=24, help="mutants of each module")
    parser.add_argument("--seconds", type=float, default=12)
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    judge = Judge(folder, options.seconds)
    drawn = []
    for path in PATHS:
        source = (folder / "plain" / path).read_bytes()
        found = list(mutants(path, source, ast.parse(source), []))
        random.Random(path).shuffle(found)
        drawn += found[: options.each]
    random.Random(0).shuffle(drawn)
    with ThreadPoolExecutor(WORKERS) as threads:
        list(threads.map(judge.judge, filter(judge.is_open, drawn)))
    killed = Counter()
    for mutant in drawn:
        row = judge.rows[mutant["name"]]
        killed[mutant["path"]] += row["verdict"] == "killed"
        if row["verdict"] != "killed":
            print(mutant["name"])
    of = Counter(mutant["path"] for mutant in drawn)
    for path in PATHS:
        print(f"| {path} | {killed[path]} of {of[path]} | {killed[path] / of[path]:.0%} |")
    print(f"| all | {killed.total()} of {of.total()} | {killed.total() / of.total():.0%} |")


if __name__ == "__main__":
    main()
