"""Cache of decoded images: one file per split, memory-mapped by every rank.

A file holds the pixels of all images, a table in JSON, and the table's length and checksum. Images
of different sizes are stored as (h, w, C). The table has labels, file names, heights and widths,
digests of the files, and checksums of blocks of pixels; its key describes the source. A file with
another key, or damaged, is rebuilt.

Each rank checks the table. One process per node checks the pixels: all of them, if the file has
been modified since it was written; else at most 160 MiB, of random blocks. For 5 GiB, a start of
5 s takes 0.05 s more (0.03 to 0.05, n = 10), or 0.24 s (0.20 to 0.28, n = 5) if the blocks have to
come from disk; for CIFAR-10, 0.04 s (0.03 to 0.05, n = 10). (2026-11-27, 2 cores of an AMD EPYC.)
"""

import errno
import hashlib
import json
import math
import os
import random
import shutil
import struct
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from app.data.sources import Source, Split, SplitName, problems
from app.system.files import open_file, remove_parts, whole

VERSION = 5  # raise this number when images are decoded to other pixels, or the format changes
END = struct.Struct("<QI")  # the table's length and checksum
BLOCK = 2**20  # bytes; pixels with one checksum
SAMPLE = 160  # blocks of an unmodified file that a start checks; CIFAR-10's training images: 147


class ImageCache:
    """Folder of files with decoded images.

    Args:
        folder: Path of the folder; `auto`: in the user's cache directory.
    """

    def __init__(self, folder: str | bool = "auto") -> None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.folder = home / "data-parallel-lab"
        if folder not in ("auto", True):
            self.folder = Path(str(folder))

    def open(self, source: Source, split: SplitName, check_pixels: bool = False) -> Split | None:
        """Memory-map a split's decoded images; None if the file is missing, outdated or damaged."""
        path, key = self._identify(source, split)
        if not os.path.isfile(path):
            return None
        try:
            with open_file(path) as file:
                file.seek(-END.size, os.SEEK_END)
                length, checksum = END.unpack(file.read())
                pixels = file.seek(-END.size - length, os.SEEK_END)
                text = file.read(length)
                _compare(text, checksum)
                table = json.loads(text)
                if table["key"] != key:
                    return None
                blocks = list(enumerate(table["sums"]))
                if not check_pixels:
                    blocks = []
                elif len(blocks) > SAMPLE and os.stat(path).st_mtime == table["written"]:
                    # not the global random state, because it belongs to the training
                    blocks = random.Random().sample(blocks, SAMPLE)
                # reading takes a quarter of mapping's time if a file is not in memory
                for block, checksum in blocks:
                    file.seek(block * BLOCK)
                    _compare(file.read(min(BLOCK, pixels - block * BLOCK)), checksum)
                images = _mapped(file, pixels)
        except (OSError, ValueError, KeyError, OverflowError, struct.error) as error:
            rank_zero_info(f"{path} cannot be used ({error})")
            return None
        geometry = source.ragged(split)
        sizes = None
        shape: Sequence[int] = source.image_shape
        if geometry is not None:
            sizes = torch.tensor(table["sizes"])
            shape = shape[:1]
        made = Split(images.view(-1, *shape), torch.tensor(table["labels"]), table["names"], sizes)
        made.digests = table["digests"]
        made.mapped = True
        made.left_out = table["left_out"]
        made.ragged = geometry
        made.image_shape = source.image_shape
        return made

    def write(self, source: Source, split: SplitName, num_workers: int) -> None:
        """Decode a split into its file, unless an up-to-date file exists.

        Args:
            source: The source of the images.
            split: Name of the split.
            num_workers: Number of processes that decode.

        Raises:
            OSError: When the file cannot be written.
            UserError: As for `Split.decoded`.
        """
        if self.open(source, split, check_pixels=True) or not source.encoded(split):
            return
        path, key = self._identify(source, split)
        with whole(path) as file:
            remove_parts(self.folder)
            images = source.load(split)
            self._check_room(source, split, len(images))
            rank_zero_info(f"Decoding {len(images):,} images, once, into {path}")
            sizes = []
            for image in images.decoded(num_workers, source.skips):
                if images.ragged is not None:
                    sizes.append(image.shape[1:])
                    image = image.permute(1, 2, 0)
                file.write(image.contiguous().numpy().data)
            file.flush()
            wrong = images.wrong
            if wrong:
                rank_zero_info(
                    f"{len(wrong):,} of {len(images):,} images are skipped: {problems(wrong)}"
                )
            right = [index for index in range(len(images)) if index not in wrong]
            now = int(time.time())
            blocks = _mapped(Path(file.name), file.tell()).split(BLOCK)
            table = {
                "key": key,
                "labels": images.labels[right].tolist(),
                "names": images.names and [images.names[index] for index in right],
                "digests": images.digests,
                "sizes": sizes,
                "left_out": len(wrong),
                "sums": [crc32(block.numpy().data) for block in blocks],
                "written": now,
            }
            text = json.dumps(table).encode()
            file.write(text + END.pack(len(text), crc32(text)))
            file.flush()
            os.utime(file.fileno(), (now, now))

    def _check_room(self, source: Source, split: SplitName, count: int) -> None:
        """Raise an OSError if decoded images would take over half of the free space."""
        needed = count * math.prod(source.image_shape)
        geometry = source.ragged(split)
        if geometry is not None:  # assume 3:2 images
            needed = count * source.image_shape[0] * math.prod(geometry.kept) * 3 // 2
        if needed > shutil.disk_usage(self.folder).free // 2:
            size = f"{needed / 2**30:.1f} GiB"
            raise OSError(errno.ENOSPC, f"{size} are over half of the free space")

    def _identify(self, source: Source, split: SplitName) -> tuple[Path, str]:
        """Return the path of a split's cache file, and the key of an up-to-date file."""
        place: Any = source.root  # perhaps a name on the Hub
        if os.path.exists(place):
            place = os.path.abspath(place)
        if split == "predict" and source.predict_dir:
            place = source.predict_dir
        digest = _digest(type(source).__name__, split, place, *source.settings(split))
        files = source.encoded(split)
        folders = sorted(set(map(os.path.dirname, files)))
        if os.path.isfile(source.root):  # a table, which has the labels
            files = [source.root, *files]
        states = []
        for file in files:
            with suppress(OSError):  # ignored here, because decoding reports it
                state = os.stat(file)
                states.append((file, state.st_size, state.st_mtime_ns))
        targets = list(map(os.path.realpath, folders))
        key = _digest(VERSION, list(source.class_names), targets, states)
        return self.folder / f"{split}-{digest[:16]}", key


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _mapped(path: Path | BinaryIO, size: int) -> Tensor:
    """Map a file's first bytes, read-only, because writable memory may be limited for each rank."""
    array = np.memmap(path, np.uint8, "r", shape=size)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)


def _compare(content: Any, checksum: int) -> None:
    if crc32(content) != checksum:
        raise ValueError("wrong checksum")
