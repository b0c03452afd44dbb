"""Every command, flag, link and example of every document is extracted and checked.

The application parses each `fit` command, with its classes and config files. Commands of the
introductory documents also run, with small sizes, unless they need a cluster. A launcher's flags
(torchrun, sbatch, …) are parsed by its own parser if that is written in Python. Then, the launched
command is checked.
"""

import json
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from contextlib import redirect_stdout, suppress
from io import StringIO

import numpy as np
import pytest
import torch
import yaml
from benchmarks import gpu_day, speed
from forked import ForkServer
from harness import QUIET, ROOT, SLOW, draw_images, losses, on_cpu, options
from jsonargparse import capture_parser

import app
import app.data
import app.modules
from app.cli import main
from app.command.arguments import subclasses
from app.command.configuration import Flags, resolve, split_flags
from app.command.parser import parameters
from app.errors import UserError
from app.lab.compare.command import _parse as read_compare
from app.lab.replay import _parse as read_replay
from app.lab.verify.command import _parse as read_verify
from app.use.export import read as read_export

BESIDE_CODE = [*ROOT.glob("app/**/*.md"), *ROOT.glob("configs/**/*.md")]
MARKDOWN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(BESIDE_CODE)]
CONFIGS = sorted(
    path
    for kind in ("*.yaml", "*.sbatch", "*.def", "Dockerfile")
    for path in ROOT.glob(f"configs/**/{kind}")
)
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCUMENTS = [*MARKDOWN, *CONFIGS, *sorted(ROOT.glob("notebooks/*.ipynb"))]
PROGRAMS = (
    "python|pip|apptainer|docker|pytest|torchrun|sbatch|srun|salloc|kubectl|sky"
    "|wandb|bash|ruff|mypy|export"
)
START = re.compile(rf"(?:\w+=\S+ )*(?:{PROGRAMS}) ")
# values of the documents' placeholders: paths from fixtures, or any valid values
PLACES = {
    "MY_IMAGES": "images",
    "NEW_IMAGES": "images/test",
    "ROOT": "images",
    "HOST": "127.0.0.1",
    "PORT": "29400",
}
PLACES |= {"HOST:PORT": "127.0.0.1:29400", "tcp://HOST:PORT": "tcp://127.0.0.1:29400"}
# SLURM's own flags, which tests/test_slurm.py checks with SLURM's parser
SLURM = {"--nodes", "--time", "--ntasks-per-node", "--gres", "--nodelist", "--signal", "--requeue"}
SLURM |= {"--ntasks"}
# flags of programs that are not installed, or of our scripts without a parser
OTHERS = {"--env", "--verbose", "--trust", "--help", "--shm-size", "--ipc", "--kill-on-bad-exit"}
OTHERS |= {"--gpus", "--nr", "--num_processes"}  # flags in the table "Coming from"
NAME = {"ids": lambda path: str(path.relative_to(ROOT))}


def text(document):
    """Return a document as Markdown: a notebook's Markdown cells, a config's comments, or all text.

    Indented lines of a config's comments are repeated as a `bash` block.
    """
    content = document.read_text()
    if document.suffix == ".ipynb":
        cells = json.loads(content)["cells"]
        return "\n\n".join(
            "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
        )
    if document in CONFIGS:
        comment = [line[2:] for line in content.splitlines() if re.match("#( |$)", line)]
        shown = [line.strip() for line in comment if line.startswith("  ")]
        return "\n".join(
            ["```bash", *(re.split(" {3,}", line)[0] for line in shown), "```", *comment]
        )
    return content


def blocks(document, *languages):
    matches = re.findall(r"^```(\w*)\n(.*?)^```", text(document), flags=re.MULTILINE | re.DOTALL)
    return [content for language, content in matches if language in languages]


def spans(document):
    """Return the texts between backticks in the prose."""
    prose = re.sub(r"^```.*?^```", "", text(document), flags=re.MULTILINE | re.DOTALL)
    return [span.replace("\\|", "|") for span in re.findall(r"`([^`\n]+)`", prose)]


def commands(document):
    """Return a document's commands: lines of `bash` blocks, and text that looks like a command."""
    calls = []
    for language in ("bash", ""):
        for block in blocks(document, language):
            for line in re.sub(r"\\\n\s*", "", block).splitlines():
                chain = [
                    call.strip()
                    for call in re.sub(r"\s{2,}#.*", "", line).split(" && ")
                    if call.strip()
                ]
                assert language == "" or all(START.match(f"{call} ") for call in chain), line
                calls += chain
    return [call for call in calls if START.match(f"{call} ")] + [
        span for span in spans(document) if START.match(span)
    ]


