"""Owns one scheduler process: follows until it holds the leader's lease, then builds everything that a reign needs."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from redis.asyncio import Redis

from reflux_kit.errors import Unavailable
from reflux_kit.settings import ServiceSettings
from reflux_placement.policy.health import Damping
from reflux_placement.policy.spares import SpareRule
from reflux_placement.topology import Topology
from reflux_scheduler.backends.base import Backend
from reflux_scheduler.controller import Controller
from reflux_scheduler.crew import Crew
from reflux_scheduler.errors import NotLeading
from reflux_scheduler.fleet import Fleet, Terms
from reflux_scheduler.grants import Grants
from reflux_scheduler.leadership import Leadership
from reflux_scheduler.ledger import Ledger
from reflux_scheduler.metrics import Metrics
from reflux_scheduler.nodes import Nodes
from reflux_scheduler.planner import Rules
from reflux_scheduler.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What stays the same over reigns."""

    topology: Topology
    spares: SpareRule
    rules: Rules
    terms: Terms
    flaps: Damping
    start_seconds: float
    poll_seconds: float
    leader_seconds: float
    backend_name: str


class Candidate:
    """A scheduler that leads or waits to."""

    def __init__(
        self,
        redis: Redis,
        plan: Plan,
        backend: Backend,
        settings: ServiceSettings,
        loaded: Callable[[], None] = lambda: None,
    ) -> None:
        """`loaded` is called when a reign has taken over what was stored, before it answers."""
        self.plan = plan
        self._redis = redis
        self._backend = backend
        self._settings = settings
        self._metrics = Metrics(plan.topology.levels)
        self._leadership: Leadership | None = None
        self._controller: Controller | None = None
        self._loaded = loaded

    @property
    def topology(self) -> Topology:
        """The topology of all reigns."""
        return self.plan.topology

    @property
    def term(self) -> int:
        """Term of the present reign."""
        return self._leadership.term if self._leadership is not None else 0

    async def leading(self) -> Controller:
        """The controller, once this scheduler leads; waits a little when it is about to.

        Raises Unavailable with the address of the one that leads instead.
        """
        if self._leadership is None:
            raise Unavailable("this scheduler is starting")
        try:
            await self._leadership.leading()
        except NotLeading as error:
            raise Unavailable(str(error), leader=error.leader) from None
        assert self._controller is not None
        return self._controller

    @asynccontextmanager
    async def standing(self, address: str, identity: str) -> AsyncIterator[None]:
        """Stands for the lease until the block ends; the address is bound by now."""
        plan = self.plan
        alone_seconds = plan.terms.lost_seconds
        self._leadership = Leadership(self._redis, address, identity, plan.leader_seconds, alone_seconds)
        async with self._leadership.campaigning(self._reign):
            yield

    async def _reign(self, lease: str) -> None:
        assert self._leadership is not None
        plan = self.plan
        store = Store(self._redis)
        store.lease, store.lease_millis = lease, int(plan.leader_seconds * 1000)
        # The last leader may answer agents for this long without knowing that it leads no more: no silence counts.
        unsure_seconds = plan.terms.lost_seconds if self._leadership.successor else 0.0
        fleet, ledger = Fleet(plan.terms, time.monotonic() + unsure_seconds), Ledger(plan.topology)
        async with AsyncExitStack() as stack:
            crew = await stack.enter_async_context(Crew(fleet, plan.topology, self._settings))
            crew.term = self._leadership.term
            controller: Controller | None = None

            def heard(grant_ids: frozenset[str]) -> None:
                if controller is not None:
                    controller.heard_grants(grant_ids)

            grants = Grants(self._backend, plan.poll_seconds, heard, store.confirm)
            controller = Controller(
                store,
                ledger,
                Nodes(plan.topology, plan.spares, plan.flaps),
                fleet,
                crew,
                grants,
                plan.rules,
                self._metrics,
                plan.start_seconds,
            )
            await controller.load()
            self._loaded()
            self._controller = controller
            self._leadership.set_ready()
            self._metrics.leading(True)
            try:
                await controller.run()
            finally:
                # The book is closed: callers have to wait for the next leader, not to hear that there are no jobs.
                self._leadership.ready = False
                self._metrics.leading(False)
