"""The report of a training: its content, and failures to write it, which do not end a run."""

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from harness import (
    QUIET,
    App,
    fork_app,
    last_of,
    on_cpu,
    options,
    output_of,
    record_of,
    seen_colours,
    tiny,
)
from matplotlib.figure import Figure

from app.monitor.course import MOST, Course
from app.monitor.report import draw_images, leave_report, make_report, paint_confusion, stacked_bars
from app.monitor.summary import report
from app.record import PHASES, Record
from app.record.words import duration
from app.system.files import read_csv, write_csv
from app.system.page import Section, draw, draw_line, label_lines, page, plain, short, table

SMALL = tiny(400, 20, name="x")
pytestmark = pytest.mark.usefixtures("drawn")
WINDOWS = ["--trainer.log_every_n_steps", "4"]


class Reader(HTMLParser):
    """Parser that collects a page's title, picture names and loaded files, and checks that every tag is closed."""

    VOID = ("meta", "img", "br", "hr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.title, self.pictures, self.loaded, self.text = "", [], [], ""
        self.ids: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, f"left open: {self._open}"
        assert len(self.ids) == len(set(self.ids)), "an id is that of one thing"
        assert "<script" not in text
        self.loaded += re.findall(r"url\((?!#)[^)]*\)|@import[^;]*", text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag not in self.VOID:
            self._open.append(tag)
        self.ids += [str(values["id"])] if "id" in values else []
        self.pictures += (
            [str(values["aria-label"])]
            if tag == "svg"
            else [str(values["alt"])]
            if tag == "img"
            else []
        )
        links = [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")
        ]
        self.loaded += [link for link in links if not link.startswith(("#", "data:"))]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self._open = self._open[: -(tag not in self.VOID) or None]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "title" in self._open:
            self.title += data
        self.text += data


def read(run: Path) -> Reader:
    reader = Reader((run / "report.html").read_text())
    assert not reader.loaded, "it needs no other file"
    return reader


def test_the_report_of_a_training(app: App, tmp_path: Path) -> None:
    out = output_of(
        *app("fit", *SMALL, *WINDOWS, "--trainer.max_epochs", "2", "--model.schedule", "linear")
    )
    run = tmp_path / "runs" / "x" / "version_0"
    assert "report.html" in out
    assert all(
        colour in (run / "report.html").read_text()
        for colour in ("currentColor", "stroke: var(--blue)")
    )
    reader, record = read(run), record_of(run)
    accuracy = f"{100 * record['test']['acc']:.2f} %"
    assert reader.title == f"{accuracy} on 80 test images after 2 epochs (one CPU)"
    assert reader.pictures == [
        "Training and validation loss against epochs",
        "Training and validation accuracy against epochs",
        "Learning rate against epochs",
        "Counts of label against prediction",
        "Test images, each with its label and its prediction",
        "Samples/s of each logging window, over time",
        "Memory of each rank, over time",
        "Milliseconds of each part of a step",
    ]
    for text in (
        "CIFARCNN, LeNet, 62,006 parameters",
        "Synthetic: 360 training, 40 validation, 80 test",
        "letter, wave",
    ):
        assert text in reader.text
    for text in ("most confused", record["command"], record["hardware"]["cpu"]):
        assert text in reader.text
    course = record["course"]
    assert len(course["samples_per_s"]) == 8, "18 steps of an epoch are 4 windows"
    assert all(0.05 < memory < 20 for _, memory in course["memory_gib"])
    for stage in ("test", "validate", "predict"):
        output_of(*app(stage, *SMALL, "--ckpt_path", last_of(run), "--run.name", stage))
        assert not list((tmp_path / "runs" / stage).glob("**/report.html"))


def test_where_other_programs_took_the_cores_no_remedy_is_for_the_model(
    app: App, tmp_path: Path
) -> None:
    """Report and summary agree on a busy machine, and give a slow step's time in seconds."""
    output_of(*app("fit", *SMALL, *WINDOWS))
    record = Record.load((run := tmp_path / "runs" / "x" / "version_0") / "run.json")
    assert record.hardware
    assert record.time_per_step
    record.hardware.cores, record.time_per_step.forward_backward = 2, 7390.0
    busy = "Other programs: 1.8 of 2 cores. Try again when they are done."
    for others, expected in ((1.8, busy), (0.1, "The model's own computation")):
        record.others_cores = others
        reader = Reader(make_report(run, record))
        assert "A step takes 7.4 s." in reader.text
        assert expected in reader.text
        assert (
            "; other programs took 1.8 of 2 cores" in "".join(report(record, [], fitted=True))
        ) == (others > 1)


LONG = [
    "American_staffordshire_terrier",
    "Großer Schweizer Sennenhund",
    "x",
    "single from disk with 28 workers",
]
COUNTS = np.random.default_rng(0).integers(10_000, 99_999, (20, 20))
STEPS = [
    SimpleNamespace(data=n, forward_backward=9, communication=n, optimizer=3, rest=1)
    for n in (1, 3, 40, 0.1)
]
FLAT = [(2.305121, "training", "red"), (2.305120, "validation", "blue")]
PICTURES: dict[str, Callable[[], Figure]] = {
    "a step of variants": lambda: draw(
        partial(stacked_bars, labels=[short(n, 28) for n in LONG], phases=PHASES, rows=STEPS)
    ),
    "4 classes": lambda: draw(lambda axes: paint_confusion(axes, COUNTS[:4, :4], LONG), 5.0, 4.6),
    "20 classes": lambda: draw(lambda axes: paint_confusion(axes, COUNTS, 5 * LONG), 5.0, 4.6),
    "flat losses": lambda: draw_line(
        lambda axes: (axes.plot([2.30512, 2.305121]), label_lines(axes, FLAT))
    ),
    "wrong images": lambda: draw_images(
        [(torch.rand(3, 9, 9), f"{short(n, 24)}\npredicted {short(n, 13)}, 99%") for n in LONG]
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_of_a_picture_is_cut_or_covers_another(name: str) -> None:
    figure = PICTURES[name]()
    figure.draw_without_rendering()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert min(box.x0, box.y0, width - box.x1, height - box.y1) > -0.01, "inches"
    inside = [
        text.get_window_extent() for axes in figure.axes for text in axes.texts if text.get_text()
    ]
    assert not [pair for pair in itertools.combinations(inside, 2) if pair[0].overlaps(pair[1])]


DURATIONS = {0: "0.0 s", 2e-5: "20 µs", 0.00739: "7.39 ms", 0.9996: "1.0 s", 250: "4:10"}


def test_durations_without_powers_of_ten() -> None:
    assert {seconds: duration(seconds) for seconds in DURATIONS} == DURATIONS


def test_a_run_does_not_read_its_record(
    app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run writes its report without reading its record, because reading imports pydantic, which takes 0.1 s.

    A report written later from the record's file is the same, although the file has null for each
    NaN.
    """
    with monkeypatch.context() as patch:
        patch.setattr(Record, "load", None)
        output_of(
            *app(
                "fit",
                *SMALL,
                *options(max_epochs=2, on_nonfinite="warn"),
                "--model.optimizer.lr",
                "1e16",
            )
        )
    written = read(run := tmp_path / "runs" / "x" / "version_0").text
    (run / "report.html").unlink()
    leave_report(str(run))
    assert read(run).text == written


def test_memory_of_each_rank(tmp_path: Path) -> None:
    output_of(*fork_app("fit", *SMALL, *WINDOWS, *on_cpu("ddp_fork", max_epochs=1, root=tmp_path)))
    run = tmp_path / "x" / "version_0"
    reader, record = read(run), record_of(run)
    assert reader.title.endswith("on 80 test images after 1 epoch (ddp_fork, 2 × CPU)")
    for text in ("20 = 2 × 10", "The learning rate was 0.001 throughout."):
        assert text in reader.text
    assert {len(point) for point in record["course"]["memory_gib"]} == {3}
    assert "Milliseconds of a step on each rank" in reader.pictures


USER_CODE = [
    ("LogsNothing", "TheirTestedData", "Trained after 1 epoch", "validate"),
    ("LogsAccuracy", "TheirData", r"\d+\.\d\d % on validation images after 1 epoch", "validate"),
    ("LogsAccuracy", "TheirTestedData", r"\d+\.\d\d % on test images after 1 epoch", "test"),
    ("LogsAccuracy", "TwoLoaders", "Trained after 1 epoch", "validate"),
    ("LogsOtherNames", "TheirTestedData", "Trained after 1 epoch", "test"),
    ("TwoOptimizers", "TheirData", "Trained after 1 epoch", "validate"),
    ("TheirModel", "NoValidation", "Trained after 1 epoch", None),
]


@pytest.mark.parametrize(("model", "data", "title", "use"), USER_CODE)
def test_somebodys_code(
    model: str, data: str, title: str, use: str | None, app: App, tmp_path: Path
) -> None:
    """The report is written whatever a user's module logs, and the printed command works.

    `fit` ends with a test if both module and data define one.
    """
    flags = ["--model", f"user_code.{model}", "--data", f"user_code.{data}", *QUIET]
    out = output_of(*app("fit", *flags, *options(accelerator="cpu", max_epochs=1, name="x")))
    run = tmp_path / "runs" / "x" / "version_0"
    assert re.match(title, read(run).title)
    assert "Learning" in read(run).text
    assert (record_of(run)["tested"] is not None) == (use == "test")
    assert ("test            loss" in out) == (model == "LogsOtherNames")
    command = re.findall(r"^use it +python -m app (.*)", out, re.MULTILINE)
    assert [words.split()[0] for words in command] == [use] * bool(use)
    for words in command:
        output_of(*app(*shlex.split(words)))


def test_failures(
    app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """If the report cannot be written, or the record cannot be read, a line is printed, and no error is raised."""
    monkeypatch.setattr(
        "app.monitor.report.write_text", Mock(side_effect=OSError(28, "No space left on device"))
    )
    out = output_of(*app("fit", *SMALL, "--trainer.max_epochs", "1", "--run.test", "false"))
    run = tmp_path / "runs" / "x" / "version_0"
    assert f"{run / 'report.html'} cannot be written (No space left on device)\n" in out
    assert not (run / "report.html").exists()
    (run / "run.json").write_text("{")
    leave_report(str(run))
    assert re.fullmatch(
        r".*report.html cannot be written \(ValueError: .*\)\n", capfd.readouterr().err
    )


def test_pages_are_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    code = "import sys; from app.system.files import write_text, Path; write_text(Path(sys.argv[1]), '2 \\xd7 \\udcff')"
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run(
        [sys.executable, "-c", code, tmp_path / "page.html"], env=env, timeout=100, check=True
    )
    assert (tmp_path / "page.html").read_bytes() == "2 × ?".encode()


NAME = "<img src=x onerror=alert(1)> ![](http://e.com/a.png) [x](http://e.com) *_`|$\\"


def test_names_are_names(tmp_path: Path, image_root: Path) -> None:
    """Names are shown literally, even if they contain HTML, Markdown or mathematics."""
    reader = Reader(
        page(NAME, plain(NAME), [Section(NAME, table([NAME, ""], [[NAME, 1]]), folded=True)], {})
    )
    assert not reader.loaded
    assert reader.text.count(NAME) == 6
    name = "=<b>a$b$"
    for split in ("train", "test"):
        shutil.move(image_root / split / "eel", image_root / split / name)
    data = [
        "--data",
        "ImageFolder",
        "--data.root",
        image_root,
        "--data.batch_size",
        "4",
        *QUIET,
        "--run.name",
        "<i>x",
    ]
    output_of(*fork_app("fit", *data, "--trainer.max_epochs", "1", "--run.root", tmp_path))
    run = tmp_path / "<i>x" / "version_0"
    assert name in read(run).text
    assert f"\n'{name},0," in (run / "confusion_matrix.csv").read_text()


def test_tables_hold_no_formulas(tmp_path: Path) -> None:
    """Spreadsheets show an apostrophe's cell as text. Numbers remain, and `read_csv` returns what was written."""
    line = [
        "=A1",
        "+x",
        "-x",
        "@x",
        "\tx",
        "\rx",
        "＝x",
        "'x",
        "a=b",
        "./-x.jpg",
        "-0.5",
        -0.5,
        "-inf",
        "1e-3",
        "",
    ]
    written = "'=A1,'+x,'-x,'@x,'\tx,\"'\rx\",'＝x,''x,a=b,./-x.jpg,-0.5,-0.5,-inf,1e-3,\r\n"
    write_csv(tmp_path / "x.csv", [line])
    assert (tmp_path / "x.csv").read_bytes().decode() == written
    assert read_csv(tmp_path / "x.csv") == [[str(cell) for cell in line]]


def test_the_course_of_a_long_run() -> None:
    """The course of a long run has a limited number of points, evenly spaced from the beginning to the end."""
    course = Course()
    for number in range(10 * MOST + 7):
        course.add(number, number)
    times = [seconds for seconds, _ in course.points]
    assert MOST / 2 <= len(times) <= MOST
    assert len({after - before for before, after in itertools.pairwise(times)}) == 1
    assert times[0] == 0
    assert times[-1] > 9.8 * MOST
    wide = Course(1000)
    for number in range(MOST):
        wide.add(number, *[0.0] * 1000)
    assert len(wide.points) <= 20


@pytest.mark.browser
@pytest.mark.parametrize("scheme", [0, 1], ids=["dark", "light"])
def test_in_a_browser(scheme: int, app: App, tmp_path: Path) -> None:
    assert app("fit", *SMALL, *WINDOWS, "--trainer.max_epochs", "1")[0] == 0
    flags = ["--window-size=1200,4000", f"--blink-settings=preferredColorScheme={scheme}"]
    colours = seen_colours(tmp_path / "runs" / "x" / "version_0" / "report.html", *flags)
    papers, blues = ((0x14, 0x18, 0x1D), (255, 255, 255)), ((0x6E, 0xA2, 0xFF), (0x2F, 0x62, 0xC9))
    assert max(colours, key=lambda colour: colours[colour]) == papers[scheme]
    # more than 100 pixels have this scheme's line colour, and fewer than 100 have the other
    # scheme's
    assert colours.get(blues[scheme], 0) > 100 > colours.get(blues[1 - scheme], 0)
