"""Source of a data set that Hugging Face's library `datasets` reads."""

import re
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import fsspec

from app.data.image_files import FileSplit, LabelledFile
from app.data.sources import Split, SplitName, splits_in
from app.data.tables import RowSource
from app.errors import UserError, one_line


class RowSplit(FileSplit):
    """Labelled images of a table's rows, decoded and resized when they are read.

    Attributes:
        rows: The table, with one column of images.
        place: Name of the table, for messages.
    """

    rows: Any
    place: str

    def _open(self, index: int) -> BinaryIO:
        (image,) = self.rows[index].values()
        if image["bytes"] is not None:
            return BytesIO(image["bytes"])
        with fsspec.open(image["path"]) as file:
            return BytesIO(file.read())

    def name(self, index: int) -> str:  # noqa: D102
        return f"row {index} of {self.place}"


class HuggingFaceSource(RowSource):
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
        saved = [Path(path, name) for name in ("dataset_dict.json", "state.json")]
        try:
            if path.endswith(".parquet"):
                made = datasets.load_dataset("parquet", data_files=path)
            elif "://" in path or any(map(Path.is_file, saved)):
                made = datasets.load_from_disk(path)
            else:
                made = datasets.load_dataset(path)
        except Exception as error:  # `datasets` raises many types of exceptions
            raise UserError(
                f"--data.path {path} cannot be read ({one_line(str(error))[:200]})"
            ) from error
        if not isinstance(made, dict):
            made = {"train": made}
        splits = splits_in(f"--data.path {path}", made)
        if "train" not in splits:
            raise UserError(f"--data.path {path} has no split train, but {', '.join(made)}")
        features = made[splits["train"]].features
        self._image = self._column(features, datasets.Image, "image", image_column)
        self._label = self._column(features, datasets.ClassLabel, "label", label_column)
        self.columns = [self._image, self._label]
        self._rows = {}
        labels = {}
        for split, name in splits.items():
            table = made[name]
            if len(table):
                labels[split] = self._class_names(table)
                images = table.select_columns([self._image])
                encoded = datasets.Image(decode=False)
                self._rows[split] = images.cast_column(self._image, encoded)
        self._number_classes(labels, getattr(features[self._label], "names", None) or ())

    def _class_names(self, table: Any) -> list[str]:
        """Return each row's class name, by the table's own numbering; empty without a label."""
        feature = table.features.get(self._label)
        if feature is None:
            return [""] * len(table)
        kind = getattr(feature, "dtype", type(feature).__name__)
        if not re.fullmatch(r"u?int\d+|bool|.*string.*", kind):
            raise UserError(
                f"--data.path {self.root}: column {self._label} has {kind} values: "
                "give a column with one name or whole number per image to --data.label_column"
            )
        names: dict[Any, str] = dict(enumerate(getattr(feature, "names", None) or ()))
        names[None] = ""
        return [names.get(value, str(value)) for value in table[self._label]]

    def _place(self, split: SplitName, row: int) -> str:
        return f"--data.path {self.root}: row {row} of {split}"

    def _column(self, features: Any, kind: type, name: str, choice: str | None) -> str:
        columns = [column for column in features if isinstance(features[column], kind)]
        if choice is not None:
            columns = [choice]
        if len(columns) != 1 or columns[0] not in features:
            kinds = [f"{column} ({type(features[column]).__name__})" for column in features]
            raise UserError(
                f"--data.path {self.root} has the columns {', '.join(kinds)}: "
                f"give one to --data.{name}_column"
            )
        (column,) = columns
        if type(features[column]).__name__ in ("List", "LargeList"):
            raise UserError(
                f"--data.path {self.root}: column {column} has several {name}s per sample: "
                f"give a column with one to --data.{name}_column"
            )
        return column

    def load(self, split: SplitName) -> Split:  # noqa: D102
        if split == "predict" and self.predict_dir:
            return super().load(split)
        labels = self._labels[split]
        made = RowSplit(None, labels, self.image_shape, self.geometry, self.ragged(split))
        made.rows = self._rows[split]
        made.place = f"{split} in {self.root}"
        return made

    def _files(self, split: SplitName) -> list[LabelledFile]:
        """Return the Arrow files that hold a split's images."""
        return [(file["filename"], -1) for file in self._rows[split].cache_files]
