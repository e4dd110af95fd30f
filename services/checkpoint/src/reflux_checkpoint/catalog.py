"""What checkpoints there are: derived from the store, so that a restarted service knows as much as the old one."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from reflux_checkpoint.manifest import (
    ROOT,
    CheckpointId,
    DamagedRecord,
    Manifest,
    StoredObject,
    decode,
    decode_manifest,
    parse_name,
)
from reflux_storage.errors import NotFound as ObjectMissing
from reflux_storage.stores.base import ObjectInfo, ObjectStore

log = logging.getLogger(__name__)
_CACHED_MANIFESTS = 10_000


class State(Enum):
    """Life of a checkpoint; DAMAGED is committed, but an object or the manifest is not what was written."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"
    DAMAGED = "damaged"


@dataclass(frozen=True)
class Record:
    """A checkpoint as the store shows it now; `manifest` is None unless it was committed and can be read."""

    id: CheckpointId
    state: State
    manifest: Manifest | None = None
    damaged_keys: tuple[str, ...] = ()


class Catalog:
    """Reads the store; blocking and safe in threads. The cache holds manifests, which never change under an etag."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._cache: dict[tuple[str, str], Manifest] = {}

    def get(self, id: CheckpointId) -> Record | None:
        """The checkpoint, or None when nobody began it."""
        try:
            manifest = self._read(self._store.head(id.manifest_key))
        except ObjectMissing:
            return self._uncommitted(id)
        except DamagedRecord:
            return self._record(id, None)
        return self._record(id, manifest) if manifest.id == id else self._uncommitted(id)

    def newest_first(self, run: str = "", after: CheckpointId | None = None) -> Iterator[Record]:
        """Committed checkpoints (damaged ones included) by run, newest first, those behind `after` only.

        Each is examined when it is asked for.
        """
        prefix = f"{ROOT}/manifests/{run}/" if run else f"{ROOT}/manifests/"
        infos = list(self._store.list(prefix))
        infos.sort(key=lambda info: info.key, reverse=True)
        infos.sort(key=lambda info: _run_of(info.key))
        for info in infos:
            if after and (
                _run_of(info.key) < after.run or (_run_of(info.key) == after.run and info.key >= after.manifest_key)
            ):
                continue
            record = self._examined(info)
            if record is not None:
                yield record

    def latest(self, run: str) -> Record | None:
        """The newest checkpoint whose manifest and objects are there; what is skipped is logged with the reason."""
        for record in self.newest_first(run):
            if record.state is State.COMMITTED:
                return record
            log.warning("skipping %s: damaged %s", record.id.name, ", ".join(record.damaged_keys))
        return None

    def owner(self, id: CheckpointId) -> CheckpointId | None:
        """Who committed this attempt and step; None when nobody did. Raises `DamagedRecord`."""
        try:
            return self._read(self._store.head(id.manifest_key)).id
        except ObjectMissing:
            return None

    def wrong_objects(self, id: CheckpointId, objects: tuple[StoredObject, ...]) -> tuple[str, ...]:
        """Keys of those objects that are missing or have another size."""
        sizes = {info.key: info.size_bytes for info in self._store.list(f"{id.data_prefix}/")}
        return tuple(item.key for item in objects if sizes.get(item.key) != item.size_bytes)

    def scrubbed(self, id: CheckpointId) -> tuple[float, tuple[str, ...]] | None:
        """Unix time and damaged keys of the last read-back; None when there was none."""
        try:
            body = decode(self._store.get(id.scrub_key)[0])
        except (ObjectMissing, DamagedRecord):  # a damaged report is no report: the next scrub writes a new one
            return None
        return float(body["checked_at"]), tuple(body["damaged_keys"])

    def _examined(self, info: ObjectInfo) -> Record | None:
        try:
            manifest = self._read(info)
        except ObjectMissing:  # deleted since it was listed
            return None
        except DamagedRecord as error:
            owner = self._writer_of(info.key)
            log.warning("manifest %s is damaged: %s", info.key, error)
            return self._record(owner, None) if owner else None
        return self._record(manifest.id, manifest)

    def _writer_of(self, manifest_key: str) -> CheckpointId | None:
        """Who may have written a manifest that cannot be read: the data below the same attempt and step."""
        _, _, run, order = manifest_key.split("/")
        for info in self._store.list(f"{ROOT}/data/{run}/{order}-"):
            return parse_name(f"checkpoints/{run}/{info.key.split('/')[3]}")
        return None

    def _read(self, info: ObjectInfo) -> Manifest:
        cached = self._cache.get((info.key, info.etag))
        if cached is None:
            data, found = self._store.get(info.key)
            cached = decode_manifest(data)
            if cached.id.manifest_key != info.key:
                raise DamagedRecord("it belongs to another place")
            if len(self._cache) >= _CACHED_MANIFESTS:
                self._cache.pop(next(iter(self._cache)), None)
            self._cache[info.key, found.etag] = cached
        return cached

    def _record(self, id: CheckpointId, manifest: Manifest | None) -> Record:
        if manifest is None:
            return Record(id, State.DAMAGED, damaged_keys=(id.manifest_key,))
        scrub = self.scrubbed(id)
        damaged = self.wrong_objects(id, manifest.objects) or (scrub[1] if scrub else ())
        return Record(id, State.DAMAGED if damaged else State.COMMITTED, manifest, damaged)

    def _uncommitted(self, id: CheckpointId) -> Record | None:
        try:
            state = decode(self._store.get(id.begun_key)[0])["state"]
        except ObjectMissing:
            return None
        except DamagedRecord:
            state = "aborted"
        return Record(id, State.ABORTED if state == "aborted" else State.OPEN)


def _run_of(manifest_key: str) -> str:
    return manifest_key.split("/")[2]
