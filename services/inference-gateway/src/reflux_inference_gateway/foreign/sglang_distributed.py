"""SGLang's `/update_weights_from_distributed`: the adapter is rank 0 of a gloo group and broadcasts its intake.

For engines on other hosts than the adapter, or without a tmpfs in common. Only this part of the adapter needs torch.
"""

import asyncio
import logging
import socket
import uuid
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from reflux_inference_gateway.foreign.base import EngineFailed, EngineUnfit
from reflux_inference_gateway.foreign.http_client import LOAD_SECONDS, EngineHttp
from reflux_inference_gateway.foreign.sglang import SglangSink
from reflux_transfer.client.puller import Puller
from reflux_transfer.intake import Intake

log = logging.getLogger(__name__)

_JOIN_SECONDS = 60.0


class SglangDistributed(SglangSink):
    """One broadcast per tensor, in layout order; `ranks` is the number of SGLang's tensor-parallel workers."""

    def __init__(self, http: EngineHttp, host: str, ranks: int, puller: Puller | None = None) -> None:
        """`host` is this machine as the engine reaches it."""
        super().__init__(http, puller)
        self._host, self._ranks = host, ranks
        self._name = f"reflux-{uuid.uuid4().hex[:8]}"  # torch takes a name once, and an adapter before may have died
        self._group: ProcessGroupGloo | None = None

    async def _open(self, intake: Intake) -> None:
        port = _free_port(self._host)
        join = {"master_address": self._host, "master_port": port, "rank_offset": 1, "world_size": 1 + self._ranks}
        body = {**join, "group_name": self._name, "backend": "gloo"}
        ours = asyncio.to_thread(_join, self._name, self._host, port, 1 + self._ranks)
        theirs = self._http.post("/init_weights_update_group", body, seconds=_JOIN_SECONDS)
        try:
            self._group, _ = await asyncio.gather(ours, theirs)
        except RuntimeError as error:  # torch's and EngineFailed
            raise EngineUnfit(f"no process group with SGLang: {error}") from error

    async def _load(self, version: str) -> None:
        assert self._intake
        slots = self._intake.layout.slots
        await self._http.open_session("/begin_weight_update", "/end_weight_update")
        body = {
            "names": [slot.name for slot in slots],
            "dtypes": [slot.dtype for slot in slots],
            "shapes": [slot.shape for slot in slots],
            "group_name": self._name,
            "weight_version": version,
            "flush_cache": True,
        }
        received = self._http.post("/update_weights_from_distributed", body, seconds=LOAD_SECONDS)
        await asyncio.gather(asyncio.to_thread(self._broadcast), received)
        await self._http.post("/end_weight_update")

    def _broadcast(self) -> None:
        assert self._group
        assert self._intake
        for slot in self._intake.layout.slots:
            # Bytes of one tensor; the receiver's tensor has as many, whatever its type.
            flat = torch.frombuffer(self._intake.view[slot.offset : slot.end], dtype=getattr(torch, slot.dtype))
            self._group.broadcast(flat, 0).wait()  # pyright: ignore[reportAttributeAccessIssue]

    async def close(self) -> None:
        if self._group:
            self._group = None
            try:
                await self._http.post("/destroy_weights_update_group", {"group_name": self._name})
            except EngineFailed as error:
                log.info("the process group was not ended at the engine's side: %s", error)
        await super().close()


def _join(name: str, host: str, port: int, world: int) -> ProcessGroupGloo:
    """Rank 0 of the group that SGLang's `init_custom_process_group` makes.

    torch has no public call for a group beside the default one without that one. The prefixes are those of torch 2.13's
    `_new_process_group_helper`: the group's name twice (once by SGLang), then the device.
    """
    timeout = timedelta(seconds=_JOIN_SECONDS)
    store = TCPStore(host, port, world, is_master=True, timeout=timeout, wait_for_workers=False)
    prefixed = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    return ProcessGroupGloo(prefixed, 0, world, timeout)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