def words_of(command):
    """Return a command's words without ellipses and leading variables; fill in placeholders."""
    words = [PLACES.get(word, word) for word in shlex.split(command) if word != "…"]
    while re.fullmatch(r"\w+=.*", words[0]):
        words.pop(0)
    return words


def check(command):
    """Parse a command with the parser of the program that it names. Check that its files exist."""
    words = words_of(command)
    files = [word for word in words if word.startswith(("configs/", "tests/"))]
    assert all((ROOT / file).is_file() for file in files)
    match words:
        case ["python", "-m", "app", *arguments]:
            check_app(arguments)
        case ["python", "tests/benchmarks/speed.py", *arguments]:
            speed.read(arguments)
        case ["bash", "tests/benchmarks/gpu_day.sh", *calls]:
            assert set(calls) <= gpu_day.CALLS.keys()
        case ["torchrun", *arguments]:
            from torch.distributed.run import parse_args

            read = parse_args(arguments)
            assert read.module
            check(shlex.join(["python", "-m", read.training_script, *read.training_script_args]))
        case ["sbatch" | "salloc", *arguments]:
            allocated, _, flags = shlex.join(arguments).partition("configs/cluster/slurm.sbatch")
            assert set(re.findall(r"(?<!\S)-[\w-]+", allocated)) <= SLURM
            check_app(["fit", *shlex.split(flags)])
        case ["sky", "jobs", "launch", "configs/cluster/sky.yaml", *rest]:
            assert not rest or rest[0] == "--env"
            check_app(["fit", *shlex.split(" ".join(rest[1:]).removeprefix("FLAGS="))])
        case ["wandb", name, *arguments]:
            from wandb.cli.cli import cli

            cli.commands[name].make_context(name, arguments)
        case ["pip", "install", "-e", place] | ["pip", "install", place]:
            extras = PYPROJECT["project"]["optional-dependencies"]
            wanted = re.fullmatch(r"(?:\.|data-parallel-lab)(?:\[(\w+)\])?", place)
            assert wanted
            assert wanted[1] in (None, *extras)
        case ["pytest", *arguments]:
            markers = PYPROJECT["tool"]["pytest"]["ini_options"]["markers"]
            known = {marker.partition(":")[0] for marker in markers}
            chosen = arguments[arguments.index("-m") + 1] if "-m" in arguments else ""
            assert set(chosen.split()) <= known | {"or", "and", "not"}
        case ["ruff" | "mypy" | "export", *_]:
            pass
        case ["srun" | "apptainer" | "docker" | "kubectl" | "python" | "bash", *words]:
            # tests/test_cluster_files.py checks the content of files
            started = [word for word in words if word in ("python", "torchrun")]
            if started:
                check(shlex.join(words[words.index(started[0]) :]))
        case _:
            raise AssertionError(f"no way to check {words}")


def check_app(arguments):
    """Parse one of our command lines, including its flags of `fit`."""
    if not arguments or arguments[0].startswith("--"):
        assert arguments in ([], ["--help"])
        return
    command, *rest = arguments
    _, pairs = split_flags(rest)
    flags = [word for pair in pairs for word in pair]
    readers = {"export": read_export, "verify": read_verify, "replay": read_replay}
    if command == "compare":
        _, experiment, typed = read_compare(rest)
        resolve(["fit", *(word for name, value in typed.items() for word in (f"--{name}", value))])
        assert all((ROOT / config).is_file() for config in experiment.configs)
    elif command in readers:
        readers[command](rest)
        if command != "export":
            resolve(["fit", *flags])
    elif command == "join":
        assert re.fullmatch(r"[\w.]+:(\d+|PORT)", rest[0])
        resolve(["fit", *rest[1:]])
    elif command in ("doctor", "runs"):
        assert {word for word in rest if word.startswith("-")} <= set(own_flags(command))
    elif "--print_config" in rest or any("help" in word for word in rest):
        assert capture_parser(Flags, arguments)
    else:
        resolve(arguments)


