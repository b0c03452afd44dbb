"""Tables of images: classes by name, and the source of a CSV file's images."""

import csv
import io
import os
import re
import unicodedata
from abc import abstractmethod
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.data.image_files import EncodedSource, LabelledFile
from app.data.sources import SplitName, split_of
from app.errors import UserError, one_line
from app.system.files import open_file

SEPARATORS = ",;\t|"


class RowSource(EncodedSource):
    """Source of a table's rows, whose labels are the names of classes."""

    _rows: dict[SplitName, Any]
    _labels: dict[SplitName, list[int]]  # class number of each row; -1 without a label

    @abstractmethod
    def _place(self, split: SplitName, row: int) -> str:
        """Describe the place of a row, for messages."""

    def _number_classes(
        self, labels: Mapping[SplitName, Sequence[str]], declared: Iterable[str] = ()
    ) -> None:
        """Number the classes by name, and set class names and splits.

        Space around a name does not count. A test split without labels becomes the images to
        predict.

        Args:
            labels: Class name of each image, by split; empty or -1 for an image without a label.
            declared: Class names in order; by default the names of training images, sorted by value
                if all are whole numbers.

        Raises:
            UserError: When a label is missing or is no training class, or when two labels differ in
                spelling only.
        """
        names = {split: list(map(str.strip, column)) for split, column in labels.items()}
        classes = list(dict.fromkeys(map(str.strip, declared)))
        if not classes:
            classes = sorted({*names.get("train", [])} - {""})
            if all(map(str.isdecimal, classes)):
                classes.sort(key=int)
        numbers = dict(zip(classes, range(len(classes)), strict=True))
        missing = {"", "-1"} - set(classes)
        spellings: dict[str, str] = {}
        if "test" in names and missing.issuperset(names["test"]):
            names["predict"] = names.pop("test")
            self._rows["predict"] = self._rows.pop("test")
        self.class_names = classes
        self.splits = list(names)
        self._labels = {}
        for split, column in names.items():
            self._labels[split] = [numbers.get(name, -1) for name in column]
            if split == "predict":
                continue
            for name in dict.fromkeys(column):
                where = self._place(split, column.index(name))
                if name in missing:
                    raise UserError(f"{where} has no label: give it one, or delete it")
                first = spellings.setdefault(_spelling(name), name)
                if first != name:
                    raise UserError(
                        f"{where} has label {name!r}, others have {first!r}: "
                        "spell one class alike, name two classes differently"
                    )
                if name not in numbers:
                    raise UserError(
                        f"{where} has label {name!r}, which no training image has: "
                        "correct it, or add such training images"
                    )


def _spelling(name: str) -> str:
    """Return a text that is equal for spellings of a name: case, invisible characters, numbers."""
    number = re.fullmatch(r"(-?)0*(\d+)(?:\.(\d*?)0*)?", name)
    if number is not None:
        return f"{number[1]}{number[2]}.{number[3] or ''}"
    if len(name) == 1:  # A and a may be two classes of handwritten letters
        return name
    visible = "".join(filter(str.isprintable, unicodedata.normalize("NFKC", name)))
    return one_line(visible.casefold())


class TableSource(RowSource):
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
        self.columns = [label_column]
        self._rows = defaultdict(list)  # line number and file of each row
        labels = defaultdict(list)
        lines: dict[str, int] = {}
        columns = {"file": file_column, "label": label_column, "split": split_column}
        for line, cells in _rows(path, columns):
            split_name = cells.get(_folded(split_column), "train")
            split = split_of(split_name)
            if split is None:
                raise UserError(
                    f"{path}, line {line} has split {split_name!r}, not train, val or test: "
                    "correct it"
                )
            file = cells[_folded(file_column)]
            if not file:
                raise UserError(f"{path}, line {line} has no file: give it one, or delete it")
            name = str(Path(path).parent / file)
            if "\\" in file and not os.path.exists(name):  # written on Windows
                name = str(Path(path).parent / file.replace("\\", "/"))
            other = lines.setdefault(os.path.normpath(name), line)
            if other != line:
                raise UserError(
                    f"{path}, lines {other} and {line} have the same file {file}: keep one of them"
                )
            self._rows[split].append((line, name))
            labels[split].append(cells[_folded(label_column)])
        if not labels["train"]:
            raise UserError(f"{path} has no rows of training images: give one for each image")
        self._number_classes(labels)

    def _place(self, split: SplitName, row: int) -> str:
        line, _ = self._rows[split][row]
        return f"{self.root}, line {line}"

    def _files(self, split: SplitName) -> list[LabelledFile]:
        _, files = zip(*self._rows[split], strict=True)
        return list(zip(files, self._labels[split], strict=True))


def _rows(path: str, columns: Mapping[str, str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the line number and the cells of each row of a CSV file. Blank rows are skipped.

    Args:
        path: Path of the file. Its separator is the most frequent one in the header.
        columns: Name of each column to read, by flag; the column `split` may be missing.
    """
    text = _text(path)
    first_line = text.strip().partition("\n")[0]
    separator = max(SEPARATORS, key=first_line.count)
    content = io.StringIO(text, newline="")
    reader = csv.reader(content, delimiter=separator, skipinitialspace=True, strict=True)
    header: list[str] = []
    try:
        for row in reader:
            if not any(map(str.strip, row)):
                continue
            if not header:
                _check_header(path, row, columns)
                header = list(map(_folded, row))
                continue
            if len(row) < len(header) or any(map(str.strip, row[len(header) :])):
                raise UserError(
                    f"{path}, line {reader.line_num} has {len(row)} cells, "
                    f"not {len(header)} as the header: "
                    f'write a cell that contains "{separator}" in quotes'
                )
            yield reader.line_num, dict(zip(header, row, strict=False))
    except csv.Error as error:
        raise UserError(
            f"{path}, line {reader.line_num} cannot be read ({error}): correct its quotes"
        ) from error


def _text(path: str) -> str:
    try:
        with open_file(path) as file:
            content = file.read()
        encoding = "utf-8-sig"
        if content.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
            encoding = "utf-16"
        text = content.decode(encoding)
        if "\0" in text:
            raise ValueError("it has null characters")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"--data.csv {path} cannot be read ({reason}): give a CSV file in UTF-8"
        ) from error
    return text


def _check_header(path: str, header: Sequence[str], columns: Mapping[str, str]) -> None:
    for cell in header:
        if "." in cell and os.path.isfile(Path(path).parent / cell):
            raise UserError(f"{path} begins with an image: insert a first line, such as file,label")
    names = list(map(_folded, header))
    for flag, column in columns.items():
        count = names.count(_folded(column))
        if count > 1:
            raise UserError(f"{path} has {count} columns {column}: rename all but one")
        if count == 0 and column != "split":
            raise UserError(
                f"{path} has no column {column}, but {', '.join(header)}: "
                f"give one to --data.{flag}_column"
            )


def _folded(column: str) -> str:
    return column.strip().casefold()
