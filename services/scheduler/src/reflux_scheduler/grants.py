"""Owns what the cluster says of grants: the latest list, when it was asked for, and grants that nobody wants."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from redis.exceptions import RedisError

from reflux_placement.room import gpu_indices
from reflux_placement.topology import Resources
from reflux_scheduler.backends.base import Backend, BackendAway, Grant, GrantStatus, NodeCondition, NodeShare
from reflux_scheduler.errors import NotLeading
from reflux_scheduler.job import Job
from reflux_scheduler.ledger import shares

log = logging.getLogger(__name__)


class Grants:
    """The backend as the drivers see it. Times are monotonic, in seconds.

    No cluster compares fencing tokens. So `confirm`, a fenced call to the store, goes in front of every request, and
    stands between a list of grants and the release of those that nobody knows: as long as this scheduler led after the
    list was made, no grant in it can be of a later leader. A request that is under way while the lease is lost makes a
    grant that no job has, and the next leader releases it.
    """

    def __init__(
        self,
        backend: Backend,
        poll_seconds: float,
        heard: Callable[[frozenset[str]], None],
        confirm: Callable[[], Awaitable[None]],
    ) -> None:
        self.backend = backend
        self.shared_agents = backend.shared_agents
        self._poll_seconds = poll_seconds
        self._heard = heard
        self._confirm = confirm
        self._listed: Mapping[str, GrantStatus] = {}
        self._listed_at = float("-inf")
        self._asked: dict[str, float] = {}
        self._released: dict[str, float] = {}
        self._poke = asyncio.Event()
        self._conditions: Mapping[str, NodeCondition] = {}
        self._news: dict[str, NodeCondition] = {}
        self.away = ""
        """Why the cluster cannot be asked now; empty when it answers."""

    @property
    def known(self) -> bool:
        """Whether the cluster has answered once."""
        return self._listed_at > float("-inf")

    async def request(self, job: Job, part: int) -> None:
        """Asks for a part once per life of this scheduler.

        Raises:
            BackendAway, GrantRefused: what the cluster says.
            NotLeading, RedisError: it is not sure that this scheduler leads; nothing was asked.
        """
        grant_id = f"{job.id}-{part}"
        if grant_id not in self._asked:
            await self._confirm()
            await self.backend.request(_grant(job, part))
            self._asked[grant_id] = time.monotonic()
            self._poke.set()

    async def release(self, job: Job, part: int) -> bool:
        """Gives a part back; whether the cluster has confirmed that it is gone. Raises BackendAway."""
        grant_id = f"{job.id}-{part}"
        if grant_id not in self._released:
            await self.backend.release(grant_id)
            self._released[grant_id] = time.monotonic()
            self._poke.set()
        if self._listed_at <= self._released[grant_id]:
            return False
        listed = self._listed.get(grant_id)
        if listed is not None and listed.state != "ended":
            del self._released[grant_id]  # Still there: ask again.
            return False
        self._released.pop(grant_id)
        self._asked.pop(grant_id, None)
        return True

    def asked_seconds(self, grant_id: str) -> float:
        """How long ago this scheduler asked for a grant; 0 when it has not."""
        asked = self._asked.get(grant_id)
        return time.monotonic() - asked if asked is not None else 0.0

    def status(self, grant_id: str) -> GrantStatus | None:
        """What the cluster says of a grant that was asked for; None while it has not been asked since."""
        listed = self._listed.get(grant_id)
        if listed is not None:
            return listed
        asked = self._asked.get(grant_id)
        if asked is None or self._listed_at <= asked:
            return None
        return GrantStatus(grant_id, "ended", reason="the cluster does not know it any more")

    async def poll(self, wanted: Callable[[], frozenset[str]]) -> None:
        """Asks the cluster; grants that `wanted` does not name are given back. Ends by NotLeading, or cancelled."""
        while True:
            self._poke.clear()
            try:
                await self.look(wanted)
            except BackendAway as error:
                if not self.away:
                    log.warning("the cluster does not answer: %s", error)
                self.away = str(error)
                self._heard(frozenset())
            except RedisError as error:
                log.warning("nothing is given back: Redis does not answer (%s)", type(error).__name__)
            except NotLeading:
                self._heard(frozenset())
                raise
            except Exception:  # task boundary: one bad answer must not end the polling
                log.exception("asking the cluster failed")
            try:
                async with asyncio.timeout(self._poll_seconds):
                    await self._poke.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(min(0.1, self._poll_seconds))  # Many requests make one question.

    async def look(self, wanted: Callable[[], frozenset[str]]) -> None:
        """Asks once. Raises BackendAway; NotLeading or RedisError instead of giving anything back."""
        asked_at = time.monotonic()
        conditions = await self.backend.conditions()
        listed = await self.backend.grants()
        self._note_conditions(conditions)
        before, known = self._listed, wanted()
        self._listed, self._listed_at, self.away = listed, asked_at, ""
        changed = {grant_id for grant_id in known if listed.get(grant_id) != before.get(grant_id)}
        self._heard(frozenset(changed | (known - listed.keys()) | self._released.keys()))
        unknown = {i: status for i, status in listed.items() if i not in known and status.state != "ended"}
        if unknown:
            await self._confirm()
        for grant_id, status in unknown.items():
            log.warning("grant %s (%s) belongs to no job and is given back", grant_id, status.native or "no name")
            await self.backend.release(grant_id)

    def lost_posts(self) -> dict[tuple[str, str], str]:
        """Nodes that the cluster took away from grants, by node and grant, and why."""
        return {
            (node, grant_id): f"node {node} is lost: {status.reason or 'the cluster took it away'}"
            for grant_id, status in self._listed.items()
            for node in status.lost_nodes
        }

    def take_news(self) -> dict[str, NodeCondition]:
        """What the cluster says of nodes of which it said something else before, since the last call."""
        news, self._news = self._news, {}
        return news

    def _note_conditions(self, conditions: Mapping[str, NodeCondition]) -> None:
        old = self._conditions
        if conditions is old:
            return
        self._news |= {node: said for node, said in conditions.items() if old.get(node) != said}
        self._news |= dict.fromkeys(old.keys() - conditions.keys(), _UNKNOWN)
        self._conditions = conditions


_UNKNOWN = NodeCondition("down", "the cluster does not know it any more")


def _grant(job: Job, part: int) -> Grant:
    assert job.placement is not None
    held = tuple(
        NodeShare(node, Resources(*(int(amount) for amount in row)), gpu_indices(mask))
        for node, (row, mask) in shares(job, part).items()
    )
    return Grant(job.id, part, job.spec.display_name, held, job.placement.domain)
