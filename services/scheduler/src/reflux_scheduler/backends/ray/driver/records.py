"""Owns the kept records of grants: manifests in the key-value store of Ray's own head (GCS).

They live exactly as long as the groups and actors that they describe: with a head that keeps its state over a restart
they are kept too, and a cluster that starts from nothing has neither.
"""

import time

from ray.experimental import internal_kv

from reflux_scheduler.backends.ray.groups import GrantStage, Manifest, manifest_from_json

_TOMBSTONE_SECONDS = 86_400.0
_FINAL: tuple[GrantStage, ...] = ("ended", "released")
_QUIET: tuple[GrantStage, ...] = ("launched", *_FINAL)
"""Stages that only a call of the scheduler changes."""


class Records:
    """Manifests by grant id."""

    def __init__(self, namespace: str) -> None:
        self._namespace = f"reflux/{namespace}".encode()
        self._seen: dict[str, Manifest] = {}

    def get(self, grant_id: str) -> Manifest | None:
        """The manifest as the store has it, None when there is none."""
        text = internal_kv._internal_kv_get(grant_id, namespace=self._namespace)
        return manifest_from_json(text) if text else None

    def put(self, manifest: Manifest) -> None:
        """Replaces a manifest."""
        internal_kv._internal_kv_put(manifest.grant_id, manifest.to_json(), namespace=self._namespace)

    def all(self, fresh: bool = True) -> list[Manifest]:
        """Every manifest, tombstones included. Not fresh: those that only a call changes come from memory.

        Tombstones older than a day are thrown away.
        """
        seen: dict[str, Manifest] = {}
        for key in internal_kv._internal_kv_list("", namespace=self._namespace):
            grant_id = key.decode()
            manifest = self._seen.get(grant_id)
            if manifest is None or manifest.stage not in (_FINAL if fresh else _QUIET):
                manifest = self.get(grant_id)
            if manifest is not None and not self._forget(manifest):
                seen[grant_id] = manifest
        self._seen = seen
        return list(seen.values())

    def _forget(self, manifest: Manifest) -> bool:
        if manifest.stage not in _FINAL or manifest.changed_at > time.time() - _TOMBSTONE_SECONDS:
            return False
        internal_kv._internal_kv_del(manifest.grant_id, namespace=self._namespace)
        return True
