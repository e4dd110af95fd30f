"""One rollout worker: many prompts side by side, from claim to emission."""

import asyncio
import logging
import math
import time
from dataclasses import dataclass

from redis.exceptions import RedisError

from reflux_kit.telemetry import span, traceparent
from reflux_runs.config import RunConfig
from reflux_runs.preflight import derive
from reflux_trainer.clients.generation import Generator
from reflux_trainer.clients.ladders import Ladders, Release
from reflux_trainer.clients.retry import PeerAway, Refused
from reflux_trainer.clients.verification import Verifications
from reflux_trainer.codec import Codec
from reflux_trainer.problems import sampling_seed, verifier_of
from reflux_trainer.queue.prompts import MAX_TAKES, Claim, PromptQueue
from reflux_trainer.queue.records import Generation, Group
from reflux_trainer.rollout.settings import RolloutSettings

log = logging.getLogger(__name__)
_BLOCK_MS = 1000


MIN_PROMPTS_AT_ONCE = 16
MAX_PROMPTS_AT_ONCE = 1024


def share_of_window(config: RunConfig) -> int:
    """A worker's share of the open prompts: one whose verification goes on for long must not hold up another."""
    share = math.ceil(derive(config).window_prompts / config.fleet.rollout_workers)
    return min(MAX_PROMPTS_AT_ONCE, max(MIN_PROMPTS_AT_ONCE, share))


class ClaimLost(Exception):
    """Another worker has taken the prompt over; whatever this one has is thrown away."""


@dataclass(frozen=True)
class _Active:
    claim: Claim
    task: asyncio.Task[None]


