"""A sandbox with ladders that release at once and settle with the opposite rewards."""

import asyncio
from contextlib import asynccontextmanager

import trainer_peers
from trainer_peers import serving

from reflux.sandbox.v1 import ladder_service_pb2 as pb
from reflux.sandbox.v1 import ladder_service_pb2_grpc
from reflux.sandbox.v1.verification_pb2 import Grade, Verification


class Rungs(ladder_service_pb2_grpc.LadderServiceServicer):
    """Even answers look right and are wrong, odd ones the other way round. `silent` streams no release,
    `hold` keeps cancellations waiting."""

    def __init__(self):
        self.ladders, self.events = {}, []
        self.changed = asyncio.Event()
        self.cancelled = []
        self.silent = False
        self.hold = None

    async def CreateLadder(self, request, context):
        name = f"ladders/{request.request_id}"
        if name not in self.ladders:
            self.ladders[name] = request
            self._happen(request, name)
        climbing = pb.Ladder(name=name, state=pb.Ladder.STATE_CLIMBING)
        return pb.CreateLadderResponse(ladder=climbing)

    def _happen(self, request, name):
        ids = list(request.sample_ids)
        about = {"ladder": name, "group": request.group, "policy_version": request.policy_version}
        release = pb.LadderRelease(
            fidelity=Verification.FIDELITY_SURROGATE,
            sample_ids=ids,
            grades=[Grade(outcome=Grade.OUTCOME_SCORED, reward=float(n % 2)) for n in range(len(ids))],
        )
        settled = [
            pb.SettledSample(
                sample_id=each,
                provisional_reward=float(n % 2),
                reward=1.0 - n % 2,
                basis=pb.SettledSample.BASIS_FULL,
            )
            for n, each in enumerate(ids)
        ]
        settlement = pb.LadderSettlement(released_on=Verification.FIDELITY_SURROGATE, samples=settled)
        if not self.silent:
            self.events.append(pb.WatchLaddersResponse(release=release, **about))
        self.events.append(pb.WatchLaddersResponse(settlement=settlement, **about))
        self.changed.set()

    async def GetLadder(self, request, context):
        asked = self.ladders[request.name]
        grades = [Grade(outcome=Grade.OUTCOME_SCORED, reward=float(n % 2)) for n in range(len(asked.answers))]
        samples = [
            pb.LadderSample(sample_id=each, released=g) for each, g in zip(asked.sample_ids, grades, strict=True)
        ]
        ladder = pb.Ladder(
            name=request.name,
            state=pb.Ladder.STATE_RELEASED,
            released_on=Verification.FIDELITY_SURROGATE,
            samples=samples,
        )
        return pb.GetLadderResponse(ladder=ladder)

    async def WatchLadders(self, request, context):
        place = int(request.resume_token.partition("-")[0]) if request.resume_token else len(self.events)
        while True:
            while place < len(self.events):
                event = pb.WatchLaddersResponse()
                event.CopyFrom(self.events[place])
                place += 1
                event.resume_token = f"{place}-0"
                yield event
            self.changed.clear()
            await self.changed.wait()

    async def CancelLadders(self, request, context):
        if self.hold is not None:
            await self.hold.wait()
        self.cancelled.append(request.run)
        return pb.CancelLaddersResponse()


@asynccontextmanager
async def ladders_beside(world):
    """All peers of a world and its ladders on one address."""
    register = ladder_service_pb2_grpc.add_LadderServiceServicer_to_server
    trainer_peers._MOUNTS[Rungs] = (register, "reflux.sandbox.v1.Ladders")
    peers = (world.scheduler, world.gateway, world.sandbox, world.checkpoints, world.broker, world.learner)
    async with serving(*peers, world.rungs) as address:
        yield address
