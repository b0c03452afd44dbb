"""Images that a CSV file lists, and data sets of Hugging Face."""

from functools import partial
from pathlib import Path

import datasets
import pandas as pd
import pytest
import torch
from datasets import ClassLabel, Image, List, Value
from harness import QUIET, SLOW, losses, options, record_of
from test_data import attach, refusal

from app.data import HuggingFace, ImageFolder, ImageTable
from app.errors import UserError

FLAGS = [*options(max_epochs=1, batch_size=8, num_workers=0, log_every_n_steps=1), *QUIET]
FLAGS += ["--model=CIFARCNN"]


@pytest.fixture
def table(image_root):
    """Write `all.csv` into the image folder.

    It has a row for each image, sorted by class within each split.
    """
    files = [*sorted(image_root.glob("train/*/*")), *sorted(image_root.glob("test/*/*"))]
    made = pd.DataFrame({"file": [str(file.relative_to(image_root)) for file in files]})
    made[["split", "label"]] = made["file"].str.split("/", expand=True)[[0, 1]]
    made.to_csv(image_root / "all.csv", index=False)
    return made


@SLOW
def test_a_table_is_a_folder(image_root, table, fit):
    """Training on a table has the same splits and losses as on the folder.

    Splits and columns may have other names.
    """
    folder = fit("--data=ImageFolder", f"--data.root={image_root}", *FLAGS)
    ours = fit("--data=ImageTable", "--data.csv", image_root / "all.csv", *FLAGS)
    assert losses(ours).tolist() == losses(folder).tolist()
    assert record_of(ours)["data"]["images"] == {"train": 33, "val": 3, "test": 12}
    renamed = table.rename(columns={"file": "photo", "label": "kind"})
    renamed["split"] = renamed["split"].replace("test", "validation")
    renamed.to_csv(image_root / "named.csv", index=False)
    data = attach(ImageTable(str(image_root / "named.csv"), "photo", "kind"))
    assert data.counts == {"train": 36, "val": 12}
    assert data.class_names == ["cat", "dog", "eel"]


def test_labels_are_read_again(image_root, table, monkeypatch):
    """Labels are not cached: a changed label and another label column take effect.

    Classes are in numeric order.

    The table has absolute paths.
    """
    monkeypatch.chdir(image_root)
    classes = ["8", "9", "10", "11"]
    numbered = table.drop(columns="split").assign(label=[classes[i % 4] for i in range(len(table))])
    numbered["file"] = [str(image_root / file) for file in table["file"]]
    for first in ("8", "11"):
        numbered.loc[0, "label"] = first
        numbered.assign(other=numbered["label"].to_numpy()[::-1]).to_csv("all.csv", index=False)
        for column, place in (("label", 0), ("other", -1)):
            data = attach(ImageTable("all.csv", val_size=0, label_column=column))
            assert data.class_names == classes
            assert data._splits["train"][0].labels[place] == classes.index(first)


rejection = partial(refusal, ImageTable)


def test_wrong_cell_or_column_is_named(image_root, table):
    csv = image_root / "all.csv"
    columns = "but file, split, label: give one to --data."
    for flag, name in (("label_column", "species"), ("split_column", "fold")):
        assert f"{csv} has no column {name}, {columns}{flag}" in rejection(csv, **{flag: name})
    for row, column, value, problem in (
        (2, "file", "", "line 4 has no file"),
        (3, "label", "", "line 5 has no label"),
        (40, "label", "cow", "line 42 has label 'cow', which no training image has"),
        (5, "split", "trian", "line 7 has split 'trian', not train, val or test"),
        (1, "file", "train/cat/gone.jpg", f"{image_root / 'train/cat/gone.jpg'} cannot be read"),
    ):
        wrong = table.copy()
        wrong.loc[row, column] = value
        wrong.to_csv(csv, index=False)
        assert problem in rejection(csv)
    table[:0].to_csv(csv, index=False)
    assert f"{csv} has no rows" in rejection(csv)
    csv.write_bytes(b"\xff\xfe\x00")
    assert f"--data.csv {csv} cannot be read" in rejection(csv)
    csv.unlink()
    assert f"--data.csv {csv} cannot be read (No such file or directory)" in rejection(csv)


