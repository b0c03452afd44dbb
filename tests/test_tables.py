"""Images that a CSV file lists, and data sets of Hugging Face."""

from pathlib import Path

import datasets
import pandas as pd
import pytest
import torch
from harness import QUIET, App, error_of, losses, options, output_of, record_of
from test_data import attach

from app.data import HuggingFace, ImageFolder, ImageTable
from app.errors import UserError

FLAGS = [*options(max_epochs=1, batch_size=8, num_workers=0, log_every_n_steps=1), *QUIET]


@pytest.fixture
def table(image_root: Path) -> pd.DataFrame:
    """Write `all.csv` into the image folder: a row for each image, sorted by class within each split."""
    files = [file for split in ("train", "test") for file in sorted((image_root / split).rglob("*.*"))]
    names = {"file": [str(file.relative_to(image_root)) for file in files], "label": [f.parent.name for f in files]}
    made = pd.DataFrame({**names, "split": [file.parts[-3] for file in files]})
    made.to_csv(image_root / "all.csv", index=False)
    return made


def test_a_table_is_a_folder(image_root: Path, table: pd.DataFrame, app: App, tmp_path: Path) -> None:
    """Training on a table has the same splits and losses as on the folder. Splits and columns may have other names."""
    output_of(*app("fit", "--data", "ImageFolder", "--data.root", image_root, *FLAGS))
    output_of(*app("fit", "--data", "ImageTable", "--data.csv", image_root / "all.csv", *FLAGS))
    folder, ours = (tmp_path / "runs" / f"LeNet-{name}" / "version_0" for name in ("ImageFolder", "ImageTable"))
    assert losses(ours).tolist() == losses(folder).tolist()
    assert record_of(ours)["data"]["images"] == {"train": 33, "val": 3, "test": 12}
    renamed = table.rename(columns={"file": "photo", "label": "kind"}).replace({"split": {"test": "validation"}})
    renamed.to_csv(image_root / "named.csv", index=False)
    data = attach(ImageTable(str(image_root / "named.csv"), "photo", "kind"))
    assert data.counts == {"train": 36, "val": 12}
    assert list(data.class_names) == ["cat", "dog", "eel"]


