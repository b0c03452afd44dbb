"""Tables of images: classes by name, and the source of a CSV file's images."""

import csv
import io
import os
import re
import unicodedata
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.data.image_files import EncodedSource
from app.data.sources import SplitName, split_of
from app.errors import UserError, one_line
from app.system.files import open_file

SEPARATORS = ",;\t|"


def number_classes(
    labels: Mapping[SplitName, Sequence[str]],
    place: Callable[[SplitName, int], str],
    declared: Iterable[str] = (),
) -> tuple[list[str], dict[SplitName, list[int]]]:
    """Number a table's classes, by name. Space around a name does not count.

    Args:
        labels: Class name of each image, by split, `train` first; empty or -1 for an image without
            a label.
        place: Function that describes the place of a split's image, for messages.
        declared: Class names in order; by default the sorted names of training images.

    Returns:
        The class names; and the number of each image's class, by split, -1 for a test split without
        labels.

    Raises:
        UserError: When a label is missing or is no training class, or when two labels differ in
            spelling only.
    """
    labels = {split: [name.strip() for name in names] for split, names in labels.items()}
    classes = [*dict.fromkeys(name.strip() for name in declared)] or _sorted_names(
        labels.get("train", [])
    )
    numbers = {name: number for number, name in enumerate(classes)}
    missing = {"", "-1"} - {*classes}
    spellings: dict[str, str] = {}
    for split, names in labels.items():
        if split == "test" and missing.issuperset(names):  # images to predict
            continue
        for name in dict.fromkeys(names):
            where = place(split, names.index(name))
            if name in missing:
                raise UserError(f"{where} has no label: give it one, or delete it")
            first = spellings.setdefault(_spelling(name), name)
            if first != name:
                raise UserError(
                    f"{where} has label {name!r}, "
                    f"others have {first!r}: spell one class alike, name two classes differently"
                )
            if name not in numbers:
                raise UserError(
                    f"{where} has label {name!r}, which no training image has: correct it, or add such training images"
                )
    return classes, {
        split: [numbers.get(name, -1) for name in names] for split, names in labels.items()
    }


def splits_of(labels: Mapping[SplitName, Sequence[int]]) -> list[SplitName]:
    """Return the splits with these labels; a test split without labels is a split to predict."""
    return ["predict" if -1 in numbers else split for split, numbers in labels.items()]


def _sorted_names(labels: Iterable[str]) -> list[str]:
    """Return the distinct class names, sorted by value if all are whole numbers, else alphabetically."""
    names = sorted({*labels} - {""})
    if not all(map(str.isdecimal, names)):
        return names
    return sorted(names, key=lambda name: name.zfill(len(max(names, key=len))))


def _spelling(name: str) -> str:
    """Return a text that two class names share if they differ only in case, in invisible characters or as numbers."""
    number = re.fullmatch(r"(-?)0*(\d+)(?:\.(\d*?)0*)?", name)
    if number is not None:
        return f"{number[1]}{number[2]}.{number[3] or ''}"
    if len(name) == 1:  # A and a may be two classes of handwritten letters
        return name
    visible = "".join(filter(str.isprintable, unicodedata.normalize("NFKC", name)))
    return one_line(visible.casefold())


