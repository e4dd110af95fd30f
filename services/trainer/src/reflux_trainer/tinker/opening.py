"""Puts the Tinker API together from the trainer's settings and peers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from reflux_kit.errors import StartupError
from reflux_storage.errors import StorageError
from reflux_storage.stores import open_store
from reflux_storage.stores.options import S3Options
from reflux_trainer.peers import Peers
from reflux_trainer.settings import TrainerSettings
from reflux_trainer.tinker.blobs import Blobs
from reflux_trainer.tinker.catalog import Catalog
from reflux_trainer.tinker.desks import Desks
from reflux_trainer.tinker.door import Door
from reflux_trainer.tinker.fleet import read_base
from reflux_trainer.tinker.futures import FutureTable
from reflux_trainer.tinker.http import PREFIX, tinker_application
from reflux_trainer.tinker.keys import load_tenants


@dataclass(frozen=True)
class TinkerApi:
    """The API before its address is bound."""

    door: Door | None = None
    app: web.Application | None = None

    def mount(self, app: web.Application) -> None:
        """Adds the routes, if base models are offered."""
        if self.app is not None:
            app.add_subapp(PREFIX, self.app)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Works while the block runs; enter it once the address is bound: a second trainer takes nothing over."""
        if self.door is None:
            yield
            return
        async with self.door.open():
            yield


def open_tinker(peers: Peers, settings: TrainerSettings) -> TinkerApi:
    """The API of `settings.tinker`; without base models there is none. Raises `StartupError` naming the mistake."""
    tinker = settings.tinker
    if not tinker.base_models:
        return TinkerApi()
    bases = {name: read_base(name, folder) for name, folder in tinker.base_models.items()}
    tenants = load_tenants(tinker.keys_file, settings.stack_secret)
    catalog, blobs = Catalog(peers.redis), _blobs(settings)
    futures = FutureTable(peers.redis, blobs, result_seconds=tinker.result_seconds, max_pending=tinker.max_pending)
    door = Door(tinker, catalog, futures, blobs, Desks(bases, peers, catalog, futures, blobs, tinker))
    return TinkerApi(door, tinker_application(door, tenants))


def _blobs(settings: TrainerSettings) -> Blobs:
    url = settings.object_store
    if not url:
        if not settings.state_dir:
            raise StartupError("REFLUX_TINKER_BASE_MODELS needs an object store: set REFLUX_OBJECT_STORE")
        url = (Path(settings.state_dir).absolute() / "objects").as_uri()
    try:
        return Blobs(open_store(url, S3Options(endpoint=settings.s3_endpoint or None)), url)
    except (ValueError, StorageError) as error:
        raise StartupError(f"REFLUX_OBJECT_STORE: {error}") from None
