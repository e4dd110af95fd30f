"""Jobs and results as files in a folder that service and workers share; every change is one rename, so none is torn.

    requests/KEY.json   waits for a worker     taken/KEY.json   a worker has it     alive/KEY   touched by that worker
    results/KEY.json    the worker's answer    cancelled/KEY    nobody wants it any more

KEY is a hash of the work, so that a service that was restarted finds a job that it handed out, and its result.
"""

import contextlib
import hashlib
import json
import os
import re
import time
import uuid
from pathlib import Path
from typing import Any

_FOLDERS = ("requests", "taken", "alive", "results", "cancelled")
_KEY = re.compile(r"[0-9a-f]{32}")
_MOST_RESULT_BYTES = 16 << 20


def work_key(verifier: str, version: str, payload: str, answers: list[str]) -> str:
    """Equal for equal work."""
    text = json.dumps([verifier, version, payload, answers], ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Mailbox:
    """Owns the folder. All methods block on the file system and may be called from any process that shares it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in _FOLDERS:
            (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)

    def write_node(self, values: dict[str, Any]) -> None:
        """Tells workers how to run children."""
        self._write(self.folder / "node.json", values)

    def read_node(self) -> dict[str, Any]:
        """Raises FileNotFoundError while no service has used the folder."""
        return json.loads((self.folder / "node.json").read_text())

    def put(self, key: str, request: dict[str, Any], lost_seconds: float = 0.0) -> None:
        """Asks for the work, unless its result is there, it waits already, or a worker that gave a sign of life within
        `lost_seconds` has it. Work that was cancelled, or that a dead worker holds, is offered again; a live one that
        still has it may finish too, with the same result."""
        given_up = self._path("cancelled", key).exists()
        self._path("cancelled", key).unlink(missing_ok=True)
        if self._path("results", key).exists() or self._path("requests", key).exists():
            return
        sign = self.sign_of_life(key)
        if not given_up and sign is not None and time.time() - sign * 1e-9 < lost_seconds:
            return
        self._write(self._path("requests", key), request)
        self._path("taken", key).unlink(missing_ok=True)

    def take(self, key: str = "") -> tuple[str, dict[str, Any]] | None:
        """Claims `key`, or the oldest request; None when there is nothing (left) to do."""
        for name in [key] if key else self._oldest():
            taken = self._path("taken", name)
            self.beat(name)  # before the claim: nobody may see it taken without a sign of life
            with contextlib.suppress(FileNotFoundError):
                self._path("requests", name).rename(taken)
                return name, json.loads(taken.read_text())
            self._path("alive", name).unlink(missing_ok=True)
        return None

    def beat(self, key: str) -> None:
        """Says that the worker lives."""
        self._path("alive", key).touch()

    def sign_of_life(self, key: str) -> int | None:
        """A number that changes while a worker has the job; None while nobody has taken it."""
        with contextlib.suppress(FileNotFoundError):
            if self._path("taken", key).exists():
                return self._path("alive", key).stat().st_mtime_ns
        return None

    def finish(self, key: str, answer: dict[str, Any]) -> None:
        """Stores the answer of a worker."""
        self._write(self._path("results", key), answer)
        for name in ("taken", "alive", "requests"):
            self._path(name, key).unlink(missing_ok=True)

    def give_back(self, key: str) -> None:
        """A worker that has to stop offers its job again."""
        with contextlib.suppress(FileNotFoundError):
            self._path("taken", key).rename(self._path("requests", key))
        self._path("alive", key).unlink(missing_ok=True)

    def result(self, key: str) -> dict[str, Any] | None:
        """The answer once it is there. Raises ValueError for a file that no worker of ours wrote."""
        path = self._path("results", key)
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size > _MOST_RESULT_BYTES:
                raise ValueError(f"the result {path.name} is larger than {_MOST_RESULT_BYTES} bytes")
            answer = json.loads(path.read_text())
            if not isinstance(answer, dict):
                raise ValueError(f"the result {path.name} is not a JSON object")
            return answer
        return None

    def cancel(self, key: str) -> None:
        """Nobody wants the work any more: what waits is gone, a worker that has it stops."""
        self._path("cancelled", key).touch()
        self._path("requests", key).unlink(missing_ok=True)

    def is_cancelled(self, key: str) -> bool:
        """Whether a worker should stop."""
        return self._path("cancelled", key).exists()

    def forget(self, key: str) -> None:
        """Removes all traces of a job, so that it can run again."""
        for name in _FOLDERS:
            self._path(name, key).unlink(missing_ok=True)

    def sweep(self, keep_seconds: float) -> None:
        """Removes files that nobody has touched for so long."""
        oldest = time.time() - keep_seconds
        for name in _FOLDERS:
            for path in (self.folder / name).iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if path.stat().st_mtime < oldest:
                        path.unlink()

    def _oldest(self) -> list[str]:
        aged: list[tuple[int, str]] = []
        for path in (self.folder / "requests").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.suffix == ".json" and _KEY.fullmatch(path.stem):
                    aged.append((path.stat().st_mtime_ns, path.stem))
        return [key for _, key in sorted(aged)]

    def _path(self, name: str, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key[:40]!r} is not a key")
        return self.folder / name / (f"{key}.json" if name in ("requests", "taken", "results") else key)

    @staticmethod
    def _write(path: Path, document: dict[str, Any]) -> None:
        part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        with part.open("w") as file:
            json.dump(document, file, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
