"""The process's links to gateway and broker: for its own model, and for each adapter that has a seat."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from reflux.inference_gateway.v1.replica_pb2 import Replica as ReplicaMessage
from reflux_inference_gateway.engine.holding import Holding, holding_adapter
from reflux_inference_gateway.engine.loop import EngineLoop
from reflux_inference_gateway.engine.registration import GatewayLink
from reflux_inference_gateway.engine.replica import Description, Fatal
from reflux_inference_gateway.engine.seats import Seats
from reflux_inference_gateway.engine.settings import EngineSettings
from reflux_inference_gateway.engine.weights import BrokerLink, Follower, broker_link
from reflux_kit.errors import InvalidRequest
from reflux_kit.server import Bound
from reflux_model.config import ModelConfig
from reflux_model.errors import UnsupportedModelError
from reflux_model.lora import LoraSpec
from reflux_transfer.probe.choice import Choice

log = logging.getLogger(__name__)


class Attendance:
    """Owns the links. `held` are the arenas of the model itself, where its versions are followed."""

    def __init__(
        self,
        settings: EngineSettings,
        model_id: str,
        config: ModelConfig,
        engine: EngineLoop,
        describe: Description,
        held: Holding | None,
        choice: Choice | None,
        fatal: Fatal,
    ) -> None:
        self._settings, self._model_id, self._config = settings, model_id, config
        self._engine, self._describe, self._held = engine, describe, held
        self._choice, self._fatal = choice, fatal
        self._broker: BrokerLink | None = None
        self._link = GatewayLink(settings, describe)
        self.seats = Seats(settings.max_adapters, settings.max_adapter_rank, self._adapter)

    @asynccontextmanager
    async def attended(self, bound: Bound) -> AsyncIterator[None]:
        """Keeps all links while the block runs."""
        describe, link = self._describe, self._link
        describe.bind(bound)
        async with AsyncExitStack() as stack:
            if self._choice:
                opening = broker_link(self._settings, describe.name, self._choice)
                self._broker = await stack.enter_async_context(opening)
                if self._held:
                    follower = Follower(self._engine, self._held, describe, link.announce)
                    following = self._broker.following(self._model_id, describe.name, follower, self._fatal)
                    await stack.enter_async_context(following)
            await stack.enter_async_context(self.seats.running())
            await stack.enter_async_context(link.running())
            yield

    def set_role(self, role: ReplicaMessage.Role.ValueType) -> None:
        """Changes what the gateway sends from its next heartbeat on, which comes now."""
        self._describe.role = role
        self._link.announce()

    @asynccontextmanager
    async def _adapter(self, name: str, spec: LoraSpec) -> AsyncIterator[Callable[[], bool]]:
        """Serves an adapter while the block runs, from its first version on."""
        assert self._broker
        assert self._choice
        refusals: list[str] = []

        def refused(reason: str) -> None:
            log.error("adapter %s is not served: %s", name, reason)
            refusals.append(reason)

        describe = self._describe.beside(name)
        link = GatewayLink(self._settings, describe)
        async with AsyncExitStack() as stack:
            try:
                opening = holding_adapter(self._settings, self._choice, self._config, spec)
                held = stack.enter_context(opening)
            except UnsupportedModelError as error:
                raise InvalidRequest(str(error)) from None
            stack.push_async_callback(self._close, name)
            follower = Follower(self._engine, held, describe, link.announce, name)
            await stack.enter_async_context(self._broker.following(name, describe.name, follower, refused))
            await stack.enter_async_context(link.running())
            yield lambda: not refusals

    async def _close(self, name: str) -> None:
        if self._engine.failure is None:
            await asyncio.wrap_future(self._engine.close_adapter(name))
