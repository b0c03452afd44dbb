"""Source of a data set that Hugging Face's library `datasets` reads."""

import re
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import fsspec
from PIL import Image

from app.data.geometry import Geometry
from app.data.image_files import EncodedSource, FileSplit, open_image
from app.data.sources import Split, SplitName, splits_in
from app.data.tables import number_classes, splits_of
from app.errors import UserError, one_line
from app.system.files import open_file


class RowSplit(FileSplit):
    """Labelled images of a table's rows, decoded and resized when they are read.

    Args:
        rows: The table, with one column of images.
        labels: Label of each image.
        place: Name of the table, for messages.
        source: Source of the images.
        ragged: As for `FileSplit`.
    """

    def __init__(
        self,
        rows: Any,
        labels: Sequence[int],
        place: str,
        source: EncodedSource,
        ragged: Geometry | None,
    ) -> None:
        super().__init__(None, labels, source.image_shape, source.geometry, ragged)
        self._rows = rows
        self._place = place

    def _open(self, index: int) -> Image.Image:
        (image,) = self._rows[index].values()
        content = image["bytes"]
        if content is None:
            with fsspec.open(image["path"]) as file:
                content = file.read()
        return open_image(BytesIO(content))

    def _name(self, index: int) -> str:
        return f"row {index} of {self._place}"


class HuggingFaceSource(EncodedSource):
    """Source of a Hugging Face data set on disk, behind a URL, or on the Hub.

    The library memory-maps the tables, so they may be larger than memory.

    Args:
        path: Folder, file, URL or name of the data set.
        image_column: Column of the images, or None for the only column of type Image.
        label_column: Column of the labels, or None for the only column of type ClassLabel.

    Raises:
        UserError: When the data set cannot be read, or columns or labels are missing.
    """

    def __init__(self, path: str, image_column: str | None, label_column: str | None) -> None:
        try:
            import datasets
        except ImportError:
            raise UserError(
                "--data HuggingFace: datasets is not installed: pip install datasets"
            ) from None
        self.root = path
        is_saved = any(Path(path, name).is_file() for name in ("dataset_dict.json", "state.json"))
        try:
            for file in Path(path).rglob("*") if is_saved else ():
                if file.suffix in (".arrow", ".json"):
                    open_file(file).close()  # rejects pipes, where `datasets` would wait
            if path.endswith(".parquet"):
                made = datasets.load_dataset("parquet", data_files=path)
            else:
                made = (
                    datasets.load_from_disk if is_saved or "://" in path else datasets.load_dataset
                )(path)
        except Exception as error:  # `datasets` raises many types of exceptions
            raise UserError(
                f"--data.path {path} cannot be read ({one_line(str(error))[:200]})"
            ) from error
        made = made if isinstance(made, dict) else {"train": made}
        tables = {
            split: made[name] for split, name in splits_in(f"--data.path {path}", made).items()
        }
        if "train" not in tables:
            raise UserError(f"--data.path {path} has no split train, but {', '.join(made)}")
        features = tables["train"].features
        self._image = self._column(features, datasets.Image, "image", image_column)
        self._label = self._column(features, datasets.ClassLabel, "label", label_column)
        tables = {split: table for split, table in tables.items() if len(table)}
        names = {split: self._names(table) for split, table in tables.items()}
        declared = getattr(features[self._label], "names", None) or ()
        self.class_names, self._labels = number_classes(names, self._place, declared)
        self.splits = splits_of(self._labels)
        self._tables = {
            split: table.select_columns([self._image]).cast_column(
                self._image, datasets.Image(decode=False)
            )
            for split, table in tables.items()
        }

    def _names(self, table: Any) -> list[str]:
        """Return each row's class name, by the table's own names of its numbers; empty without a label."""
        feature = table.features.get(self._label)
        if feature is None:
            return [""] * len(table)
        kind = type(feature).__name__
        if kind in ("ClassLabel", "Value"):
            kind = feature.dtype
        if not re.fullmatch(r"u?int\d+|bool|.*string.*", kind):
            raise UserError(
                f"--data.path {self.root}: column {self._label} has {kind} values: "
                "give a column with one name or whole number per image to --data.label_column"
            )
        names = dict(enumerate(getattr(feature, "names", None) or ()))
        return [
            "" if value is None else names.get(value, str(value)) for value in table[self._label]
        ]

    def _place(self, split: SplitName, row: int) -> str:
        return f"--data.path {self.root}: row {row} of {split}"

    def _column(self, features: Any, kind: type, name: str, choice: str | None) -> str:
        columns = (
            [choice]
            if choice
            else [column for column, feature in features.items() if isinstance(feature, kind)]
        )
        if len(columns) != 1 or columns[0] not in features:
            listed = ", ".join(
                f"{column} ({type(feature).__name__})" for column, feature in features.items()
            )
            raise UserError(
                f"--data.path {self.root} has the columns {listed}: give one to --data.{name}_column"
            )
        column = columns[0]
        if type(features[column]).__name__ in ("List", "LargeList"):
            raise UserError(
                f"--data.path {self.root}: column {column} has several {name}s per sample: "
                f"give a column with one to --data.{name}_column"
            )
        return column

    def settings(self, split: SplitName) -> Sequence[Any]:  # noqa: D102
        return [*super().settings(split), self._image, self._label]

    def load(self, split: SplitName) -> Split:  # noqa: D102
        if split == "predict" and self.predict_dir is not None:
            return super().load(split)
        name = "test" if split == "predict" else split
        return RowSplit(
            self._tables[name],
            self._labels[name],
            f"{split} in {self.root}",
            self,
            self.ragged(split),
        )

    def _files(self, split: SplitName) -> list[tuple[str, int]]:
        """Return the Arrow files that hold a split's images."""
        return [(file["filename"], -1) for file in self._tables[split].cache_files]
