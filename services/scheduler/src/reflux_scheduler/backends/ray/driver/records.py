"""Owns the kept records of grants: manifests in the key-value store of Ray's own head (GCS).

They live exactly as long as the groups and actors that they describe: with a head that keeps its state over a restart
they are kept too, and a cluster that starts from nothing has neither.
"""

import threading
import time

from ray.experimental import internal_kv

from reflux_scheduler.backends.ray.groups import GrantStage, Manifest, manifest_from_json

_TOMBSTONE_SECONDS = 86_400.0
_TOMBSTONES: tuple[GrantStage, ...] = ("ended", "released")
_ONLY_BY_CALLS: tuple[GrantStage, ...] = ("launched", *_TOMBSTONES)
"""Stages that only a call of a scheduler ends; `released` never ends."""


class Records:
    """Manifests by grant id."""

    def __init__(self, namespace: str) -> None:
        self._namespace = f"reflux/{namespace}".encode()
        self._seen: dict[str, Manifest] = {}
        self._lock = threading.Lock()

    def get(self, grant_id: str) -> Manifest | None:
        """The manifest as the store has it, None when there is none."""
        text = internal_kv._internal_kv_get(grant_id, namespace=self._namespace)
        return manifest_from_json(text) if text else None

    def put(self, manifest: Manifest) -> None:
        """Writes a manifest or replaces one."""
        with self._lock:
            internal_kv._internal_kv_put(manifest.grant_id, manifest.to_json(), namespace=self._namespace)
            self._seen[manifest.grant_id] = manifest

    def all(self, fresh: bool = True) -> list[Manifest]:
        """Every manifest, tombstones included. Not fresh: those that only a call changes come from memory.

        Tombstones older than a day are thrown away.
        """
        with self._lock:
            seen: dict[str, Manifest] = {}
            for key in internal_kv._internal_kv_list("", namespace=self._namespace):
                grant_id = key.decode()
                manifest = self._seen.get(grant_id)
                if manifest is None or manifest.stage not in (("released",) if fresh else _ONLY_BY_CALLS):
                    manifest = self.get(grant_id)
                if manifest is not None and not self._forget(manifest):
                    seen[grant_id] = manifest
            self._seen = seen
            return list(seen.values())

    def _forget(self, manifest: Manifest) -> bool:
        if manifest.stage not in _TOMBSTONES or manifest.changed_at > time.time() - _TOMBSTONE_SECONDS:
            return False
        internal_kv._internal_kv_del(manifest.grant_id, namespace=self._namespace)
        return True
