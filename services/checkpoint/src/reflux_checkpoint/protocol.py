"""How a checkpoint comes into being: begin, (objects by the writer), commit; and how it is given up or fenced.

The manifest is written last and create-only: before it there is no checkpoint, after it there is a whole one. A killed
service leaves an open announcement, which the next one finds; nothing is decided in memory.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from reflux_checkpoint.catalog import Catalog, Record, State
from reflux_checkpoint.manifest import (
    ROOT,
    CheckpointId,
    Cursor,
    DamagedRecord,
    Manifest,
    StoredObject,
    decode,
    encode,
    encode_manifest,
)
from reflux_kit.errors import AlreadyExists, Conflict, NotFound, WrongState
from reflux_storage.errors import AlreadyExists as ObjectExists
from reflux_storage.errors import NotFound as ObjectMissing
from reflux_storage.errors import PreconditionFailed
from reflux_storage.stores.base import ObjectInfo, ObjectStore

log = logging.getLogger(__name__)
_TRIES = 10
COMMIT_SECONDS = 120.0
"""A commit that was taken up and has no manifest after this long has died; bounds no call, only who may abort."""


@dataclass(frozen=True)
class Begun:
    """A writer's announcement: "open", "committing" or "aborted", since when (Unix time), and the etag to change it."""

    state: str
    since: float
    etag: str


class CommitProtocol:
    """Changes the store; blocking and safe in threads and beside other services on the same store."""

    def __init__(self, store: ObjectStore, catalog: Catalog, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._catalog = catalog
        self._clock = clock

    def begin(self, id: CheckpointId) -> Record:
        """Announces a writer; the same id again returns what became of the first."""
        self._raise_fence(id)
        existing = self._catalog.get(id)
        if existing is not None:
            return existing
        self._check_free(id)
        try:
            self._store.put_create_only(id.begun_key, self._announcement("open"))
        except ObjectExists:
            return self._known(id)
        log.info("began %s", id.name)
        return Record(id, State.OPEN)

    def commit(self, id: CheckpointId, objects: tuple[StoredObject, ...], cursor: Cursor) -> Record:
        """Writes the manifest when the objects are there; the same commit again returns the checkpoint."""
        manifest = Manifest(id, tuple(sorted(objects, key=lambda item: item.key)), cursor, self._clock())
        record = self._known(id)
        if record.state in (State.COMMITTED, State.DAMAGED):
            return _same(record, manifest)
        _refuse_older(id, self._fence(id.run)[0])
        self._check_free(id)
        if record.state is State.ABORTED:
            raise WrongState(f"{id.name} was aborted")
        wrong = self._catalog.wrong_objects(id, objects)
        if wrong:
            raise WrongState(f"{id.name}: missing or of another size: {', '.join(wrong[:10])}", objects=str(len(wrong)))
        self._take_up(id)
        try:
            self._store.put_create_only(id.manifest_key, encode_manifest(manifest))
        except ObjectExists:
            self._check_free(id)  # another writer of this step was faster
            return _same(self._known(id), manifest)
        log.info("committed %s: %d objects, %d bytes", id.name, len(objects), sum(item.size_bytes for item in objects))
        return self._known(id)

    def abort(self, id: CheckpointId) -> Record:
        """Gives up an open checkpoint and removes what was written; an aborted one stays aborted."""
        record = self._known(id)
        if record.state in (State.COMMITTED, State.DAMAGED):
            raise WrongState(f"{id.name} is committed; retention deletes it")
        begun = self.begun(id)
        if begun and begun.state == "committing" and self._clock() - begun.since < COMMIT_SECONDS:
            raise Conflict(f"{id.name} is being committed")
        if begun and begun.state != "aborted":
            try:
                self._store.put_if_match(id.begun_key, self._announcement("aborted"), begun.etag)
            except PreconditionFailed:
                raise Conflict(f"{id.name} is being changed by another call") from None
            log.info("aborted %s", id.name)
        self.remove_data(id)
        return Record(id, State.ABORTED)

    def begun(self, id: CheckpointId) -> Begun | None:
        """The announcement; a damaged one counts as open since ever, so that garbage collection ends it."""
        try:
            data, info = self._store.get(id.begun_key)
        except ObjectMissing:
            return None
        try:
            body = decode(data)
            return Begun(str(body["state"]), float(body["since"]), info.etag)
        except (DamagedRecord, KeyError, TypeError, ValueError):
            return Begun("open", 0.0, info.etag)

    def remove_data(self, id: CheckpointId) -> None:
        """Deletes every object and upload of an uncommitted or deleted checkpoint."""
        for upload in list(self._store.list_uploads(f"{id.data_prefix}/")):
            self._store.abort(upload.key, upload.upload_id)
        for info in list(self._store.list(f"{id.data_prefix}/")):
            self._store.delete(info.key)

    def _known(self, id: CheckpointId) -> Record:
        record = self._catalog.get(id)
        if record is None:
            raise NotFound(f"no checkpoint {id.name}")
        return record

    def _check_free(self, id: CheckpointId) -> None:
        try:
            owner = self._catalog.owner(id)
        except DamagedRecord:
            raise WrongState(f"the manifest of attempt {id.attempt}, step {id.step} of {id.run} is damaged") from None
        if owner is not None and owner != id:
            raise AlreadyExists(f"attempt {id.attempt} committed step {id.step} already", name=owner.name)

    def _take_up(self, id: CheckpointId) -> None:
        """From here on garbage collection and aborts leave the objects alone."""
        begun = self.begun(id)
        if begun is None or begun.state == "aborted":
            raise WrongState(f"{id.name} was aborted")
        try:
            self._store.put_if_match(id.begun_key, self._announcement("committing"), begun.etag)
        except PreconditionFailed:
            raise Conflict(f"{id.name} is being changed by another call") from None

    def _announcement(self, state: str) -> bytes:
        return encode({"state": state, "since": self._clock()})

    def _fence(self, run: str) -> tuple[int, ObjectInfo | None]:
        try:
            data, info = self._store.get(f"{ROOT}/fences/{run}")
        except ObjectMissing:
            return -1, None
        try:
            return int(decode(data)["attempt"]), info
        except (DamagedRecord, KeyError, TypeError, ValueError):
            log.warning("the fence of %s is damaged and is written anew", run)
            return -1, info

    def _raise_fence(self, id: CheckpointId) -> None:
        key, data = f"{ROOT}/fences/{id.run}", encode({"attempt": id.attempt})
        for _ in range(_TRIES):
            attempt, info = self._fence(id.run)
            _refuse_older(id, attempt)
            if attempt == id.attempt:
                return
            with suppress(ObjectExists, PreconditionFailed):  # another writer was faster: look again
                if info is None:
                    self._store.put_create_only(key, data)
                else:
                    self._store.put_if_match(key, data, info.etag)
                return
        raise Conflict(f"too many writers raise the attempt of {id.run}")


def _refuse_older(id: CheckpointId, attempt: int) -> None:
    if attempt > id.attempt:
        raise WrongState(f"attempt {id.attempt} of {id.run} was replaced by attempt {attempt}", attempt=str(attempt))


def _same(record: Record, asked: Manifest) -> Record:
    """The committed record, if `asked` says the same; raises `AlreadyExists` otherwise."""
    held = record.manifest
    if held is None:
        raise WrongState(f"the manifest of {record.id.name} is damaged")
    if _content(held) != _content(asked):
        raise AlreadyExists(f"{record.id.name} was committed with other objects or another cursor")
    return record


def _content(manifest: Manifest) -> dict[str, Any]:
    return {key: value for key, value in asdict(manifest).items() if key != "committed_at"}