@pytest.mark.parametrize(
    "text",
    [
        "file,label,split\na.png,cat,train\nb.png,dog,train\nc.png,cat,val\n",
        "file\tlabel\tsplit\na.png\tcat\ttrain\nb.png\tdog\ttrain\nc.png\tcat\tval",
        "file,label,split\r\na.png,cat,train\r\n\r\nb.png,dog,train\r\nc.png,cat,val\r\n,,\r\n",
        "Split, File, Label \rtrain, a.png, cat\rTRAIN, b.png, dog \rVal , c.png, cat\r",
        (
            '"file";"label";note;"split"\n"a.png";"cat ";",,";"train"\n'
            'b.png;"dog";"one; two";train;\nc.png;cat;;valid\n'
        ),
        "file,label,split\n.\\a.png,cat,train\n./b.png,dog,train\n{folder}/c.png,cat,val\n",
    ],
    ids=["comma", "tab", "blank rows", "spaces", "quotes", "paths"],
)
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_dialects_of_tables(text, encoding, tmp_path):
    for name in ("a.png", "b.png", "c.png"):
        (tmp_path / name).touch()
    (tmp_path / "t.csv").write_bytes(text.replace("{folder}", str(tmp_path)).encode(encoding))
    source = ImageTable(str(tmp_path / "t.csv")).source
    assert source.class_names == ["cat", "dog"]
    files = [*source._files("train"), *source._files("val")]
    assert [(Path(file).name, label) for file, label in files] == [
        ("a.png", 0), ("b.png", 1), ("c.png", 0),
    ]  # fmt: skip
    assert all(Path(file).exists() for file, _ in files)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "file,label\na.png,cat, small\n",
            'line 2 has 3 cells, not 2 as the header: write a cell that contains ","',
        ),
        ("file,label\na.png,cat\nb.png\n", "line 3 has 1 cells, not 2 as the header"),
        (
            "file,label,split\na.png,cat,train\n\n./a.png,cat,val\n",
            "lines 2 and 4 have the same file ./a.png",
        ),
        (
            "./a.png,cat\nb.png,dog\n",
            "begins with an image: insert a first line, such as file,label",
        ),
        ("file,label,label\na.png,cat,dog\n", "has 2 columns label: rename all but one"),
        (
            "file,label\na.png,cat\nb.png,Cat\n",
            "line 3 has label 'Cat', others have 'cat': spell one class alike",
        ),
        (
            "file,label\na.png,caf\u00e9\nb.png,cafe\u0301\n",
            "line 3 has label 'cafe\u0301', others have 'caf\u00e9'",
        ),
        (
            "file,label\na.png,cat\nb.png,c\u200bat\n",
            r"line 3 has label 'c\u200bat', others have 'cat'",
        ),
        ("file,label\na.png,1\nb.png,1.0\n", "line 3 has label '1.0', others have '1'"),
        (
            'file,label\na.png,"cat\nb.png,dog\n',
            "cannot be read (unexpected end of data): correct its quotes",
        ),
        (
            "file,label\na.png,c\0at\n",
            "cannot be read (it has null characters): give a CSV file in UTF-8",
        ),
        ("file,label\na.png,c\udce4t\n", "invalid continuation byte): give a CSV file in UTF-8"),
    ],
)
def test_ambiguous_table_is_refused(text, problem, tmp_path):
    (tmp_path / "a.png").touch()
    (tmp_path / "t.csv").write_bytes(text.encode(errors="surrogateescape"))
    columns = {}
    if text.startswith("./a.png"):
        columns = {"file_column": "./a.png", "label_column": "cat"}
    assert problem in rejection(tmp_path / "t.csv", **columns)