class Worker:
    """Works for one run until it is cancelled. Whatever kills it, another worker goes on from what is stored."""

    def __init__(
        self,
        queue: PromptQueue,
        generator: Generator,
        verifications: Verifications,
        codec: Codec,
        config: RunConfig,
        settings: RolloutSettings,
        ladders: Ladders | None = None,
    ) -> None:
        """With `ladders` a group is graded on them and emitted at its release."""
        self._queue = queue
        self._generator = generator
        self._verifications = verifications
        self._ladders = ladders
        self._codec = codec
        self._config = config
        self._settings = settings
        self._most = settings.prompts_at_once or share_of_window(config)
        self._active: dict[int, _Active] = {}
        self._room = asyncio.Event()
        self._room.set()

    async def run(self) -> None:
        """Claims and works until cancelled; only a bug ends it. A Redis that is away for long is waited for."""
        while True:
            try:
                await self._session()
            except* RedisError as errors:
                log.warning("Redis is away (%s), starting over", type(errors.exceptions[0]).__name__)
                await asyncio.sleep(self._settings.heartbeat_seconds)

    async def _session(self) -> None:
        await self._queue.open()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat(tasks), name="heartbeat")
            while True:
                await self._room.wait()
                for claim in await self._queue.claim(self._free, _BLOCK_MS):
                    self._start(claim, tasks)

    @property
    def _free(self) -> int:
        return self._most - len(self._active)

    def _start(self, claim: Claim, tasks: asyncio.TaskGroup) -> None:
        index = claim.prompt.index
        task = tasks.create_task(self._work(claim), name=f"prompt {index}")
        active = self._active[index] = _Active(claim, task)
        task.add_done_callback(lambda _: self._done(index, active))
        if self._free <= 0:
            self._room.clear()

    def _done(self, index: int, active: _Active) -> None:
        if self._active.get(index) is active:
            del self._active[index]
        self._room.set()

    async def _beat(self, tasks: asyncio.TaskGroup) -> None:
        """Once a second: keep the claims, drop the lost ones, take over abandoned ones."""
        while True:
            await asyncio.sleep(self._settings.heartbeat_seconds)
            held = dict(self._active)
            for index in await self._queue.heartbeat([active.claim for active in held.values()]):
                log.info("lost the claim on prompt %d", index)
                held[index].task.cancel()
            if self._free > 0:
                idle_ms = int(1000 * self._settings.idle_claim_seconds)
                for claim in await self._queue.claim_abandoned(self._free, idle_ms):
                    log.info("took over prompt %d", claim.prompt.index)
                    self._start(claim, tasks)

    async def _work(self, claim: Claim) -> None:
        prompt = claim.prompt
        try:
            if claim.takes >= MAX_TAKES:
                raise Refused(f"claimed {claim.takes} times without an end")
            generation = await self._generate(claim)
            started = time.time()
            release = await self._verify(claim, generation)
            await self._emit(claim, generation, release, time.time() - started)
        except ClaimLost as error:
            log.info("%s", error)
        except Refused as error:
            outcome = await self._queue.fail(claim, str(error), counted=True)
            log.warning("prompt %d failed (%s): %s", prompt.index, outcome, error)
        except PeerAway as error:
            outcome = await self._queue.fail(claim, str(error), counted=False)
            log.warning("prompt %d goes back to the queue (%s): %s", prompt.index, outcome, error)

    async def _generate(self, claim: Claim) -> Generation:
        if claim.stored is not None:
            return claim.stored
        prompt, rl, run = claim.prompt, self._config.rl, self._settings.run
        started = time.time()
        with span("generate", parent=prompt.traceparent, reflux__run=run, reflux__prompt=prompt.index) as current:
            samples = await self._generator.generate(
                f"{run}/{prompt.index}/{claim.token}",
                prompt.token_ids,
                rl.samples_per_group,
                temperature=rl.temperature,
                seed=sampling_seed(self._config.seed, prompt.index),
                min_version=prompt.version,
                seconds=self._settings.peer_seconds,
            )
            current.set_attribute("reflux.tokens", [len(sample.token_ids) for sample in samples])
            current.set_attribute("reflux.versions", [sample.oldest_version for sample in samples])
            current.set_attribute("reflux.takes", claim.takes)
        generation = Generation(samples, started, time.time())
        if not await self._queue.store(claim, generation):
            raise ClaimLost(f"another worker owns prompt {prompt.index}")
        return generation

    async def _verify(self, claim: Claim, generation: Generation) -> Release:
        prompt, run = claim.prompt, self._settings.run
        with span("verify", parent=prompt.traceparent, reflux__run=run, reflux__prompt=prompt.index) as current:
            release = await self._graded(claim, generation)
            grades = release.grades
            if len(grades) != len(generation.samples):
                raise Refused(f"the sandbox sent {len(grades)} grades for {len(generation.samples)} answers")
            current.set_attribute("reflux.rewards", [grade.reward for grade in grades])
            current.set_attribute("reflux.outcomes", [grade.outcome for grade in grades])
        return release

    async def _graded(self, claim: Claim, generation: Generation) -> Release:
        prompt, rl, run = claim.prompt, self._config.rl, self._settings.run
        group, answers = f"prompt/{prompt.index}", [self._codec.answer_text(it.token_ids) for it in generation.samples]
        version = max(0, min(sample.oldest_version for sample in generation.samples))
        sample_ids = [f"{run}/{prompt.index}/{number}" for number in range(len(answers))]
        seconds = rl.verify_deadline_seconds
        if self._ladders is not None:
            return await self._ladders.release(
                group, prompt.truth, answers, seconds=seconds, version=version, sample_ids=sample_ids
            )
        verifier = verifier_of(self._config, rl.verifier)
        grades = await self._verifications.grade(
            group, verifier, prompt.truth, answers, seconds=seconds, version=version, sample_ids=sample_ids
        )
        return Release(grades, final=True)

    async def _emit(self, claim: Claim, generation: Generation, release: Release, verify_seconds: float) -> None:
        prompt, run = claim.prompt, self._settings.run
        with span("emit", parent=prompt.traceparent, reflux__run=run, reflux__prompt=prompt.index) as current:
            group = Group(
                index=prompt.index,
                version=prompt.version,
                token_ids=prompt.token_ids,
                samples=generation.samples,
                grades=release.grades,
                issued_at=prompt.issued_at,
                claimed_at=generation.started_at,
                generate_seconds=generation.ended_at - generation.started_at,
                verify_seconds=verify_seconds,
                emitted_at=time.time(),
                worker=self._queue.worker,
                traceparent=prompt.traceparent or traceparent(),
                problem=prompt.problem,
                stratum=prompt.stratum,
                provisional=not release.final,
            )
            current.set_attribute("reflux.outcome", await self._queue.emit(claim, group))
