"""Resident memory of the whole stack over time: every descendant of the stack's parent process."""

import asyncio

import psutil

_INTERVAL_SECONDS = 2.0


class MemoryPeak:
    """Largest sum of resident bytes seen so far; shared pages count once per process."""

    def __init__(self, stack_pid: int) -> None:
        self._root = stack_pid or psutil.Process().pid
        self.peak_bytes = 0

    def sample(self) -> int:
        """Takes one sample and returns it; processes that end meanwhile are left out."""
        try:
            root = psutil.Process(self._root)
            processes = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return 0
        total = 0
        for process in processes:
            try:
                total += process.memory_info().rss
            except psutil.Error:
                continue
        self.peak_bytes = max(self.peak_bytes, total)
        return total

    async def watch(self) -> None:
        """Samples every two seconds until cancelled."""
        while True:
            await asyncio.to_thread(self.sample)
            await asyncio.sleep(_INTERVAL_SECONDS)
