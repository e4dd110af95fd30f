"""Memory whose pages exist only while they are used: the kernel's pages are the blocks of a KV cache."""

import mmap
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor

_NORESERVE = 0x4000  # the same on x86-64 and aarch64; Python 3.11's mmap has no name for it


class LazyPages:
    """Owns zeroed memory on the host, of which only what was written takes part in the process's memory.

    Its size counts against address space only (MAP_NORESERVE, mmap(2)). Small pages: a huge one would give two MiB to a
    sequence of ten tokens.
    """

    def __init__(self, num_bytes: int) -> None:
        """Raises `MemoryError` where the kernel refuses the address space (ulimit -v, vm.overcommit_memory = 2)."""
        try:
            self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except OSError as error:
            raise MemoryError(
                f"no {num_bytes} bytes of address space for keys or values ({error.strerror}): lift the limit, or take "
                "fewer rows or shorter sequences"
            ) from error
        with suppress(OSError):  # a kernel without huge pages
            self._memory.madvise(mmap.MADV_NOHUGEPAGE)

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """All of it as one row of elements; it stays alive with the tensor."""
        return torch.frombuffer(self._memory, dtype=dtype)

    def free(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Gives back the whole pages within ranges of bytes (start, end); they read as zeros from then on."""
        for start, end in ranges:
            first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
            if last > first:
                self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)
