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
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from app.data.sources import Errors, RaggedSplit, Source, Split, SplitName, mapped, problems
from app.errors import UserError
from app.record.words import listed
from app.system.files import open_file, remove_parts, whole

DECODING = 2  # raise this number when images are decoded to other pixels
HEADER = 4096  # bytes; a page on most machines, so that the memory-mapped pixels begin at a page
SEAL = 8  # bytes of the header's checksum, in hexadecimal
BLOCK = 2**20  # bytes; pixels with one checksum
# number of blocks that a start checks in an unmodified file; CIFAR-10's training images have 147
SAMPLE = 160


class ImageCache:
    """Folder of files with decoded images.

    Args:
        folder: Path of the folder; by default in the user's cache directory.
    """

    def __init__(self, folder: str | None = None) -> None:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        self.folder = Path(folder or os.path.join(home, "data-parallel-lab"))

    def open(self, source: Source, split: SplitName) -> Split | None:
        """Memory-map the decoded images of a split; return None if the file is missing, outdated or damaged."""
        files = source.encoded(split)
        made = self._map(*self._identify(source, split, files)) if files else None
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
                shape = header["shape"]
                count = header["count"]
                pixels = math.prod(shape)
                file.seek(HEADER + pixels)
                table = file.read()
                _compare(table, header["table"])
                images = mapped(file, HEADER, shape)
                # numbers per image: the label if all images have one size, else height, width, end
                # and label
                columns = 1 if len(shape) == 4 else 4
                values = (
                    np.frombuffer(table, np.int64, columns * count).reshape(columns, count).copy()
                )
                sums, names = json.loads(table[values.nbytes :])
                blocks = [*enumerate(sums)] if check_pixels else []
                if len(blocks) > SAMPLE and os.fstat(file.fileno()).st_mtime == header["written"]:
                    blocks = random.Random().sample(
                        blocks, SAMPLE
                    )  # the global random state belongs to the training
                for (
                    block,
                    checksum,
                ) in blocks:  # reading takes a quarter of mapping's time if a file is not in memory
                    file.seek(HEADER + block * BLOCK)
                    _compare(file.read(min(BLOCK, pixels - block * BLOCK)), checksum)
        except OSError:
            return None
        except ValueError:
            rank_zero_info(f"{path} is damaged, or of another version")
            return None
        labels = torch.from_numpy(values)
        split = (
            RaggedSplit(images, labels, names)
            if columns == 4
            else Split(images, labels[0], names, mapped=True)
        )
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
            ragged = source.ragged(split)
            sides = (
                (ragged.kept[0], 1.5 * ragged.kept[1]) if ragged else source.image_shape[1:]
            )  # assume 3:2 images
            needed = len(images) * source.image_shape[0] * math.prod(sides)
            if needed > shutil.disk_usage(self.folder).free // 2:
                raise OSError(
                    errno.ENOSPC, f"{needed / 2**30:.1f} GiB are over half of the free space"
                )
            rank_zero_info(
                f"Decoding {len(images):,} image{'s' * (len(images) != 1)}, once, into {path}"
            )
            file.write(b"".ljust(HEADER))
            file.flush()  # write the header before workers append to the file
            wrong: Errors = {}
            places: list[tuple[int, int, int]] = []
            for block in images.blocks(num_workers, wrong if source.skips else None, file.name):
                if isinstance(block, list):
                    places += block
                else:
                    file.write(block.numpy().data)
            pixels = file.seek(0, os.SEEK_END) - HEADER
            right = [place for place in range(len(images)) if place not in wrong]
            if not right:
                raise UserError(
                    f"none of {len(images):,} images can be read: {listed(problems(wrong))}"
                )
            if wrong:
                rank_zero_info(
                    f"{len(wrong):,} of {len(images):,} images are skipped: {listed(problems(wrong))}"
                )
            names = [images.names[place] for place in right] if images.names else None
            shape = [pixels] if ragged else [len(right), *source.image_shape]
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
                "written": now,
            }
            header["table"] = crc32(table)
            text = json.dumps(header).encode().ljust(HEADER - SEAL)
            file.seek(0)
            file.write(f"{crc32(text):0{SEAL}x}".encode() + text)
            file.flush()
            os.utime(file.fileno(), (now, now))

    def _identify(self, source: Source, split: SplitName, files: Sequence[str]) -> tuple[Path, str]:
        """Return the path of a split's cache file, and the key that the file has if it is up to date."""
        folders = {*map(os.path.dirname, files)}
        place = os.path.commonpath(map(os.path.abspath, folders if len(files) > 1 else files))
        if split == "predict" and getattr(source, "predict_dir", None) is None:
            split = "test"
        made_from = [type(source).__name__, split, place, *source.settings(split)]
        digest = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()
        targets = [os.path.realpath(folder) for folder in sorted(folders)]
        key = hashlib.sha256(json.dumps([DECODING, list(source.class_names), targets]).encode())
        for file in files:
            try:
                state = os.stat(file)
                target = os.path.realpath(file) if os.path.islink(file) else ""
                seen = f"{file}\0{state.st_size}\0{state.st_mtime_ns}\0{target}\0"
            except OSError:  # ignored here, because decoding reports it
                seen = f"{file}\0"
            key.update(seen.encode(errors="surrogateescape"))
        return self.folder / f"{Path(place).name[:50]}-{digest[:16]}", key.hexdigest()


def _compare(content: Any, checksum: int) -> None:
    if crc32(content) != checksum:
        raise ValueError("wrong checksum")