def test_labels_are_read_again(image_root: Path, table: pd.DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels are not cached: a changed label and another label column take effect. Classes are in numeric order.

    The table has absolute paths.
    """
    monkeypatch.chdir(image_root)
    numbered = table.drop(columns="split").assign(label=[str(8 + row % 4) for row in range(len(table))])
    numbered["file"] = [str(image_root / file) for file in table["file"]]
    for first in ("8", "11"):
        numbered.loc[0, "label"] = first
        numbered.assign(other=numbered["label"].to_numpy()[::-1]).to_csv("all.csv", index=False)
        for column, place in (("label", 0), ("other", -1)):
            data = attach(ImageTable("all.csv", val_size=0, label_column=column))
            assert list(data.class_names) == ["8", "9", "10", "11"]
            assert data._splits["train"][0].labels[place] == ["8", "9", "10", "11"].index(first)


def test_tables_that_cannot_be(image_root: Path, table: pd.DataFrame, app: App) -> None:
    csv = image_root / "all.csv"

    def message_of(**columns: str) -> str:
        with pytest.raises(UserError) as error:
            attach(ImageTable(str(csv), num_workers=0, **columns))
        return str(error.value)

    columns = "but file, label, split: give one to --data."
    assert f"{csv} has no column species, {columns}label_column" in message_of(label_column="species")
    fold = ["--data", "ImageTable", "--data.csv", csv, "--data.split_column", "fold"]
    assert f"{csv} has no column fold, {columns}split_column" in error_of(*app("fit", *fold, *FLAGS))
    for row, column, value, problem in (
        (2, "file", "", "line 4 has no file"),
        (3, "label", "", "line 5 has label '', which no training image has"),
        (40, "label", "cow", "line 42 has label 'cow', which no training image has"),
        (5, "split", "trian", "line 7 has split 'trian', not train, val or test"),
        (1, "file", "train/cat/gone.jpg", f"{image_root / 'train/cat/gone.jpg'} cannot be read"),
    ):
        wrong = table.copy()
        wrong.loc[row, column] = value
        wrong.to_csv(csv, index=False)
        assert problem in message_of()
    table[:0].to_csv(csv, index=False)
    assert f"{csv} has no rows" in message_of()
    csv.write_bytes(b"\xff\xfe\x00")
    assert f"--data.csv {csv} cannot be read" in message_of()
    csv.unlink()
    assert f"--data.csv {csv} cannot be read (No such file or directory)" in message_of()


@pytest.fixture
def saved(image_root: Path) -> Path:
    """Save the image folder as a data set of Hugging Face, and return its directory."""
    made = datasets.load_dataset("imagefolder", data_dir=str(image_root), cache_dir=str(image_root / "arrow"))
    made.save_to_disk(str(image_root / "saved"))
    return image_root / "saved"


def test_a_data_set_of_hugging_face(image_root: Path, saved: Path, app: App, tmp_path: Path) -> None:
    """A data set of Hugging Face has the image folder's pixels and labels, whether it is saved on disk or in Parquet.

    Only its first run decodes the images.
    """
    flags = ["--data", "HuggingFace", "--data.path", saved, *FLAGS]
    assert "Decoding 36 images" in output_of(*app("fit", *flags))
    assert "Decoding" not in output_of(*app("fit", *flags, "--trainer.max_epochs", "2"))
    output_of(*app("predict", *flags, "--ckpt_path", "last"))
    run = tmp_path / "runs" / "LeNet-HuggingFace" / "version_0"
    assert record_of(run)["data"]["images"] == {"train": 33, "val": 3, "test": 12}
    folder = attach(ImageFolder(str(image_root), cache="off"), "test")
    parquet = image_root / "train.parquet"
    datasets.load_from_disk(str(saved))["test"].to_parquet(parquet)
    for path, stage in ((saved, "test"), (parquet, "fit")):
        data = attach(HuggingFace(str(path), cache="off", val_size=0), stage)
        split, expected = data._splits["test" if stage == "test" else "train"][0], folder._splits["test"][0]
        assert sorted(data.class_names) == list(data.class_names) == list(folder.class_names)
        assert sorted(split.labels.tolist()) == expected.labels.tolist()
        pixels = [sorted(bytes(image.flatten().tolist()) for image in made.tensor()) for made in (split, expected)]
        assert pixels[0] == pixels[1]


def test_columns_of_hugging_face(saved: Path, image_root: Path) -> None:
    made = datasets.load_from_disk(str(saved))
    renamed = made["train"].add_column("kind", [str(2 * label + 8) for label in made["train"]["label"]])
    renamed.remove_columns("label").save_to_disk(str(image_root / "named"))
    with pytest.raises(UserError, match=r"has the columns image \(Image\), kind \(Value\): give one to --data.label_c"):
        HuggingFace(str(image_root / "named"))
    data = attach(HuggingFace(str(image_root / "named"), label_column="kind", crop="random_resized", num_workers=0))
    assert list(data.class_names) == ["8", "10", "12"]
    assert next(iter(data.train_dataloader())).images.shape == (33, 3, 32, 32)
    made["test"] = made["test"].remove_columns("label")
    made.save_to_disk(str(image_root / "unlabelled"))
    assert list(HuggingFace(str(image_root / "unlabelled")).source.splits) == ["train", "predict"]
    for path, problem in ((image_root / "gone", "cannot be read"), (image_root / "train.csv", "cannot be read")):
        with pytest.raises(UserError, match=problem):
            HuggingFace(str(path))


def test_rows_of_paths(image_root: Path) -> None:
    """A row's image may be a path, too. Only image formats are opened, whatever the path's suffix is."""
    paths = [str(image_root / "train" / name / "01.png") for name in ("cat", "dog")]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    datasets.Dataset.from_dict({"image": paths, "label": [0, 1]}, features).save_to_disk(str(image_root / "paths"))
    split = HuggingFace(str(image_root / "paths"), size=16).source.load("train")
    expected = ImageFolder(str(image_root), size=16).source.load("train")
    assert torch.equal(split[1], expected[expected.names.index(paths[1])])


def test_a_row_that_is_no_image(saved: Path, image_root: Path) -> None:
    bad = {"image": [{"bytes": b"%!PS-Adobe-3.0 EPSF-3.0", "path": None}] * 3, "label": [0, 1, 0]}
    features = datasets.load_from_disk(str(saved))["train"].features
    datasets.Dataset.from_dict(bad, features).save_to_disk(str(image_root / "bad"))
    with pytest.raises(UserError, match=r"row 0 of train in .*bad cannot be read \(not an image\)"):
        attach(HuggingFace(str(image_root / "bad"), num_workers=0))
    assert torch.is_tensor(attach(HuggingFace(str(saved)))._splits["train"][0].tensor())