def test_odd_names_of_classes(tmp_path):
    """NA is a class, letters of both cases are two, and numbers are sorted by value."""
    for rows, names in (
        ("1,NA\n2,null\n3,a\n4,A\n5,nan\n", ["A", "NA", "a", "nan", "null"]),
        ("1,111\n2,10\n3,9\n4,08\n", ["08", "9", "10", "111"]),
    ):
        (tmp_path / "t.csv").write_text(f"file,label\n{rows}")
        assert ImageTable(str(tmp_path / "t.csv")).class_names == names


@pytest.fixture
def saved(image_root):
    """Save the image folder as a data set of Hugging Face, and return its directory."""
    made = datasets.load_dataset(
        "imagefolder", data_dir=str(image_root), cache_dir=str(image_root / "arrow")
    )
    made.save_to_disk(str(image_root / "saved"))
    return image_root / "saved"


@SLOW
def test_a_data_set_of_hugging_face(image_root, saved, app, tmp_path):
    """A data set on disk or in Parquet has the image folder's pixels and labels.

    Only its first run decodes the images.
    """
    flags = ["--data=HuggingFace", f"--data.path={saved}", *FLAGS]
    assert "Decoding 36 images" in app("fit", *flags)
    assert "Decoding" not in app("fit", *flags, "--trainer.max_epochs=2")
    app("predict", *flags, "--ckpt_path=last")
    run = tmp_path / "runs/LeNet-HuggingFace/version_0"
    assert record_of(run)["data"]["images"] == {"train": 33, "val": 3, "test": 12}
    folder = attach(ImageFolder(str(image_root), cache="off"), "test")
    parquet = image_root / "train.parquet"
    datasets.load_from_disk(str(saved))["test"].to_parquet(parquet)
    expected = folder._splits["test"][0]
    for path, stage, name in ((saved, "test", "test"), (parquet, "fit", "train")):
        data = attach(HuggingFace(str(path), cache="off", val_size=0), stage)
        split = data._splits[name][0]
        assert data.class_names == folder.class_names
        assert sorted(split.labels.tolist()) == expected.labels.tolist()
        assert sorted(split.tensor().tolist()) == sorted(expected.tensor().tolist())


def test_columns_of_hugging_face(saved, image_root):
    made = datasets.load_from_disk(str(saved))
    kinds = [str(2 * label + 8) for label in made["train"]["label"]]
    renamed = made["train"].add_column("kind", kinds).remove_columns("label")
    renamed.save_to_disk(str(image_root / "named"))
    with pytest.raises(
        UserError,
        match=r"has the columns image \(Image\), kind \(Value\): give one to --data.label_c",
    ):
        HuggingFace(str(image_root / "named"))
    settings = {"label_column": "kind", "crop": "random_resized", "num_workers": 0}
    data = attach(HuggingFace(str(image_root / "named"), **settings))
    assert data.class_names == ["8", "10", "12"]
    assert next(iter(data.train_dataloader())).images.shape == (33, 3, 32, 32)
    for name in ("gone", "train.csv"):
        with pytest.raises(UserError, match="cannot be read"):
            HuggingFace(str(image_root / name))


def test_rows_of_paths(image_root):
    """A row's image may be a path, too.

    Only image formats are opened, whatever the path's suffix is.
    """
    paths = [str(image_root / "train" / name / "01.png") for name in ("cat", "dog")]
    features = datasets.Features({"image": Image(), "label": BOTH})
    made = datasets.Dataset.from_dict({"image": paths, "label": [0, 1]}, features)
    made.save_to_disk(str(image_root / "paths"))
    split = HuggingFace(str(image_root / "paths"), size=16).source.load("train")
    expected = ImageFolder(str(image_root), size=16).source.load("train")
    assert torch.equal(split[1], expected[expected.names.index(paths[1])])


