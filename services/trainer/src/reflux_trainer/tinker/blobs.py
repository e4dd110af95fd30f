"""Objects of the Tinker API in the object store: large payloads and results, and the removal of what is not needed."""

import asyncio
import logging
from collections.abc import Iterable
from uuid import uuid4

from reflux_storage.errors import AlreadyExists, StorageError
from reflux_storage.stores.base import ObjectStore

log = logging.getLogger(__name__)
INLINE_BYTES = 64 << 10
"""What is larger goes to the object store; Redis keeps its key."""
ROOT = "tinker"
_REFERENCE, _INLINE = b"@", b"="


def folder_of(owner: str) -> str:
    """Prefix of everything that a model or sampling session owns."""
    return f"{ROOT}/{owner.replace(':', '-')}"


class Blobs:
    """Bytes that are kept in Redis while they are small; calls of the store run in threads."""

    def __init__(self, store: ObjectStore, url: str) -> None:
        self._store, self.url = store, url

    async def pack(self, owner: str, data: bytes) -> bytes:
        """What Redis keeps of `data`: itself, or the key of an object that holds it."""
        if len(data) <= INLINE_BYTES:
            return _INLINE + data
        key = f"{folder_of(owner)}/blobs/{uuid4().hex}"
        await asyncio.to_thread(self._store.put_create_only, key, data)
        return _REFERENCE + key.encode()

    async def unpack(self, packed: bytes) -> bytes:
        """The data behind what `pack` returned; raises StorageError when the object is gone or the store away."""
        if packed.startswith(_INLINE):
            return packed[1:]
        return (await asyncio.to_thread(self._store.get, packed[1:].decode()))[0]

    async def drop_packed(self, packed: Iterable[bytes]) -> None:
        """Removes objects behind packed values that are not needed any more."""
        await self.drop(each[1:].decode() for each in packed if each.startswith(_REFERENCE))

    async def drop(self, keys: Iterable[str]) -> None:
        """Removes objects; one that cannot be removed now is left behind and logged."""
        for key in keys:
            try:
                await asyncio.to_thread(self._store.delete, key)
            except StorageError as error:
                log.warning("%s is left behind in the object store: %s", key, error)

    async def copy(self, source: str, target: str) -> None:
        """Copies an object; one that exists stays. Raises StorageError when the source is gone."""
        data, _ = await asyncio.to_thread(self._store.get, source)
        await self.put(target, data)

    async def put(self, key: str, data: bytes) -> None:
        """Writes an object; one that exists stays."""
        try:
            await asyncio.to_thread(self._store.put_create_only, key, data)
        except AlreadyExists:
            return
