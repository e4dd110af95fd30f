"""The two legs of a prompt that one engine computes and another decodes, as both doors of the engine need them."""

import asyncio
import base64
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from reflux.inference_gateway.v1.engine_service_pb2 import KvTicket
from reflux_inference_gateway.engine import metrics
from reflux_inference_gateway.engine.handover import HandoverFailed, KvExchange
from reflux_inference_gateway.engine.lanes import OWN
from reflux_inference_gateway.engine.loop import EngineLoop
from reflux_inference_gateway.engine.types import ComputedPrompt, FinishedSample, GroupRequest, Sampling
from reflux_transfer.errors import TransferError

log = logging.getLogger(__name__)

_EXPIRY_SECONDS = 1.0
"""How often offers are looked at whose lease may have ended."""


class Legs:
    """Owns the use of the exchange: what fails here costs a second prefill and a count, never an answer."""

    def __init__(self, engine: EngineLoop, exchange: KvExchange) -> None:
        self._engine, self._exchange = engine, exchange

    async def prefill(self, request_id: str, prompt: tuple[int, ...], model: str) -> dict[str, Any] | None:
        """Computes a prompt; returns its ticket. Raises QueueFull and EngineStopped; cancel it to abort."""
        group = GroupRequest(
            request_id=request_id,
            prompt_ids=prompt,
            num_samples=1,
            sampling=Sampling(max_tokens=1),
            model=model,
            hand_over=True,
        )
        async with aclosing(self._engine.generate(group)) as batches:
            async for batch in batches:
                for event in batch:
                    if isinstance(event, FinishedSample):
                        return await self.offered(prompt, event)
        return None

    async def offered(self, prompt: Sequence[int], sample: FinishedSample) -> dict[str, Any] | None:
        """The ticket of what a sample brought; None when whoever decodes has to compute the prompt itself."""
        if sample.computed is None:
            return None
        try:
            ticket = await asyncio.to_thread(self._exchange.offer, prompt, sample.computed)
        except (TransferError, MemoryError) as error:
            metrics.HANDOVERS.labels("refused").inc()
            log.warning("a prompt cannot be handed over: %s", error)
            return None
        metrics.HANDOVERS.labels("offered").inc()
        return ticket

    async def given(
        self, prompt: Sequence[int], ticket: dict[str, Any] | None, model: str = OWN
    ) -> ComputedPrompt | None:
        """What a ticket names; None when the prompt has to be computed here."""
        if ticket is None:
            return None
        weights = self._engine.serves(model)
        try:
            if weights is None or ticket.get("epoch") != weights.epoch:
                raise HandoverFailed("it was computed by other weights")
            computed = await asyncio.to_thread(self._exchange.fetch, prompt, ticket)
        except HandoverFailed as error:
            metrics.HANDOVERS.labels("failed").inc()
            log.warning("computes a prompt that it should have been given: %s", error)
            return None
        metrics.HANDOVERS.labels("pulled").inc()
        return computed

    async def release(self, generation: int) -> None:
        """Frees an offer."""
        if await asyncio.to_thread(self._exchange.release, generation):
            metrics.HANDOVERS.labels("released").inc()

    @asynccontextmanager
    async def expiring(self) -> AsyncIterator[None]:
        """Frees offers that nobody released in their lease, while the block runs."""
        task = asyncio.create_task(self._expire())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRY_SECONDS)
            metrics.HANDOVERS.labels("expired").inc(await asyncio.to_thread(self._exchange.expire))


def ticket_message(ticket: dict[str, Any] | None) -> KvTicket | None:
    """A ticket as gRPC carries it."""
    if ticket is None:
        return None
    fields: dict[str, Any] = ticket | {"handle": base64.b64decode(ticket["handle"])}
    return KvTicket(**fields)


def ticket_fields(message: KvTicket) -> dict[str, Any]:
    """A ticket as the exchange and the HTTP door know it."""
    fields = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    return fields | {"handle": base64.b64encode(message.handle).decode()}
