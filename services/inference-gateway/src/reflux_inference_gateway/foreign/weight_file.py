"""A safetensors file in memory (tmpfs) that new weights are copied into again and again.

Format: https://huggingface.co/docs/safetensors - 8 bytes little-endian length of the header, the header as JSON padded
with spaces, then the tensors without gaps.
"""

import fcntl
import itertools
import json
import mmap
import os
import shutil
import tempfile
from pathlib import Path

from reflux_transfer.layout import Layout

_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_ALIGNMENT = 64
_NAME = "model.safetensors"
_PREFIX = "reflux-weights-"
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".gguf")


class WeightFile:
    """Owns a folder that loads like the model's own: its small files are links, its weights what `fill` copied."""

    def __init__(self, model: Path, layout: Layout, scratch: Path) -> None:
        """Raises `OSError` when `scratch` has no room: pages are reserved here, not at the pull."""
        self._layout, head = layout, _header(layout)
        _sweep(scratch)
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=scratch))
        self._lock = os.open(self.folder, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        for path in model.iterdir():
            if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES):
                (self.folder / path.name).symlink_to(path.resolve())
        size = len(head) + layout.parameter_bytes
        with (self.folder / _NAME).open("wb+") as file:
            # Growing alone reserves nothing in tmpfs; a full one would be a SIGBUS in the middle of a pull.
            os.posix_fallocate(file.fileno(), 0, size)
            file.write(head)
            file.flush()
            self._map = mmap.mmap(file.fileno(), size)
        self._tensors = memoryview(self._map)[len(head) :]

    def fill(self, buffer: memoryview) -> None:
        """Copies the layout's tensors from a region of it."""
        offset = 0
        for slot in self._layout.slots:
            self._tensors[offset : offset + slot.nbytes] = buffer[slot.offset : slot.end]
            offset += slot.nbytes

    def close(self) -> None:
        """Removes the folder; whoever has mapped the file keeps its bytes."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def _sweep(scratch: Path) -> None:
    """Removes the folders of adapters that were killed: the kernel ended their locks, but frees no memory."""
    for folder in scratch.glob(f"{_PREFIX}*"):
        fd = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue  # in use
        finally:
            os.close(fd)


def _header(layout: Layout) -> bytes:
    ends = list(itertools.accumulate((slot.nbytes for slot in layout.slots), initial=0))
    tensors = {
        slot.name: {"dtype": _DTYPES[slot.dtype], "shape": slot.shape, "data_offsets": [begin, end]}
        for slot, (begin, end) in zip(layout.slots, itertools.pairwise(ends), strict=True)
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **tensors}, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
