"""Inside a session's child: runs text in one lasting namespace and moves files, request by request, until the end.

What runs here shares the interpreter with text that a model wrote. The service takes its answers for no more than that.
"""

import ast
import base64
import binascii
import builtins
import contextlib
import linecache
import os
import signal
import socket
import stat
import sys
import traceback
from types import FrameType
from typing import Any, Never

from reflux_sandbox.isolation import frames
from reflux_sandbox.isolation.limits_hit import disk_is_full, hit_process_limit

_WORK_FOLDER = "."


class Interrupted(BaseException):
    """The time of one call is over. No Exception, so that an ordinary handler does not swallow it."""


class RefusedPath(ValueError):
    """The path leads elsewhere, or to something that is no regular file."""


def serve_session(channel: socket.socket) -> Never:
    """Answers requests {"id", "op", ...} one after the other; never returns."""
    own = os.getpid()
    folder = os.open(_WORK_FOLDER, os.O_RDONLY | os.O_DIRECTORY)
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    sys.argv = ["session"]
    frames.send(channel, {"ready": True})
    while (request := frames.receive(channel)) is not None:
        answer = _answer(request, names, folder)
        if os.getpid() != own:  # a fork of the text came back from it: it is not the session
            os._exit(0)
        frames.send(channel, {"id": request["id"], **answer})
    os._exit(0)


def _answer(request: dict[str, Any], names: dict[str, Any], folder: int) -> dict[str, Any]:
    try:
        if request["op"] == "exec":
            return {"status": run_text(request["code"], request["seconds"], names, request["number"])}
        if request["op"] == "write":
            return {"size": write_file(folder, request["path"], request["data"], append=request["append"])}
        return read_file(folder, request["path"], request["offset"], request["most"])
    except RefusedPath as error:
        return {"error": "refused", "message": str(error)}
    except OSError as error:
        kind = "disk" if disk_is_full(error) else "missing" if isinstance(error, FileNotFoundError) else "refused"
        return {"error": kind, "message": error.strerror or str(error)}


def run_text(text: str, seconds: float, names: dict[str, Any], number: int) -> str:
    """Runs `text` in `names`; its status. After `seconds` it is interrupted where it runs Python."""
    try:
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            status = _run(text, names, f"call-{number}.py")
        finally:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
    except Interrupted:
        status = "timeout"
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # process boundary: the text may have closed or replaced them
            stream.flush()
    return status


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise Interrupted


def _run(text: str, names: dict[str, Any], name: str) -> str:
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    try:
        body = ast.parse(text, name).body
        last = [body.pop()] if body and isinstance(body[-1], ast.Expr) else []
        exec(compile(ast.Module(body, []), name, "exec"), names)
        if last:
            exec(compile(ast.Interactive(last), name, "single"), names)  # prints its value
    except Interrupted:
        raise
    except MemoryError:
        return "memory"
    except BaseException as error:  # process boundary: SystemExit and KeyboardInterrupt of the text too
        _print_traceback(error)
        if hit_process_limit(error):
            return "pids"
        return "disk" if disk_is_full(error) else "exception"
    return "ok"


def _print_traceback(error: BaseException) -> None:
    """Without the frames of this module."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def _walk(folder: int, path: str, *, make: bool) -> tuple[int, str]:
    """Opens the folder of `path` step by step without following a link; returns it (to close) and the last name."""
    *parents, last = [part for part in path.split("/") if part not in ("", ".")] or [""]
    if path.startswith("/") or not last or ".." in (*parents, last):
        raise RefusedPath("a path must stay below the work folder")
    current = os.dup(folder)
    try:
        for part in parents:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=current)
            following = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=current)
            os.close(current)
            current = following
    except OSError:
        os.close(current)
        raise
    return current, last


def _open(folder: int, path: str, flags: int, *, make: bool) -> int:
    """A regular file below `folder`; a link anywhere on the way is refused."""
    parent, last = _walk(folder, path, make=make)
    try:
        descriptor = os.open(last, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=parent)
    finally:
        os.close(parent)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RefusedPath("not a regular file")
    return descriptor


def write_file(folder: int, path: str, data: str, *, append: bool) -> int:
    """Replaces or extends a file by base64 `data`; its size. A full disk leaves what fitted."""
    try:
        content = base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise RefusedPath("data is not base64") from error
    flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC)
    descriptor = _open(folder, path, flags, make=True)
    try:
        while content:
            content = content[os.write(descriptor, content) :]
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def read_file(folder: int, path: str, offset: int, most: int) -> dict[str, Any]:
    """Up to `most` bytes from `offset` in base64, and the size of the whole."""
    descriptor = _open(folder, path, os.O_RDONLY, make=False)
    try:
        data = os.pread(descriptor, most, offset)
        return {"data": base64.b64encode(data).decode(), "size": os.fstat(descriptor).st_size}
    finally:
        os.close(descriptor)
