"""The report of a training: its content, and failures to write it, which do not end a run."""

import html
import itertools
import re
import shlex
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from forked import fork_fit
from harness import QUIET, SLOW, last_of, on_cpu, options, record_of, seen_colours, slow, tiny

from app.monitor.loggers import read_rows
from app.monitor.report import draw_bars, draw_confusion_matrix, leave_report, make_report
from app.monitor.series import MOST, Series
from app.monitor.summary import report
from app.record import PHASES, Record
from app.record.words import accuracy, bottleneck, duration
from app.system.files import read_csv, write_csv, write_text
from app.system.page import Section, draw, page, plain, short, table
from app.use.inference import load

SMALL = tiny(400, 20, name="x")
pytestmark = pytest.mark.usefixtures("drawn")
WINDOWS = ["--trainer.log_every_n_steps=4"]


class Page:
    """Title, descriptions of pictures, and text of a page without scripts and other files."""

    def __init__(self, source: str):
        assert "<script" not in source
        links = re.findall(r"""\b(?:src|href|srcset)="([^"]*)|url\(([^)]*)|(@import)""", source)
        assert all("".join(link).startswith(("#", "data:")) for link in links)
        ids = re.findall(r' id="([^"]*)', source)
        assert len(ids) == len(set(ids))
        self.title = html.unescape(re.findall("<title>(.*)</title>", source)[0])
        self.pictures = re.findall(r'(?:aria-label|alt)="([^"]*)', source)
        self.text = html.unescape(re.sub("<[^>]*>", "", source))


def read(run):
    return Page((run / "report.html").read_text())


def test_report_has_result_curves_and_settings(app, fit):
    run = fit(*SMALL, *WINDOWS, "--trainer.max_epochs=2", "--model.schedule=linear")
    source = (run / "report.html").read_text()
    assert "stroke: var(--2f62c9, #2f62c9)" in source
    page = read(run)
    record = record_of(run)
    title = rf"{100 * record['test']['acc']:.1f} % \(.*\) on 80 test images after 2 epochs"
    assert re.match(title, page.title)
    assert page.pictures == [
        "Loss; faint: each logging window",
        "Accuracy",
        "Confusion matrix of test: label against prediction, %",
        "Most confidently wrong",
        "Where the time of a step goes, on rank zero",
    ]
    for text in (
        "LeNet, 62,006 parameters, 3 × 32 × 32 → 10 classes",
        "Synthetic (CIFAR10): 360 to train, 40 to validate, 80 to test",
        "letter, wave",
        "SGD, lr 0.001, momentum 0.9; linear over 36 steps",
        "most confused",
        record["command"],
        record["hardware"]["cpu"],
    ):
        assert text in page.text
    assert len(record["course"]["samples_per_s"]) == 8, "18 steps of an epoch are 4 windows"
    assert all(0.05 < memory < 20 for _, memory in record["course"]["memory_gib"])
    app("test", *SMALL, "--ckpt_path", last_of(run), "--run.name=y")
    assert not list((run.parents[1] / "y").glob("**/report.html"))


@SLOW
def test_other_programs_are_the_bottleneck_of_a_busy_cpu(fit):
    """Report and summary agree on a busy machine, and give a slow step's time in seconds."""
    run = fit(*SMALL, *WINDOWS)
    record = Record.load(run / "run.json")
    assert record.hardware
    assert record.time_per_step
    record.hardware.cores = 2
    record.time_per_step.forward_backward = 7390.0
    busy = "Other programs: 1.8 of 2 cores. Try again when they are done."
    for others, expected in ((1.8, busy), (0.1, "The model's own computation")):
        record.others_cores = others
        page = Page(make_report(run, record))
        assert "A step takes 7.4 s." in page.text
        assert expected in page.text
        lines = "".join(report(record, [], fitted=True))
        assert ("; other programs took 1.8 of 2 cores" in lines) == (others > 1)