def save(folder, **splits):
    """Save a data set of Hugging Face; each split has a type of labels, and labels."""
    tables = {}
    for name, (feature, labels) in splits.items():
        features = datasets.Features({"image": Image(), "label": feature})
        tables[name] = datasets.Dataset.from_dict(
            {"image": [None] * len(labels), "label": labels}, features=features
        )
    datasets.DatasetDict(tables).save_to_disk(str(folder))
    return str(folder)


BOTH = ClassLabel(names=["cat", "dog"])
TEXT = Value("string")


@pytest.mark.parametrize(
    ("train", "test", "names", "numbers"),
    [
        ((BOTH, [1, 0]), (ClassLabel(names=["dog"]), [0, 0]), "cat dog", [[1, 0], [1, 1]]),
        (
            (ClassLabel(names=["b", "a", "a "]), [0, 1, 2]), (TEXT, ["a", " b"]),
            "b a", [[0, 1, 1], [1, 0]],
        ),
        ((TEXT, ["b", "a"]), (ClassLabel(names=["b", "a"]), [0, 1]), "a b", [[1, 0], [1, 0]]),
        ((Value("int64"), [-1, 1]), (Value("int64"), [1, -1]), "-1 1", [[0, 1], [1, 0]]),
        ((Value("bool"), [True, False]), (Value("bool"), [True]), "False True", [[1, 0], [1]]),
    ],
    ids=["classes", "spaces", "strings", "signs", "truths"],
)  # fmt: skip
def test_labels_go_by_name(train, test, names, numbers, tmp_path):
    """Each split of a data set of Hugging Face may number its classes differently."""
    source = HuggingFace(save(tmp_path, test=test, train=train), label_column="label").source
    assert source.class_names == names.split()
    assert [source.load(split).labels.tolist() for split in ("train", "test")] == numbers


@pytest.mark.parametrize("missing", [None, -1])
def test_a_data_set_with_a_test_split_without_labels(missing, tmp_path):
    path = save(tmp_path, train=(BOTH, [0, 1]), test=(BOTH, [missing, missing]))
    assert HuggingFace(path).source.splits == ["train", "predict"]


@pytest.mark.parametrize(
    ("train", "test", "problem"),
    [
        (
            (List(BOTH), [[0, 1], [1]]), None,
            "column label has several labels per sample: give a column",
        ),
        (
            (Value("float32"), [0.0, 1.0]), None,
            "column label has float32 values: give a column with one name",
        ),
        (
            (TEXT, ["cat", "dog"]), (TEXT, ["dog", "cow"]),
            "row 1 of test has label 'cow', which no training image has",
        ),
        (
            (BOTH, [0, 1]), (ClassLabel(names=["Dog"]), [0]),
            "row 0 of test has label 'Dog', others have 'dog'",
        ),
        ((TEXT, ["cat", "dog"]), (TEXT, ["dog", None]), "row 1 of test has no label"),
        ((BOTH, [0, -1]), None, "row 1 of train has no label"),
    ],
)  # fmt: skip
def test_wrong_labels_of_hugging_face_are_refused(train, test, problem, tmp_path):
    path = save(tmp_path, train=train, **({"test": test} if test else {}))
    message = refusal(HuggingFace, Path(path), label_column="label")
    assert f"--data.path {path}: {problem}" in message


def test_a_row_that_is_no_image(saved, image_root):
    """PIL would start Ghostscript to draw this image."""
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
    bad = {"image": [{"bytes": eps, "path": None}] * 3, "label": [0, 1, 0]}
    features = datasets.load_from_disk(str(saved))["train"].features
    datasets.Dataset.from_dict(bad, features).save_to_disk(str(image_root / "bad"))
    with pytest.raises(UserError, match=r"row 0 of train in .*bad cannot be read \(not an image\)"):
        attach(HuggingFace(str(image_root / "bad"), num_workers=0))
    assert torch.is_tensor(attach(HuggingFace(str(saved)))._splits["train"][0].tensor())
