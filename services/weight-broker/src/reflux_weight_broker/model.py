"""One model in this process: its state machine, who listens, what is to be done next, and its latest versions."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from reflux.weight_broker.v1 import weight_broker_service_pb2 as pb
from reflux.weight_broker.v1 import weight_version_pb2 as version_pb
from reflux_weight_broker import messages
from reflux_weight_broker.actions import Action, Dismiss, Event, Lease
from reflux_weight_broker.records import PUBLISHER
from reflux_weight_broker.streams import Listeners
from reflux_weight_broker.versions import ModelVersions

_HISTORY = 64


@dataclass(eq=False)
class Model:
    """The lock orders what the machine decides; the outbox keeps that order for whoever carries it out."""

    machine: ModelVersions
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    outbox: asyncio.Queue[Action | None] = field(default_factory=asyncio.Queue)
    """What is to be done, in order; None ends the writer."""

    replicas: Listeners[pb.WatchVersionsResponse] = field(default_factory=lambda: Listeners(single=True))
    owners: Listeners[pb.WatchLeasesResponse] = field(default_factory=lambda: Listeners(single=False))
    versions: OrderedDict[int, version_pb.WeightVersion] = field(default_factory=OrderedDict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    probing: dict[tuple[int, str], asyncio.Future[str]] = field(default_factory=dict)
    """Replicas that have scored a probe before the learner, by epoch and name."""

    def post(self, actions: Iterable[Action]) -> None:
        """Queues actions; call it with the lock held, so that their order is the machine's."""
        for action in actions:
            self.outbox.put_nowait(action)

    def tell(self, action: Event | Dismiss | Lease) -> None:
        """Sends an action to those whom it concerns; who does not listen is reminded when it does."""
        if isinstance(action, Lease):
            for owner in self.owners.of("" if action.owner == PUBLISHER else action.owner):
                owner.send(messages.to_lease(action))
            return
        for stream in self.replicas.of(action.replica, action.incarnation):
            if isinstance(action, Dismiss):
                stream.end(action.reason)
            else:
                stream.send(messages.to_event(action))

    def judge(self, epoch: int, verdicts: Mapping[str, str]) -> None:
        """Tells replicas that wait what is wrong with them."""
        for name, fault in verdicts.items():
            waiting = self.probing.pop((epoch, name), None)
            if waiting and not waiting.done():
                waiting.set_result(fault)

    async def verdict(self, epoch: int, name: str, seconds: float) -> str:
        """What is wrong with a replica once the learner has reported; empty when it has not within `seconds`."""
        waiting = self.probing[(epoch, name)] = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(waiting, seconds)
        except TimeoutError:
            return ""
        finally:
            if self.probing.get((epoch, name)) is waiting:
                del self.probing[(epoch, name)]

    async def remember(self, version: version_pb.WeightVersion) -> None:
        """Keeps a version for those who ask, and wakes those who follow it."""
        async with self.changed:
            self.versions[version.epoch] = version
            while len(self.versions) > _HISTORY:
                self.versions.popitem(last=False)
            self.changed.notify_all()