def test_other_programs_may_slow_down_the_loading_for_a_gpu():
    times = {**dict.fromkeys(PHASES, 1.0), "data": 9.0, "launch": 1.0}
    assert bottleneck(times, True, "disk", "1 of 2 cores")[0] == "Other programs: 1 of 2 cores"


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
PICTURES = {
    "a step of variants": lambda: draw_bars([short(n, 28) for n in LONG], PHASES, STEPS),
    "4 classes": lambda: draw_confusion_matrix(COUNTS[:4, :4], LONG),
    "1 class": lambda: draw_confusion_matrix(COUNTS[:1, :1], ["x"]),
    "20 classes": lambda: draw_confusion_matrix(COUNTS, 5 * LONG),
    "60 classes": lambda: draw_confusion_matrix(np.eye(60), 15 * LONG),
    "flat losses": lambda: draw(lambda axes: axes.plot([2.30512, 2.305121], label=LONG[3])),
}


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_of_a_picture_is_cut_or_covers_another(name):
    figure = PICTURES[name]()
    figure.draw_without_rendering()
    box = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert min(box.x0, box.y0, width - box.x1, height - box.y1) > -0.01, "inches"
    inside = [
        text.get_window_extent() for axes in figure.axes for text in axes.texts if text.get_text()
    ]
    assert not [pair for pair in itertools.combinations(inside, 2) if pair[0].overlaps(pair[1])]


DURATIONS = {0: "0.0 s", 2e-5: "20 µs", 0.00739: "7.39 ms", 0.9996: "1.0 s", 250: "4:10"}


def test_durations():
    assert {seconds: duration(seconds) for seconds in DURATIONS} == DURATIONS


def test_accuracy_has_its_interval():
    """By hand, with z² = 3.84: of 10, all are right: from 10 / (10 + 3.84) on."""
    assert accuracy(1, 10) == "100.0 % (72.2 to 100.0)"


VALIDATED = [
    on_cpu("auto", virtual_devices=3),
    on_cpu("dp", 3),
    slow(on_cpu("ddp_fork", virtual_devices=3)),
]


@SLOW
@pytest.mark.parametrize("flags", VALIDATED)
def test_without_a_test_the_report_shows_the_validation(flags, image_root, tmp_path):
    """The best weights, averages here, classify each validation image once."""
    shutil.move(image_root / "test", image_root / "val")
    data = ["--data=ImageFolder", f"--data.root={image_root}", "--data.batch_size=9", *QUIET]
    learn = ["--model.ema=0.8", "--model.optimizer.lr=0.03"]
    run = fork_fit(tmp_path, *data, *flags, *learn, "--trainer.max_epochs=2")
    pairs = Counter()
    wrong = set()
    for prediction in load(run, "cpu").predict(image_root / "val"):
        pair = (Path(prediction.file).parent.name, *prediction.names)
        pairs[pair] += 1
        if pair[0] != pair[1]:
            wrong.add(prediction.file)
    (corner, *names), *rows = read_csv(run / "confusion_matrix.csv")
    assert corner == "validation: label \\ predicted"
    for label, *counts in rows:
        assert list(map(int, counts)) == [pairs[label, name] for name in names]
    assert {row[0] for row in read_csv(run / "most_wrong.csv")[1:]} == wrong
    assert wrong.pop() in read(run).text
    assert record_of(run)["validation"]["samples"] == 12
    logged = [bool(row["val_acc"]) for row in read_rows(run / "metrics.csv")]
    assert sum(logged) == 2, "only those of the epochs"


def test_a_run_does_not_read_its_record(fit, monkeypatch):
    """Reading a record imports pydantic, which takes 0.1 s.

    A report written later from the record's file is the same, although the file has null for each
    NaN.
    """
    flags = [*options(max_epochs=2, on_nonfinite="warn"), "--model.optimizer.lr=1e16"]
    with monkeypatch.context() as patch:
        patch.setattr(Record, "load", None)
        run = fit(*SMALL, *flags)
    written = read(run).text
    (run / "report.html").unlink()
    leave_report(str(run))
    assert read(run).text == written


USER_CODE = [
    ("LogsNothing", "TheirTestedData", "Trained after 1 epoch", "validate"),
    ("LogsAccuracy", "TheirData", r"[\d.]+ % \(.*\) on 40 validation images", "validate"),
    ("LogsAccuracy", "TheirTestedData", r"[\d.]+ % \(.*\) on 40 test images", "test"),
    ("LogsAccuracy", "TwoLoaders", "Trained after 1 epoch", "validate"),
    ("LogsOtherNames", "TheirTestedData", "Trained after 1 epoch", "test"),
    ("TwoOptimizers", "TheirData", "Trained after 1 epoch", "validate"),
    ("TheirModel", "NoValidation", "Trained after 1 epoch", None),
]