def own_flags(command):
    """Return the flags that the help of one of our own commands lists."""
    with redirect_stdout(StringIO()) as out, suppress(SystemExit):
        main([command, "--help"])
    return re.findall(r"--\w+", out.getvalue())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Folder with a reader's files: configs, images, and the documents' examples."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("configs", "tests"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("NAME", "quickstart"):
        run = folder / "runs" / name / "version_0"
        (run / "checkpoints").mkdir(parents=True)
        shutil.copy(ROOT / "configs/quickstart.yaml", run / "config.yaml")
        torch.save({"state_dict": {}}, run / "checkpoints/best.ckpt")
    draw_images(folder / "images", ("cat", "dog"), train=12, test=12)
    for document in MARKDOWN:
        for block in blocks(document, "python"):
            if name := re.match(r"# (\w+\.py)\n", block):
                assert not (folder / name[1]).exists(), "two examples of one name"
                (folder / name[1]).write_text(block)
    return folder


@pytest.fixture
def reader(place, monkeypatch):
    """Folder of a reader who follows the documents; it is the current folder."""
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    # without a network, each download would be tried again for 20 s
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for file in place.glob("*.py"):  # imported from an earlier folder
        monkeypatch.delitem(sys.modules, file.stem, raising=False)
    return place


def wrong_commands(document):
    wrong = {}
    for command in dict.fromkeys(commands(document)):
        try:
            check(command)
        except (Exception, SystemExit) as error:
            wrong[command] = f"{type(error).__name__}: {error}"
    return wrong


@SLOW
def test_commands_of_the_readme(reader):
    assert len(commands(ROOT / "README.md")) > 15
    assert not wrong_commands(ROOT / "README.md")


@SLOW
@pytest.mark.parametrize("document", DOCUMENTS[1:], **NAME)
def test_commands(document, reader):
    assert not wrong_commands(document)


WRONG = [
    "python -m app fit --trainer.devcies 2",
    "python -m app fit --config configs/no_such.yaml",
    "python -m app compare --repaets 5",
    "python -m app verify --stpes 3",
    "python -m app export --fromat onnx",
    "torchrun --nproc-per-node 4 -m app fit --trainer.startegy ddp",
    "torchrun --nprocs 4 -m app fit",
    "sbatch configs/cluster/slurm.sbatch --cnofig configs/cifar_cnn.yaml",
    "wandb sweeep configs/sweep.yaml",
    "pytest -m slwo",
]


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_command_is_found(command, reader):
    with pytest.raises((UserError, AssertionError, SystemExit, KeyError)):
        check(command)


@SLOW
def test_flags_in_the_prose():
    """Each flag in prose belongs to one of our commands, or to a program that a document starts."""
    from torch.distributed.run import get_args_parser

    fit = capture_parser(Flags, ["fit"])
    known = {flag.rstrip("+") for action in fit._actions for flag in action.option_strings}
    known |= {flag for action in get_args_parser()._actions for flag in action.option_strings}
    known |= {
        flag
        for command in ("compare", "verify", "replay", "doctor", "export", "runs")
        for flag in own_flags(command)
    }
    known |= SLURM | OTHERS
    for section, base in (("model", app.modules.ImageClassifier), ("data", app.data.ImageData)):
        known |= {
            f"--{section}.{name}" for cls in (base, *subclasses(base)) for name in parameters(cls)
        }
    # flags that depend on a chosen class, and are checked with the commands that use them
    deeper = (
        "--model.optimizer.",
        "--model.scheduler.",
        "--trainer.callbacks",
        "--trainer.strategy.",
    )
    for document in DOCUMENTS:
        for span in spans(document):
            for flag in re.findall(r"(?:^|\s)(--[\w.-]+)", span) if span.startswith("--") else ():
                assert flag in known or flag.startswith(deeper), (
                    f"{document.relative_to(ROOT)}: `{span}`"
                )


