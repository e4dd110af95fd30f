"""The service's end of one child: its channel, its output, its death. The same for every isolation tier."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reflux_sandbox.isolation import frames

_READ_BYTES = 1 << 18
_PIPE_BYTES = 1 << 20
"""Largest pipe of a user without rights (/proc/sys/fs/pipe-max-size)."""
_STREAM_LIMIT = 1 << 20
_HELLO_SECONDS = 60.0
_DRAIN_SECONDS = 5.0
"""How long output that is still in the pipe may take after the child's death."""
_FLOOD_FACTOR = 256
"""A child that writes this many times what is kept of a stream is killed."""


class ChildDied(ConnectionError):
    """The child went away before it answered."""


@dataclass(frozen=True)
class Ending:
    """How a child ended. `exit_code` is negative for a signal and None when it was killed from outside."""

    exit_code: int | None
    cpu_seconds: float
    max_rss_bytes: int
    memory_kills: int
    process_refusals: int = 0
    """How often its control group refused a process."""
    flooded: bool = False
    """Killed because it never stopped writing."""


class Drain:
    """Empties a pipe while somebody writes and keeps the first `cap_bytes`: no writer blocks, memory is bounded.

    `on_flood` is called once, when far more than that was written.
    """

    def __init__(self, descriptor: int, cap_bytes: int, on_flood: Callable[[], None] = lambda: None) -> None:
        self._descriptor = descriptor
        self._cap_bytes = cap_bytes
        self._on_flood = on_flood
        self._kept = bytearray()
        self._read_bytes = 0
        self.truncated = False
        self._closed = asyncio.get_running_loop().create_future()
        os.set_blocking(descriptor, False)
        asyncio.get_running_loop().add_reader(descriptor, self._on_readable)

    @property
    def kept(self) -> bytes:
        return bytes(self._kept)

    def _on_readable(self) -> None:
        try:
            chunk = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self.close()
            return
        self._keep(chunk)

    def _keep(self, chunk: bytes) -> None:
        room = self._cap_bytes - len(self._kept)
        self._kept += chunk[:room]
        self.truncated |= len(chunk) > room
        flooded = self._read_bytes > self._cap_bytes * _FLOOD_FACTOR
        self._read_bytes += len(chunk)
        if not flooded and self._read_bytes > self._cap_bytes * _FLOOD_FACTOR:
            self._on_flood()

    def take(self) -> tuple[bytes, bool]:
        """What was kept and whether it was cut, with what is in the pipe now; the next part starts empty."""
        for _ in range(_PIPE_BYTES // _READ_BYTES):  # no more than a pipe can hold: somebody may go on writing
            if self._closed.done():
                break
            self._on_readable()
        taken = bytes(self._kept), self.truncated
        self._kept.clear()
        self._read_bytes, self.truncated = 0, False
        return taken

    async def until_closed(self, seconds: float) -> None:
        """Waits for the last writer to go; closes anyway after `seconds` (in a weak tier one may have escaped)."""
        await asyncio.wait([self._closed], timeout=seconds)
        self.close()

    def close(self) -> None:
        if not self._closed.done():
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._closed.set_result(None)


@dataclass(frozen=True)
class ChildPipes:
    """Descriptors of one child, all owned by its handle."""

    channel: socket.socket
    status: int | None
    """None where a child can be given no further descriptor: its supervisor's words then come last on the channel."""
    stdout: int
    stderr: int
    process: int
    """A pidfd."""


class ChildHandle:
    """One child. Its owner calls `send`, `receive`, then `end`, which kills what is left and frees every descriptor."""

    def __init__(
        self,
        pipes: ChildPipes,
        number: int,
        output_bytes: int,
        stop_signal: signal.Signals,
        counts: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        """`counts` tells how often the kernel killed for memory and refused a process since this child began."""
        self.number = number
        self._pipes = pipes
        self._stop_signal = stop_signal
        self.stdout = Drain(pipes.stdout, output_bytes, self._flood)
        self.stderr = Drain(pipes.stderr, output_bytes, self._flood)
        self._status = None if pipes.status is None else Drain(pipes.status, 4096)
        self._words: list[Any] = []
        self._flooded = False
        self._dead = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(pipes.process, self._on_death)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._when_ended: list[Callable[[], None]] = []
        self._killed_cpu_seconds = 0.0
        self._counts = counts

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Calls back once, after `end`."""
        self._when_ended.append(callback)

    async def hello(self) -> None:
        """Waits until the child is confined and ready; raises ChildDied with its error text."""
        greeted = False
        try:
            self._pipes.channel.setblocking(False)
            self._reader, self._writer = await asyncio.open_connection(sock=self._pipes.channel, limit=_STREAM_LIMIT)
            async with asyncio.timeout(_HELLO_SECONDS):
                greeted = await self.receive() == {"hello": True}
        except TimeoutError:
            pass
        finally:
            if not greeted:  # also when cancelled: nobody else knows this child
                await self.end()
        if not greeted:
            text = self.stderr.kept.decode(errors="replace").strip()
            raise ChildDied(f"a child did not come up: {text or 'no message'}")

    async def send(self, message: dict[str, Any]) -> None:
        """Gives the child a frame; a dead child shows at the next `receive`."""
        assert self._writer is not None, "hello comes first"
        self._writer.write(frames.encode(message))
        try:
            await self._writer.drain()
        except ConnectionError:
            return

    async def receive(self) -> dict[str, Any] | None:
        """The child's next frame, or None when it closed its channel or died."""
        assert self._reader is not None, "hello comes first"
        frame = await frames.receive_async(self._reader)
        if self._status is None and frame is not None and isinstance(words := frame.get("ended"), list):
            self._words = words
            return None
        return frame

    @property
    def alive(self) -> bool:
        return not self._dead.done()

    async def until_dead(self) -> None:
        """Returns when the child and everything it started is gone."""
        await asyncio.shield(self._dead)

    def kill(self) -> None:
        """Kills the child's first process, and with it all others; safe to call twice."""
        if self.alive:
            self._killed_cpu_seconds = _cpu_seconds(self._pipes.process)
            try:
                signal.pidfd_send_signal(self._pipes.process, self._stop_signal)
            except ProcessLookupError:
                return

    def _flood(self) -> None:
        self._flooded = True
        self.kill()

    async def end(self) -> Ending:
        """Kills what is left, waits for it, drains its output, frees the descriptors; cancelling does not stop it."""
        return await asyncio.shield(asyncio.create_task(self._end()))

    async def _end(self) -> Ending:
        with contextlib.suppress(OSError):  # a child whose launcher is killed before it is tied to it waits for this
            self._pipes.channel.shutdown(socket.SHUT_WR)
        self.kill()
        await self.until_dead()
        for drain in filter(None, (self.stdout, self.stderr, self._status)):
            await drain.until_closed(_DRAIN_SECONDS)
        if self._status is not None:
            self._words = self._status.kept.split()
        elif self._reader is not None and not self._words:
            await self._last_words()
        if self._writer is not None:
            self._writer.close()
        else:
            self._pipes.channel.close()
        for callback in self._when_ended:
            callback()
        self._when_ended.clear()
        return self._ending()

    async def _last_words(self) -> None:
        """What is left on the channel of a dead child: its supervisor wrote last."""
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(_DRAIN_SECONDS):
                while await self.receive() is not None:
                    pass

    def _ending(self) -> Ending:
        counts = self._counts()
        try:
            code, cpu_seconds, rss_kib = int(self._words[0]), float(self._words[1]), int(self._words[2])
        except (ValueError, TypeError, IndexError):
            return Ending(None, self._killed_cpu_seconds, 0, *counts, self._flooded)
        return Ending(code, cpu_seconds, rss_kib * 1024, *counts, self._flooded)

    def _on_death(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pipes.process)
        os.close(self._pipes.process)
        self._dead.set_result(None)


def _cpu_seconds(pidfd: int) -> float:
    """Processor seconds of the child's workers so far, read just before they are killed; 0 where /proc hides them."""
    try:
        lines = Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
        pid = next(int(line.split()[1]) for line in lines if line.startswith("Pid:"))
        workers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ticks = 0
        for worker in workers:
            fields = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(value) for value in fields[11:15])
    except (OSError, StopIteration, ValueError, IndexError):
        return 0.0
    return ticks / os.sysconf("SC_CLK_TCK")
