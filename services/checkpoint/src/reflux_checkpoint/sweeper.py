"""What runs behind the writers' backs: garbage of writers that died, retention, and read-back of committed objects."""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from reflux_checkpoint.catalog import Catalog, Record, State
from reflux_checkpoint.manifest import ROOT, CheckpointId, encode, parse_name
from reflux_checkpoint.protocol import CommitProtocol
from reflux_checkpoint.retention import Held, RetentionPolicy, expendable
from reflux_kit.errors import ServiceError
from reflux_storage.errors import AlreadyExists, NotFound
from reflux_storage.restore import find_damage
from reflux_storage.stores.base import ObjectStore
from reflux_storage.stream import ObjectReceipt

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SweepPolicy:
    """When to let go and when to look again."""

    lease_seconds: float
    """An uncommitted checkpoint without any write for this long is garbage."""

    scrub_every_seconds: float
    """A committed checkpoint is read back when its last read-back is older; 0 never."""

    retention: RetentionPolicy


class Sweeper:
    """Blocking; one sweep at a time per service, and harmless beside another service's."""

    def __init__(
        self,
        store: ObjectStore,
        catalog: Catalog,
        protocol: CommitProtocol,
        policy: SweepPolicy,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._catalog = catalog
        self._protocol = protocol
        self._policy = policy
        self._clock = clock

    def sweep(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Collects garbage, applies retention, reads back at most one checkpoint per run. `stop` ends it early."""
        by_run: dict[str, list[Record]] = {}
        for record in self._catalog.newest_first():
            by_run.setdefault(record.id.run, []).append(record)
        self._collect_garbage({record.id for records in by_run.values() for record in records})
        for records in by_run.values():
            held = [Held(record.id, record.state is State.COMMITTED) for record in records]
            gone = expendable(held, self._policy.retention)
            for id in gone:
                self.delete(id)
            if not stop():
                self._scrub_one([record for record in records if record.id not in gone], stop)

    def _collect_garbage(self, committed: set[CheckpointId]) -> None:
        """Ends uncommitted checkpoints whose writer has been silent for the lease."""
        for id, active in self._last_activity().items():
            if self._clock() - active <= self._policy.lease_seconds:
                continue
            if id not in committed:
                try:
                    self._end(id)
                except ServiceError as error:  # committed meanwhile: the next sweep sees
                    log.info("%s is left alone: %s", id.name, error)
                    continue
                log.info("removed what the writer of %s left", id.name)
            self._store.delete(id.begun_key)  # a manifest says it all

    def _end(self, id: CheckpointId) -> None:
        if self._catalog.get(id) is None:
            self._protocol.remove_data(id)
        else:
            self._protocol.abort(id)

    def delete(self, id: CheckpointId) -> None:
        """Removes a committed checkpoint, manifest first: a crash in between leaves garbage and no torn checkpoint."""
        log.info("retention deletes %s", id.name)
        self._store.delete(id.manifest_key)
        self._protocol.remove_data(id)
        self._store.delete(id.scrub_key)
        self._store.delete(id.begun_key)

    def scrub(self, record: Record, stop: Callable[[], bool] = lambda: False) -> tuple[str, ...]:
        """Reads all objects back, keeps the finding, and returns the damaged keys."""
        if record.manifest is None:
            return record.damaged_keys
        damaged = []
        for item in record.manifest.objects:
            problem = find_damage(self._store, ObjectReceipt(item.key, item.size_bytes, item.checksum), stop)
            if problem:
                log.error("%s: %s: %s", record.id.name, item.key, problem)
                damaged.append(item.key)
        self._replace(record.id.scrub_key, encode({"checked_at": self._clock(), "damaged_keys": damaged}))
        return tuple(damaged)

    def _scrub_one(self, records: list[Record], stop: Callable[[], bool]) -> None:
        """Reads back the newest checkpoint that is due."""
        if self._policy.scrub_every_seconds <= 0:
            return
        for record in records:
            last = self._catalog.scrubbed(record.id)
            if record.manifest and (last is None or self._clock() - last[0] > self._policy.scrub_every_seconds):
                with suppress(InterruptedError):
                    self.scrub(record, stop)
                return

    def _last_activity(self) -> dict[CheckpointId, float]:
        """Unix time of the last write of every checkpoint that has an announcement, or objects, or uploads."""
        active: dict[CheckpointId, float] = {}

        def saw(key: str, when: float) -> None:
            with suppress(ValueError, IndexError):  # not a key of ours
                id = parse_name("checkpoints/" + "/".join(key.split("/")[2:4]))
                active[id] = max(when, active.get(id, 0.0))

        for info in self._store.list(f"{ROOT}/begun/"):
            saw(info.key, info.modified_seconds)
        for info in self._store.list(f"{ROOT}/data/"):
            saw(info.key, info.modified_seconds)
        for upload in self._store.list_uploads(f"{ROOT}/data/"):
            saw(upload.key, upload.touched_seconds)
        return active

    def _replace(self, key: str, data: bytes) -> None:
        try:
            self._store.put_create_only(key, data)
        except AlreadyExists:
            with suppress(NotFound):  # deleted with its checkpoint
                self._store.put_if_match(key, data, self._store.head(key).etag)
