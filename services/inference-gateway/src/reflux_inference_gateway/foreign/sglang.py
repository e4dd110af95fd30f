"""SGLang through its own routes: the adapter pulls, SGLang loads while its generation is paused.

Written against SGLang 0.5.23. Two ways for the bytes: a safetensors file in tmpfs (`SglangDisk`), or a broadcast in a
process group (`sglang_distributed`). Pause mode `retract` puts running requests back into the queue, so that their keys
and values are computed anew; `in_place` would go on with old ones and forbid to flush the cache.
"""

import asyncio
import time
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path

from reflux_inference_gateway.foreign.base import EngineFailed, EngineUnfit, WeightSink
from reflux_inference_gateway.foreign.http_client import LOAD_SECONDS, EngineHttp
from reflux_inference_gateway.foreign.weight_file import WeightFile
from reflux_transfer.client.offer import Offer
from reflux_transfer.client.puller import Puller
from reflux_transfer.intake import Intake
from reflux_transfer.pulling.report import PullReport
from reflux_weightplan.spec import SpecLayout


class SglangSink(WeightSink):
    """One SGLang server; the intake lies in this process."""

    up_route = "/model_info"  # /health generates a token, which a paused engine never does

    def __init__(self, http: EngineHttp, puller: Puller | None = None) -> None:
        """`puller` as for `Intake`."""
        self._http, self._puller = http, puller
        self._intake: Intake | None = None

    async def open(self, layout: SpecLayout) -> None:
        try:
            await self._http.get("/model_info")
        except EngineFailed as error:
            raise EngineUnfit(f"this is no SGLang server: {error}") from error
        self._intake = Intake(layout, self._puller)
        await self._open(self._intake)

    async def receive(self, offer: Offer, cancelled: Callable[[], bool]) -> PullReport:
        assert self._intake
        report = await asyncio.to_thread(self._intake.pull, offer, cancelled)
        await self._received(self._intake)
        return report

    async def commit(self, version: int, epoch: int) -> float:
        start = time.perf_counter()
        try:
            await self._http.post("/pause_generation", {"mode": "retract"})
            await self._load(str(version))
            await self._http.post("/continue_generation")
        except RuntimeError:  # EngineFailed, and torch's
            await self._http.stop("/pause_generation", {"mode": "abort"})
            raise
        return 1000 * (time.perf_counter() - start)

    async def version(self) -> str:
        return str((await self._http.get("/model_info")).get("weight_version", ""))

    async def close(self) -> None:
        if self._intake:
            await asyncio.to_thread(self._intake.close)

    @abstractmethod
    async def _open(self, intake: Intake) -> None:
        """Gets ready whatever loading from the intake needs. Raises `EngineUnfit`."""

    async def _received(self, intake: Intake) -> None:
        """Called with the verified bytes of a version, while requests go on."""
        return

    @abstractmethod
    async def _load(self, version: str) -> None:
        """Has the engine load what lies in the intake, name it `version` and flush its cache; it is paused."""


class SglangDisk(SglangSink):
    """`/update_weights_from_disk`, where the disk is a tmpfs: a copy in memory, made before the pause."""

    def __init__(self, http: EngineHttp, model: Path, scratch: Path, puller: Puller | None = None) -> None:
        super().__init__(http, puller)
        self._model, self._scratch = model, scratch
        self._file: WeightFile | None = None

    async def _open(self, intake: Intake) -> None:
        try:
            self._file = await asyncio.to_thread(WeightFile, self._model, intake.layout, self._scratch)
        except OSError as error:
            size = intake.layout.parameter_bytes
            raise EngineUnfit(f"no {size} bytes in {self._scratch}: {error.strerror}") from error

    async def _received(self, intake: Intake) -> None:
        assert self._file
        await asyncio.to_thread(self._file.fill, intake.view)

    async def _load(self, version: str) -> None:
        assert self._file
        body = {"model_path": str(self._file.folder), "weight_version": version, "flush_cache": True}
        await self._http.post("/update_weights_from_disk", body, seconds=LOAD_SECONDS)

    async def close(self) -> None:
        await super().close()
        if self._file:
            self._file.close()
