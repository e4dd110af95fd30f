"""Checkpoints after they were saved: published, kept for a time, copied, removed."""

import time
from contextlib import suppress
from dataclasses import asdict, replace

from reflux_kit.errors import InvalidRequest, NotFound
from reflux_trainer.tinker import bodies
from reflux_trainer.tinker.blobs import Blobs, folder_of
from reflux_trainer.tinker.catalog import Catalog
from reflux_trainer.tinker.names import CheckpointUri, parse_uri
from reflux_trainer.tinker.records import Checkpoint, Lora, Weights

_MAX_COPY_BYTES = 1 << 30


class Shelf:
    """What tenants do with their checkpoints. A published one is read by its address; only its owner changes it."""

    def __init__(self, catalog: Catalog, blobs: Blobs) -> None:
        self._catalog, self._blobs = catalog, blobs

    async def publish(self, tenant: str, uri: str, *, public: bool) -> None:
        """Lets other tenants read it, or no longer. Raises NotFound."""
        await self._catalog.change_checkpoint(tenant, uri, public=public)

    async def expire(self, tenant: str, uri: str, body: bodies.Expiry) -> None:
        """Keeps it for so long from now on, or for good. Raises NotFound."""
        expires_at = None if body.ttl_seconds is None else time.time() + body.ttl_seconds
        await self._catalog.change_checkpoint(tenant, uri, expires_at=expires_at)

    async def copy(self, tenant: str, body: bodies.CopyWeights) -> str:
        """Copies a checkpoint that may be read into a slot of the caller's session; returns its address.

        The same call again returns the same copy. Raises InvalidRequest, NotFound, and Conflict for a slot that holds
        something else.
        """
        if body.destination_project_id or body.weights_access_token:
            field = "destination_project_id" if body.destination_project_id else "weights_access_token"
            raise InvalidRequest(
                f"{field} is not served: copy into a session, from a published checkpoint", field=field
            )
        if body.session_id is None or body.model_seq_id is None:
            raise InvalidRequest("copy_weights needs session_id and model_seq_id", field="session_id")
        await self._catalog.session(tenant, body.session_id)
        source = await self._catalog.readable_checkpoint(tenant, body.source_path)
        if source.stored.size_bytes > _MAX_COPY_BYTES:
            raise InvalidRequest(
                f"{body.source_path} has {source.stored.size_bytes} bytes, {_MAX_COPY_BYTES} are copied"
            )
        slot, lora = (body.session_id, body.model_seq_id), Lora(**source.lora)
        model = await self._catalog.make_model(tenant, *slot, source.base_model, lora, copied_from=source.uri)
        uri = CheckpointUri(model.model_id, source.kind, parse_uri(source.uri).name)
        with suppress(NotFound):
            return (await self._catalog.checkpoint(tenant, str(uri))).uri
        await self._catalog.add_checkpoint(
            replace(
                source,
                uri=str(uri),
                model_id=model.model_id,
                weights=asdict(await self._copied(source, uri)),
                created_at=time.time(),
                seq_id=-1,
                expires_at=time.time() + body.ttl_seconds if body.ttl_seconds else None,
                public=False,
                copied_from=source.uri,
            )
        )
        return str(uri)

    async def _copied(self, source: Checkpoint, uri: CheckpointUri) -> Weights:
        """The objects of a checkpoint below a prefix of the copy's own; one that is there already stays."""
        folder, objects = f"{folder_of(uri.model)}/copies/{uri.kind}-{uri.name}", []
        for number, (key, size, checksum) in enumerate(source.stored.objects):
            target = f"{folder}/{number:05d}-{key.rpartition('/')[2]}"
            await self._blobs.copy(key, target)
            objects.append([target, size, checksum])
        return Weights(objects=objects)

    async def delete(self, tenant: str, uri: str) -> None:
        """Removes a checkpoint and its bytes. Raises NotFound."""
        await self.remove(await self._catalog.checkpoint(tenant, uri))

    async def remove(self, checkpoint: Checkpoint) -> None:
        """Forgets a checkpoint and frees its bytes."""
        await self._catalog.remove_checkpoint(checkpoint)
        await self._blobs.drop(key for key, *_ in checkpoint.stored.objects)
