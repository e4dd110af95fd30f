"""vLLM: its workers pull by the plug-in of libs/vllm-plugin and load between `pause?mode=keep` and `resume`.

Written against vLLM 0.32, started with VLLM_SERVER_DEV_MODE=1, `--weight-transfer-config '{"backend": "reflux"}'` and
`--worker-extension-cls reflux_vllm_plugin.worker.RefluxWorker`.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from reflux_inference_gateway.foreign.base import EngineFailed, EngineUnfit, WeightSink
from reflux_inference_gateway.foreign.http_client import LOAD_SECONDS, EngineHttp, NoSuchRoute
from reflux_transfer.client.offer import Offer
from reflux_transfer.errors import ReadCancelled
from reflux_transfer.handles import ANYWHERE, Scope
from reflux_transfer.offers import offer_to_json
from reflux_transfer.pulling.report import PullReport
from reflux_weightplan.spec import SpecLayout
from reflux_weightplan.wire import canonical

_FIRST_POLL_SECONDS = 0.01
_LAST_POLL_SECONDS = 0.2
"""Each poll runs on the workers between two steps: often at first, seldom during a long pull."""


class VllmSink(WeightSink):
    """One vLLM server, with any number of workers; each holds a verified copy before it loads its part."""

    up_route = "/health"

    def __init__(self, http: EngineHttp, scope: Scope = ANYWHERE) -> None:
        """Handles that the workers get, which have no key of the run, have to lie in `scope`."""
        self._http, self._scope = http, scope

    async def open(self, layout: SpecLayout) -> None:
        body = {"init_info": {"layout": canonical(layout).decode()}}
        try:
            await self._http.get("/is_paused")
            await self._http.post("/init_weight_transfer_engine", body, seconds=LOAD_SECONDS)
            await self._workers("reflux_status")
        except NoSuchRoute as error:
            raise EngineUnfit(f"vLLM has no routes for weights ({error}): set VLLM_SERVER_DEV_MODE=1 for it") from error
        except EngineFailed as error:
            raise EngineUnfit(
                f"vLLM does not take weights ({error}): install reflux-vllm-plugin beside it and start it with "
                """--weight-transfer-config '{"backend": "reflux"}' """
                "and --worker-extension-cls reflux_vllm_plugin.worker.RefluxWorker"
            ) from error

    async def receive(self, offer: Offer, cancelled: Callable[[], bool]) -> PullReport:
        if self._scope.run:
            offer.check(self._scope)
        statuses = await self._workers("reflux_prepare", offer_to_json(offer))
        pause = _FIRST_POLL_SECONDS
        while any(status["state"] == "pulling" for status in statuses):
            if cancelled():
                await self._workers("reflux_cancel")
                raise ReadCancelled(f"epoch {offer.epoch} was given up")
            await asyncio.sleep(pause)
            pause = min(_LAST_POLL_SECONDS, 2 * pause)
            statuses = await self._workers("reflux_status")
        return _together(statuses, offer.epoch)

    async def commit(self, version: int, epoch: int) -> float:
        start = time.perf_counter()
        try:
            await self._http.post("/pause", params={"mode": "keep"})
            # What a session that was left open has loaded is replaced by this one.
            await self._http.open_session("/start_weight_update", "/finish_weight_update", LOAD_SECONDS)
            await self._http.post("/update_weights", {"update_info": {"epoch": epoch}}, seconds=LOAD_SECONDS)
            await self._http.post("/finish_weight_update", {"weight_version": str(version)}, seconds=LOAD_SECONDS)
            # Running requests are queued again and prefilled under the new weights; nothing holds old blocks then.
            reset = await self._http.post("/reset_prefix_cache", params={"reset_running_requests": "true"})
            if reset.get("success") is not True:
                raise EngineFailed(f"/reset_prefix_cache: {reset}")
            await self._http.post("/resume")
        except EngineFailed:
            await self._http.stop("/pause", params={"mode": "abort"})
            raise
        return 1000 * (time.perf_counter() - start)

    async def version(self) -> str:
        return str((await self._http.get("/weight_info")).get("weight_version", ""))

    async def _workers(self, method: str, *args: str) -> list[dict[str, Any]]:
        body = {"method": method, "args": list(args)}
        results = (await self._http.post("/collective_rpc", body, seconds=LOAD_SECONDS)).get("results")
        if not results or not all(isinstance(result, dict) for result in results):
            raise EngineFailed(f"/collective_rpc {method}: {results}")
        return results


def _together(statuses: list[dict[str, Any]], epoch: int) -> PullReport:
    """What all workers say as one; they hold equal bytes, so that their fingerprints have to agree."""
    for rank, status in enumerate(statuses):
        if status["state"] != "ready" or status["epoch"] != epoch:
            raise EngineFailed(f"worker {rank}: {status.get('error') or status}")
    fingerprints = {status["fingerprint"] for status in statuses}
    if len(fingerprints) > 1:
        raise EngineFailed(f"workers disagree about epoch {epoch}: fingerprints {sorted(fingerprints)}")
    slowest = max(statuses, key=lambda status: status["seconds"])
    total = sum(status["bytes"] for status in statuses)
    fingerprint = int(slowest["fingerprint"], 16)
    return PullReport(total, slowest["slices"], slowest["seconds"], fingerprint)