def small(command):
    """Return a small `fit`, `validate`, `test` or `predict` command, or None if it cannot run here.

    Processes are forked, because the start of processes is not tested here.
    """
    match words_of(command):
        case ["python", "-m", "app", "fit" | "validate" | "test" | "predict" as kind, *flags]:
            pass
        case _:
            return None
    if "--print_config" in flags or any("help" in word or "num_nodes" in word for word in flags):
        return None
    settings = resolve([kind, *flags])
    if settings.model.init_args.get("weights") == "DEFAULT":  # needs a download
        return None
    name = settings.data.class_path.rpartition(".")[2]
    if kind == "fit":
        # warm-ups last up to two epochs
        longer = "--ckpt_path" in flags or settings.model.init_args.get("warmup")
        flags += ["--trainer.max_epochs", "3" if longer else "1", "--run.test", "false"]
        if name in ("CIFAR10", "FashionMNIST"):
            for flag in ("--data", "--data.root"):
                while flag in flags:
                    del flags[flags.index(flag) : flags.index(flag) + 2]
            flags += ["--data", "Synthetic", "--data.like", name]
        if name in ("CIFAR10", "FashionMNIST", "Synthetic"):
            flags += ["--data.images", "24"]
        if name != "MyData" or settings.data.init_args.get("batch_size"):
            flags += ["--data.batch_size", "12"]
    strategy = settings.trainer.strategy
    if isinstance(strategy, str) and strategy.startswith("ddp"):
        flags = ["ddp_fork" if word in ("ddp", "ddp_spawn") else word for word in flags]
    if strategy != "auto":
        flags += ["--trainer.devices", "2"]
    return [kind, *flags, "--trainer.accelerator", "cpu", *QUIET]


@SLOW
@pytest.mark.usefixtures("drawn")
def test_commands_run(reader, tmp_path):
    """Commands of the introductory documents run in a reader's folder, with small sizes.

    If several commands are equal with these sizes, the test runs only one of them.
    """
    begin_here = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "app/command/README.md",
        *ROOT.glob("notebooks/*.*"),
    ]
    typed = [command for document in begin_here for command in commands(document)]
    chosen = [words for words in map(small, dict.fromkeys(typed)) if words]
    assert len(chosen) > 10
    shutil.rmtree("runs")
    first = small("python -m app fit --config configs/quickstart.yaml --run.name NAME")
    assert first
    with ForkServer(tmp_path, reader, limit=None) as server:
        for words in [
            first,
            *sorted(dict.fromkeys(map(tuple, chosen)), key=lambda words: "--ckpt_path" in words),
        ]:
            code, out = server.run(*words)
            assert code == 0, f"{shlex.join(words)}: {out}"


def test_before_and_after(reader, cifar_root, fit):
    """The README's script runs; the module in its place has equal losses on one device and two."""
    before = reader / "train.py"
    assert len([line for line in before.read_text().splitlines() if line and line[0] != "#"]) <= 15
    (reader / "data").symlink_to(cifar_root)
    assert np.isfinite(runpy.run_path(str(before))["loss"].item())
    words = words_of(next(c for c in commands(ROOT / "README.md") if "my_code" in c))[4:]
    runs = []
    flags = [*options(batch_size=8, max_epochs=2, log_every_n_steps=1), *QUIET]
    for more in ([], on_cpu("dp")):
        runs.append(losses(fit(*words[: words.index("--trainer.strategy")], *more, *flags)))
    np.testing.assert_allclose(*runs, rtol=1e-5)
    (reader / "data").unlink()


@pytest.mark.parametrize("document", MARKDOWN, **NAME)
def test_links(document):
    """Each link leads to a file, and to a heading in it."""
    for link in re.findall(r"\]\(([^)\s]+)\)", text(document)):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        if anchor:
            prose = re.sub(r"^```.*?^```", "", target.read_text(), flags=re.M | re.S)
            headings = re.findall(r"^#+ (.*)$", prose.lower(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings]
            assert anchor in slugs, link


def test_examples_in_other_languages(reader):
    """YAML examples parse as experiments; Python examples compile, and their imports exist."""
    for document in MARKDOWN:
        for block in blocks(document, "yaml"):
            (reader / "example.yaml").write_text(block)
            read_compare(["--experiment", "example.yaml"])
        for block in blocks(document, "python"):
            compile(block, str(document), "exec")
            exec(
                "\n".join(
                    [line for line in block.splitlines() if line.startswith(("import ", "from "))]
                ),
                {},
            )


def test_documents_are_short():
    readme = text(ROOT / "README.md")
    assert len(readme.split()) <= 1000
    assert (
        sum(len(text(guide).split()) for guide in {path.resolve() for path in BESIDE_CODE}) <= 7500
    )


def test_the_version_is_one():
    version = PYPROJECT["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert version == app.__version__ == citation["version"]
    assert f"## [{version}] - {citation['date-released']}" in (ROOT / "CHANGELOG.md").read_text()
