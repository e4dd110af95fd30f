"""Prompts that one replica computes and others decode: paired, asked for, handed to each share, released."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from reflux.inference_gateway.v1.engine_service_pb2 import KvTicket
from reflux_inference_gateway import metrics
from reflux_inference_gateway.clients import ReplicaClients
from reflux_inference_gateway.dispatch import Dispatcher, ReplicaLost
from reflux_inference_gateway.replicas import Replica
from reflux_inference_gateway.routing.pairing import Pairing, Peer
from reflux_inference_gateway.wire import GroupCall, Handed
from reflux_kit.errors import DeadlinePassed, ServiceError

log = logging.getLogger(__name__)

_MAX_TRIES = 2


@dataclass
class PrefillLegs:
    """Owns the pairing. A prompt that nobody computes in time is computed by the replica that decodes it: a lost or
    slow prefill replica costs time and a count, never an answer.
    """

    dispatcher: Dispatcher
    clients: ReplicaClients
    pairing: Pairing
    wait_seconds: float
    """How long a prompt may take."""
    _releasing: set[asyncio.Task[None]] = field(default_factory=set)

    async def computed(self, call: GroupCall, decode: Replica) -> tuple[Replica, KvTicket] | None:
        """A ticket, and who gave it; None when the replica that decodes has to compute the prompt."""
        tried: list[str] = []
        why = "nobody"
        while len(tried) < _MAX_TRIES:
            chosen = self._choose(call, decode, tried)
            if isinstance(chosen, str):
                why = why if tried else chosen
                break
            ticket, why = await self._asked(call, chosen)
            metrics.PREFILL_LEGS.labels(why).inc()
            if ticket is not None:
                return chosen, ticket
            if why != "lost":
                return None
            tried.append(chosen.info.name)
        if not tried:
            metrics.PREFILL_LEGS.labels(why).inc()
        return None

    def release(self, prefill: Replica, ticket: KvTicket) -> None:
        """Has the prompt's memory freed; nobody waits for it, and a lost call is what the lease is for."""
        task = asyncio.create_task(self.clients.torch(prefill.info).release(ticket.generation))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    def _choose(self, call: GroupCall, decode: Replica, tried: list[str]) -> Replica | str:
        table = self.dispatcher.table
        peers = {one.info.name: one for one in table.prefilling(call.model_id) if one.info.grpc_address}
        candidates = [_peer(one) for one in peers.values()]
        salt = str(decode.info.version)
        paired = self.pairing.choose(_peer(decode), candidates, call.prompt_token_ids, salt, tried)
        return peers[paired.name] if paired.name else paired.why

    async def _asked(self, call: GroupCall, prefill: Replica) -> tuple[KvTicket | None, str]:
        table, name, num_tokens = self.dispatcher.table, prefill.info.name, len(call.prompt_token_ids)
        table.dispatched(name, num_tokens)
        try:
            ticket = await self.clients.torch(prefill.info).prefill(call, self.wait_seconds)
        except ReplicaLost as error:
            log.warning("%s was lost with a prompt: %s", name, error)
            table.mark_lost(name)
            self.dispatcher.changes.notify()
            return None, "lost"
        except DeadlinePassed:
            return None, "late"
        except ServiceError as error:
            log.warning("%s did not compute a prompt: %s", name, error)
            return None, "refused"
        finally:
            table.answered(name, num_tokens)
        return (None, "full") if ticket is None else (ticket, "remote")


@dataclass(eq=False)
class HandedPrompt:
    """Owns what is computed elsewhere of one group's prompt: once per set of weights, for all of its shares."""

    legs: PrefillLegs
    call: GroupCall
    _made: dict[int, asyncio.Task[tuple[Replica, KvTicket] | None]] = field(default_factory=dict)
    _open: dict[int, int] = field(default_factory=dict)
    """By epoch, samples whose share has not read the prompt yet."""

    async def handed(self, decode: Replica, num_samples: int) -> Handed | None:
        """The prompt for a share; None when its replica computes it."""
        wanted = decode.info.grpc_address and not self.call.sampling.HasField("prompt_logprobs")
        if not wanted or not self.legs.dispatcher.table.prefilling(self.call.model_id):
            return None
        epoch = decode.info.epoch
        if epoch not in self._made:
            self._made[epoch] = asyncio.create_task(self.legs.computed(self.call, decode))
            self._open[epoch] = self.call.num_samples
        if not self._open[epoch]:
            return None
        computed = await asyncio.shield(self._made[epoch])
        if computed is None:
            return None
        return Handed(computed[1], self._reader(epoch, num_samples))

    def close(self) -> None:
        """The group has ended: whatever nobody has read is not needed any more."""
        for epoch, task in self._made.items():
            if not task.done():
                task.cancel()
            elif not task.cancelled() and task.exception() is None:
                self._read(epoch, self._open[epoch])

    def _reader(self, epoch: int, num_samples: int) -> Callable[[bool], None]:
        def pulled(used: bool) -> None:
            metrics.PULLS.labels("used" if used else "failed").inc()
            self._read(epoch, num_samples)

        return pulled

    def _read(self, epoch: int, num_samples: int) -> None:
        if not self._open[epoch]:
            return
        self._open[epoch] -= num_samples
        computed = self._made[epoch].result()
        if self._open[epoch] <= 0 and computed is not None:
            self._open[epoch] = 0
            self.legs.release(*computed)


def _peer(entry: Replica) -> Peer:
    info = entry.info
    return Peer(
        name=info.name,
        version=info.version,
        epoch=info.epoch,
        location=info.node,
        queued_tokens=entry.inflight_tokens,
        order=entry.order,
    )
