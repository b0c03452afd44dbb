"""Cache of decoded images: one file per split, memory-mapped by every rank.

A file holds a header (one page: a checksum, and JSON), pixels, and a table: labels, then checksums
of blocks of pixels and file names (JSON). Images of different sizes are stored as (h, w, C), in any
order; their heights, widths and end offsets precede the labels. The header's key describes the
source. A file with another key, or damaged, is rebuilt.

Each rank checks header and table. One process per node checks the pixels: all of them, if the file
has been modified since it was written; else at most 160 MiB, of random blocks. For 5 GiB, a start
of 5 s takes 0.05 s more (0.03 to 0.05, n = 10), or 0.24 s (0.20 to 0.28, n = 5) if the blocks have
to come from disk; for CIFAR-10, 0.04 s (0.03 to 0.05, n = 10). (2026-11-27, 2 cores of an AMD
EPYC.)
"""

import errno
import hashlib
import json
import math
import os
import random
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from app.data.image_files import REPLACE
from app.data.sources import Errors, RaggedSplit, Source, Split, SplitName, mapped, problems
from app.errors import UserError
from app.system.files import open_file, remove_parts, whole

DECODING = 2  # raise this number when images are decoded to other pixels
HEADER = 4096  # bytes; a page on most machines, so that the memory-mapped pixels begin at a page
SEAL = 8  # bytes of the header's checksum, in hexadecimal
BLOCK = 2**20  # bytes; pixels with one checksum
SAMPLE = (
    160  # blocks that a start checks of an unmodified file; CIFAR-10's training images have 147
)


class ImageCache:
    """Folder of files with decoded images.

    Args:
        folder: Path of the folder; by default in the user's cache directory.
    """

    def __init__(self, folder: str | None = None) -> None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.folder = Path(folder or home / "data-parallel-lab")

    def open(self, source: Source, split: SplitName) -> Split | None:
        """Memory-map a split's decoded images; None if the file is missing, outdated or damaged."""
        files = source.encoded(split)
        if not files:
            return None
        made = self._map(*self._identify(source, split, files))
        if made is not None:
            made.ragged = source.ragged(split)
            made.image_shape = source.image_shape
        return made

    def _map(self, path: Path, key: str, check_pixels: bool = False) -> Split | None:
        try:
            with open_file(path) as file:
                seal = int(file.read(SEAL), 16)
                text = file.read(HEADER - SEAL)
                _compare(text, seal)
                header = json.loads(text)
                if header["key"] != key:
                    return None
                pixels = math.prod(header["shape"])
                file.seek(HEADER + pixels)
                table = file.read()
                _compare(table, header["table"])
                images = mapped(file, HEADER, header["shape"])
                rows = 1  # numbers per image: the label
                if images.ndim == 1:  # images of different sizes: height, width, end and label
                    rows = 4
                values = np.frombuffer(table, np.int64, rows * header["count"]).reshape(rows, -1)
                sums, names = json.loads(table[values.nbytes :])
                blocks = list(enumerate(sums))
                if not check_pixels:
                    blocks = []
                elif len(blocks) > SAMPLE and os.stat(path).st_mtime == header["written"]:
                    # not the global random state, because it belongs to the training
                    blocks = random.Random().sample(blocks, SAMPLE)
                # reading takes a quarter of mapping's time if a file is not in memory
                for block, checksum in blocks:
                    file.seek(HEADER + block * BLOCK)
                    _compare(file.read(min(BLOCK, pixels - block * BLOCK)), checksum)
        except OSError:
            return None
        except ValueError:
            rank_zero_info(f"{path} is damaged, or of another version")
            return None
        numbers = torch.tensor(values)
        if rows == 4:
            split: Split = RaggedSplit(images, numbers, names)
        else:
            split = Split(images, numbers[0], names, mapped=True)
        split.left_out = header["left_out"]
        return split

    def write(self, source: Source, split: SplitName, num_workers: int) -> None:
        """Decode a split into its file, unless an up-to-date file exists.

        Args:
            source: The source of the images.
            split: Name of the split.
            num_workers: Number of processes that decode.

        Raises:
            OSError: When the file cannot be written.
            UserError: When an image is unreadable; if the source skips unreadable images, only when
                all are unreadable.
        """
        files = source.encoded(split)
        if not files:
            return
        path, key = self._identify(source, split, files)
        if self._map(path, key, check_pixels=True) is not None:
            return
        with whole(path) as file:
            remove_parts(self.folder)
            images = source.load(split)
            self._check_room(source, split, len(images))
            plural = "s" * (len(images) != 1)
            rank_zero_info(f"Decoding {len(images):,} image{plural}, once, into {path}")
            file.write(b"".ljust(HEADER))
            file.flush()  # write the header before workers append to the file
            wrong: Errors = {}
            places: list[tuple[int, int, int]] = []
            for block in images.blocks(num_workers, wrong, file.name):
                if isinstance(block, Tensor):
                    file.write(block.numpy().data)
                else:
                    places += block
            pixels = file.seek(0, os.SEEK_END) - HEADER
            if wrong and not source.skips:
                raise UserError(f"{problems(wrong)}: {REPLACE}")
            if len(wrong) == len(images):
                raise UserError(f"none of {len(images):,} images can be read: {problems(wrong)}")
            if wrong:
                rank_zero_info(
                    f"{len(wrong):,} of {len(images):,} images are skipped: {problems(wrong)}"
                )
            right = [index for index in range(len(images)) if index not in wrong]
            names = images.names and [images.names[index] for index in right]
            shape = [len(right), *source.image_shape]
            if places:
                shape = [pixels]
            blocks = mapped(Path(file.name), HEADER, [pixels]).split(BLOCK)
            sums = [crc32(block.numpy().data) for block in blocks]
            table = (np.array(places, np.int64).reshape(-1, 3) - (0, 0, HEADER)).T.tobytes()
            table += images.labels[right].numpy().tobytes()
            table += json.dumps([sums, names]).encode()
            file.write(table)
            now = int(time.time())
            header = {
                "key": key,
                "shape": shape,
                "count": len(right),
                "left_out": len(wrong),
                "table": crc32(table),
                "written": now,
            }
            text = json.dumps(header).encode().ljust(HEADER - SEAL)
            file.seek(0)
            file.write(f"{crc32(text):0{SEAL}x}".encode() + text)
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

    def _identify(self, source: Source, split: SplitName, files: Sequence[str]) -> tuple[Path, str]:
        """Return the path of a split's cache file, and the key of an up-to-date file."""
        folders = sorted(set(map(os.path.dirname, files)))
        place = os.path.abspath(files[0])
        if len(files) > 1:
            place = os.path.commonpath(map(os.path.abspath, folders))
        if split == "predict" and source.predict_dir is None:
            split = "test"
        made_from = [type(source).__name__, split, place, *source.settings(split)]
        digest = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()
        targets = list(map(os.path.realpath, folders))
        key = hashlib.sha256(json.dumps([DECODING, list(source.class_names), targets]).encode())
        for file in files:
            seen = f"{file}\0"
            with suppress(OSError):  # ignored here, because decoding reports it
                state = os.stat(file)
                seen += f"{state.st_size}\0{state.st_mtime_ns}\0\0"
            key.update(seen.encode(errors="surrogateescape"))
        return self.folder / f"{Path(place).name[:50]}-{digest[:16]}", key.hexdigest()


def _compare(content: Any, checksum: int) -> None:
    if crc32(content) != checksum:
        raise ValueError("wrong checksum")
