"""Owns a local copy of one collection of objects, kept up to date by a watch."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from reflux_scheduler.backends.base import BackendAway
from reflux_scheduler.backends.kubernetes.api import ApiFailure, Expired, KubernetesApi

log = logging.getLogger(__name__)

Object = dict[str, Any]

_RETRY_SECONDS = (0.2, 5.0)
"""First and longest pause between attempts to reach the server again."""


class Mirror:
    """Lists, then watches from that resource version; lists again when the version has become too old."""

    def __init__(self, api: KubernetesApi, where: str, selector: str, keep: Callable[[Object], Object]) -> None:
        self._api = api
        self._where = where
        self._selector = selector
        self._keep = keep
        self._objects: dict[str, Object] = {}
        self._version = ""
        self._problem = ""
        self._settled = asyncio.Event()
        """Set when it is known whether the server can be reached: in step, or with a problem."""

        self.revision = 0
        """Counts changes, for those who keep what they computed from the objects."""

    @property
    def objects(self) -> dict[str, Object]:
        """The objects by namespace/name, or by name where there are no namespaces. Ask `in_step` first."""
        return self._objects

    async def in_step(self, seconds: float) -> None:
        """Returns when the copy follows the server. Raises BackendAway when it cannot."""
        try:
            async with asyncio.timeout(seconds):
                await self._settled.wait()
        except TimeoutError:
            raise BackendAway(f"no list of {self._where} after {seconds:g} s") from None
        if self._problem:
            raise BackendAway(self._problem)

    def put(self, thing: Object) -> None:
        """Takes in what a call of ours returned, before the watch tells it.

        What is no newer than the copy is in it already, or was deleted since: it would come back as a ghost. Versions
        of one resource are integers that grow (KEP-5504).
        """
        held = self._objects.get(_key(thing))
        if _version(thing) > max(int(self._version or 0), _version(held) if held is not None else 0):
            self._take(thing)

    def _take(self, thing: Object) -> None:
        self._objects[_key(thing)] = self._keep(thing)
        self.revision += 1

    async def run(self) -> None:
        """Follows the server until cancelled."""
        pause = _RETRY_SECONDS[0]
        while True:
            try:
                if not self._version:
                    await self._list()
                self._in_step()
                if await self._watch():
                    pause = _RETRY_SECONDS[0]
                else:
                    # A proxy that ends every stream at once must not keep us busy.
                    await asyncio.sleep(pause)
            except Expired:
                log.info("the watch of %s is too old, listing again", self._where)
                self._version = ""
            except (BackendAway, ApiFailure) as error:
                if not self._problem:
                    log.warning("cannot follow %s: %s", self._where, error)
                self._problem, self._version = f"{self._where}: {error}", ""
                self._settled.set()
                await asyncio.sleep(pause)
                pause = min(2 * pause, _RETRY_SECONDS[1])

    async def _list(self) -> None:
        found, version = await self._api.list(self._where, self._selector)
        self._objects = {_key(each): self._keep(each) for each in found}
        self.revision += 1
        self._version = version

    def _in_step(self) -> None:
        self._problem = ""
        self._settled.set()

    async def _watch(self) -> bool:
        """Follows one stream to its end; whether it brought anything."""
        heard = False
        async with contextlib.aclosing(self._api.watch(self._where, self._version, self._selector)) as events:
            async for event in events:
                heard = True
                thing = event["object"]
                self._version = thing["metadata"].get("resourceVersion", self._version)
                if event["type"] == "DELETED":
                    self._objects.pop(_key(thing), None)
                    self.revision += 1
                elif event["type"] != "BOOKMARK":
                    self._take(thing)
        return heard


def _version(thing: Object) -> int:
    return int(thing["metadata"].get("resourceVersion") or 0)


def _key(thing: Object) -> str:
    metadata = thing["metadata"]
    namespace = metadata.get("namespace", "")
    return f"{namespace}/{metadata['name']}" if namespace else metadata["name"]
