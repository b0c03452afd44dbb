"""Cache of decoded images: one file per split, memory-mapped by every rank.

A file holds a header (JSON, one page), pixels, labels and file names (JSON). Images of different sizes are stored as
(h, w, C), in any order; their heights, widths and end offsets precede the labels. The header's key describes the
source. A file with another key is rebuilt.
"""

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from app.data.sources import Errors, RaggedSplit, Source, Split, SplitName, mapped, problems
from app.errors import UserError
from app.record.words import listed
from app.system.files import open_file, remove_parts, whole

DECODING = 2  # raise this number when images are decoded to other pixels
HEADER = 4096  # bytes; a page on most machines, so that the memory-mapped pixels begin at a page


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
            made.ragged, made.image_shape = source.ragged(split), source.image_shape
        return made

    def _map(self, path: Path, key: str) -> Split | None:
        try:
            with open_file(path) as file:
                header = json.loads(file.read(HEADER))
                shape, names = header["shape"], header["names"]
                pixels, count = math.prod(shape), header["count"]
                # numbers per image: the label if all images have one size, else height, width, end and label
                columns = 1 if len(shape) == 4 else 4
                size = HEADER + pixels + 8 * columns * count + names
                if header["key"] != key or os.fstat(file.fileno()).st_size != size:
                    return None
                images = mapped(file, HEADER, shape)
                file.seek(HEADER + pixels)
                table = np.frombuffer(file.read(8 * columns * count), np.int64).reshape(columns, count)
                values, files = torch.from_numpy(table.copy()), json.loads(file.read(names))
                ragged = columns == 4
                split = RaggedSplit(images, values, files) if ragged else Split(images, values[0], files, mapped=True)
                split.left_out = header["left_out"]
                return split
        except (OSError, ValueError, LookupError, TypeError):  # missing, or not a file of this cache
            return None

    def write(self, source: Source, split: SplitName, num_workers: int) -> None:
        """Decode a split into its file, unless an up-to-date file exists.

        Args:
            source: The source of the images.
            split: Name of the split.
            num_workers: Number of processes that decode.

        Raises:
            OSError: When the file cannot be written.
            UserError: When an image is unreadable; if the source skips unreadable images, only when all are unreadable.
        """
        files = source.encoded(split)
        if not files:
            return
        path, key = self._identify(source, split, files)
        if self._map(path, key) is not None:
            return
        with whole(path) as file:
            remove_parts(self.folder)
            images = source.load(split)
            ragged = source.ragged(split)
            sides = (ragged.kept[0], 1.5 * ragged.kept[1]) if ragged else source.image_shape[1:]  # assume 3:2 images
            needed = len(images) * source.image_shape[0] * math.prod(sides)
            if needed > shutil.disk_usage(self.folder).free // 2:
                raise OSError(errno.ENOSPC, f"{needed / 2**30:.1f} GiB are over half of the free space")
            rank_zero_info(f"Decoding {len(images):,} image{'s' * (len(images) != 1)}, once, into {path}")
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
                raise UserError(f"none of {len(images):,} images can be read: {listed(problems(wrong))}")
            if wrong:
                rank_zero_info(f"{len(wrong):,} of {len(images):,} images are skipped: {listed(problems(wrong))}")
            names = json.dumps(images.names and [images.names[place] for place in right]).encode()
            file.write((np.array(places, np.int64).reshape(-1, 3) - (0, 0, HEADER)).T.tobytes())
            file.write(images.labels[right].numpy().data)
            file.write(names)
            shape = [pixels] if ragged else [len(right), *source.image_shape]
            header = {"key": key, "shape": shape, "count": len(right), "names": len(names), "left_out": len(wrong)}
            file.seek(0)
            file.write(json.dumps(header).encode().ljust(HEADER))

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