@pytest.mark.parametrize(("model", "data", "title", "use"), USER_CODE)
def test_users_code_has_a_report(model, data, title, use, app, tmp_path):
    """The report is written whatever a user's module logs, and the printed command works.

    `fit` ends with a test if both module and data define one.
    """
    flags = [f"--model=user_code.{model}", f"--data=user_code.{data}", *QUIET]
    out = app("fit", *flags, *options(accelerator="cpu", max_epochs=1, name="x"))
    run = tmp_path / "runs/x/version_0"
    assert re.match(title, read(run).title)
    assert "Learning" in read(run).text
    assert (record_of(run)["tested"] is not None) == (use == "test")
    assert ("test            loss" in out) == (model == "LogsOtherNames")
    command = re.findall(r"^use it +python -m app (.*)", out, re.MULTILINE)
    assert [words.split()[0] for words in command] == [use] * bool(use)
    for words in command:
        app(*shlex.split(words))


def test_unwritable_report_prints_a_line(app, tmp_path, monkeypatch, capfd):
    """A report that cannot be written, or a damaged record, raises no error."""
    monkeypatch.setattr(
        "app.monitor.report.write_text", Mock(side_effect=OSError(28, "No space left on device"))
    )
    out = app("fit", *SMALL, "--trainer.max_epochs=1", "--run.test=false")
    run = tmp_path / "runs/x/version_0"
    assert (
        f"{run / 'report.html'} cannot be written (OSError: [Errno 28] No space left on device)\n"
        in out
    )
    assert not (run / "report.html").exists()
    (run / "run.json").write_text("{")
    leave_report(str(run))
    assert re.fullmatch(
        r".*report.html cannot be written \(ValueError: .*\)\n", capfd.readouterr().err
    )


def test_pages_are_utf_8(tmp_path):
    write_text(tmp_path / "page.html", "2 \xd7 \udcff")
    assert (tmp_path / "page.html").read_bytes() == "2 × ?".encode()


NAME = "<img src=x onerror=alert(1)> ![](http://e.com/a.png) [x](http://e.com) *_`|$\\"


def test_names_are_shown_literally(tmp_path, image_root):
    """Names are shown literally, even if they contain HTML, Markdown or mathematics."""
    section = Section(NAME, table([NAME, ""], [[NAME, 1]]), folded=True)
    assert Page(page(NAME, plain(NAME), [section], {})).text.count(NAME) == 6
    name = "=<b>a$b$"
    for split in ("train", "test"):
        shutil.move(image_root / split / "eel", image_root / split / name)
    data = [
        "--data=ImageFolder",
        "--model=CIFARCNN",
        *options(batch_size=4, max_epochs=1),
        f"--data.root={image_root}",
    ]
    run = fork_fit(tmp_path, *data, *QUIET, "--run.name=<i>x")
    assert name in read(run).text
    assert f"\n'{name},0," in (run / "confusion_matrix.csv").read_text()


def test_tables_hold_no_formulas(tmp_path):
    """Spreadsheets show a cell with an apostrophe as text. `read_csv` removes the apostrophe."""
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
        "-inf",
        "1e-3",
    ]
    line += [-0.5, ""]
    written = "'=A1,'+x,'-x,'@x,'\tx,\"'\rx\",'＝x,''x,a=b,./-x.jpg,-0.5,-inf,1e-3,-0.5,\r\n"
    write_csv(tmp_path / "x.csv", [line])
    assert (tmp_path / "x.csv").read_bytes().decode() == written
    assert read_csv(tmp_path / "x.csv") == [[str(cell) for cell in line]]


def test_course_of_a_long_run_is_thinned():
    """The course of a long run has a limited number of points, evenly spaced."""
    course = Series()
    for number in range(10 * MOST + 7):
        course.add(number, number)
    times = [seconds for seconds, _ in course.points]
    assert MOST / 2 <= len(times) <= MOST
    assert len({after - before for before, after in itertools.pairwise(times)}) == 1
    assert times[0] == 0
    assert times[-1] > 9.8 * MOST


@pytest.mark.browser
@pytest.mark.parametrize("scheme", [0, 1], ids=["dark", "light"])
def test_in_a_browser(scheme, fit):
    run = fit(*SMALL, *WINDOWS, "--trainer.max_epochs=3")
    flags = ["--window-size=1200,4000", f"--blink-settings=preferredColorScheme={scheme}"]
    colours = seen_colours(run / "report.html", *flags)
    papers = ((0x14, 0x18, 0x1D), (255, 255, 255))
    blues = ((0x6E, 0xA2, 0xFF), (0x2F, 0x62, 0xC9))
    assert max(colours, key=colours.__getitem__) == papers[scheme]
    # more than 100 pixels have this scheme's line colour, and fewer than 100 have the other
    # scheme's
    assert colours.get(blues[scheme], 0) > 100 > colours.get(blues[1 - scheme], 0)