class TableSource(EncodedSource):
    """Source of the image files that a CSV file lists.

    Args:
        path: Path of the CSV file, in UTF-8 or UTF-16.
        file_column: Column of the images' paths, relative to the CSV file's folder.
        label_column: Column of the labels.
        split_column: Column of the splits.

    Raises:
        UserError: When the file cannot be read, or a row is ambiguous; the message has the row's
            line number.
    """

    def __init__(self, path: str, file_column: str, label_column: str, split_column: str) -> None:
        self.root = path
        self._label = label_column
        self._rows: dict[SplitName, list[tuple[int, str, str]]] = {"train": []}  # line, file, label
        folder = Path(path).parent
        first: dict[str, int] = {}
        columns = {"file": file_column, "label": label_column, "split": split_column}
        for line, (file, label, split_name) in _rows(path, columns):
            split = split_of(split_name)
            if split is None:
                raise UserError(
                    f"{path}, line {line} has split {split_name!r}, not train, val or test: correct it"
                )
            if not file:
                raise UserError(f"{path}, line {line} has no file: give it one, or delete it")
            name = str(folder / file)
            if "\\" in file and not os.path.exists(name):  # written on Windows
                name = str(folder / file.replace("\\", "/"))
            other = first.setdefault(os.path.normpath(name), line)
            if other != line:
                raise UserError(
                    f"{path}, lines {other} and {line} have the same file {file}: keep one of them"
                )
            self._rows.setdefault(split, []).append((line, name, label))
        if not self._rows["train"]:
            raise UserError(f"{path} has no rows of training images: give one for each image")
        labels = {split: [label for _, _, label in rows] for split, rows in self._rows.items()}
        self.class_names, self._labels = number_classes(labels, self._place)
        self.splits = splits_of(self._labels)

    def _place(self, split: SplitName, row: int) -> str:
        return f"{self.root}, line {self._rows[split][row][0]}"

    def settings(self, split: SplitName) -> Sequence[Any]:  # noqa: D102
        return [*super().settings(split), os.path.abspath(self.root), self._label]

    def encoded(self, split: SplitName) -> Sequence[str]:  # noqa: D102
        files = super().encoded(split)
        # the cache depends on the table, too, because the table holds the labels
        return files if split == "predict" and self.predict_dir is not None else [self.root, *files]

    def _files(self, split: SplitName) -> list[tuple[str, int]]:
        return [
            (name, label)
            for (_, name, _), label in zip(self._rows[split], self._labels[split], strict=True)
        ]


def _rows(path: str, columns: Mapping[str, str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number of each row of a CSV file, and its cells in some columns. Blank rows are skipped.

    Args:
        path: Path of the file. Its separator is the one that finds the most columns in the header.
        columns: Name of each column, by flag; the column `split` may be missing.
    """
    text = _text(path)
    if not text.strip():
        return
    first_line = next(filter(str.strip, io.StringIO(text, newline=None)))
    wanted = {_folded(name) for name in columns.values()}
    separator = max(
        SEPARATORS, key=lambda candidate: len(wanted & {*map(_folded, first_line.split(candidate))})
    )
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True, strict=True
    )
    rows = ((reader.line_num, row) for row in reader if any(map(str.strip, row)))
    try:
        _, header = next(rows)
        places = _places(path, header, columns)
        for line, row in rows:
            if len(row) < len(header) or any(map(str.strip, row[len(header) :])):
                raise UserError(
                    f"{path}, line {line} has {len(row)} cells, not {len(header)} as the header: write a cell "
                    f'that contains "{separator}" in quotes'
                )
            yield line, ["train" if place is None else row[place] for place in places]
    except csv.Error as error:
        raise UserError(
            f"{path}, line {reader.line_num} cannot be read ({error}): correct its quotes"
        ) from error


def _text(path: str) -> str:
    try:
        with open_file(path) as file:
            content = file.read()
        is_utf16 = content.startswith((BOM_UTF16_LE, BOM_UTF16_BE))
        text = content.decode("utf-16" if is_utf16 else "utf-8").lstrip(
            "\ufeff"
        )  # a byte order mark
        if "\0" in text:
            raise ValueError("it has null characters")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"--data.csv {path} cannot be read ({reason}): give a CSV file in UTF-8"
        ) from error
    return text


def _places(path: str, header: Sequence[str], columns: Mapping[str, str]) -> list[int | None]:
    """Return each column's place in a row; None for a missing column `split`."""
    if any("." in cell and os.path.isfile(Path(path).parent / cell) for cell in header):
        raise UserError(f"{path} begins with an image: insert a first line, such as file,label")
    names = [_folded(cell) for cell in header]
    places: list[int | None] = []
    for flag, column in columns.items():
        matches = [place for place, name in enumerate(names) if name == _folded(column)]
        if len(matches) > 1:
            raise UserError(f"{path} has {len(matches)} columns {column}: rename all but one")
        if not matches and column != "split":
            raise UserError(
                f"{path} has no column {column}, but {', '.join(header)}: give one to --data.{flag}_column"
            )
        places.append(matches[0] if matches else None)
    return places


def _folded(column: str) -> str:
    return column.strip(' "').casefold()
