"""Held-out evaluation: greedy answers through the gateway, graded in the sandbox; dearer verifiers on a few of them."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reflux_runs.config import RunConfig
from reflux_tasks.task import Task
from reflux_trainer.clients.generation import Generator
from reflux_trainer.clients.retry import PeerAway, Refused
from reflux_trainer.clients.verification import Verifications
from reflux_trainer.codec import Codec
from reflux_trainer.intervals import mean_interval, share_interval
from reflux_trainer.journal import Journal
from reflux_trainer.problems import Question, question, verifier_of
from reflux_trainer.queue.records import Grade
from reflux_trainer.watchdog import Waits

log = logging.getLogger(__name__)

MAIN_SET = "held"
CONCURRENCY = 96
"""Held-out prompts under way at once."""
TIER_CONCURRENCY = 2
TRANSCRIPTS = 8
MAX_UNKNOWN_SHARE = 0.1
"""Share of held-out answers without a grade above which an evaluation says nothing about the model."""
_ROUNDS = 3
_ANSWER_SECONDS = 120.0
_TIER_SECONDS = {"surrogate": 60.0, "full": 240.0}


class EvaluationFailed(RuntimeError):
    """Too many held-out answers have no grade, several times in a row; the text is the last cause."""


@dataclass(frozen=True)
class Answered:
    """One held-out question with the model's greedy answer and its grade."""

    question: Question
    answer: str
    grade: Grade


def set_figures(name: str, grades: Sequence[Grade]) -> dict[str, float]:
    """Figures of one set: mean reward over known grades and exact share with 95 % intervals, valid share. Pure.

    Without any known grade there are the counts only: an unknown reward is not 0.
    """
    rewards = [grade.reward for grade in grades if grade.known]
    count = len(rewards)
    counts = {f"eval/{name}/prompts": float(count), f"eval/{name}/unknown": float(len(grades) - count)}
    if not count:
        return counts
    exact = [grade.figures.get("exact", float(grade.reward >= 1.0 - 1e-9)) for grade in grades if grade.known]
    intervals = {"exact": share_interval(sum(exact), count)}
    if count > 1:
        intervals["reward"] = mean_interval(rewards)
    bounds = {
        f"eval/{name}/{of}_{end}": bound
        for of, interval in intervals.items()
        for end, bound in zip(("low", "high"), interval, strict=True)
    }
    return {
        f"eval/{name}/reward": sum(rewards) / count,
        f"eval/{name}/exact": sum(exact) / count,
        **bounds,
        f"eval/{name}/valid": sum(grade.outcome == "scored" for grade in grades) / count,
        **counts,
    }


def tier_figures(tier: str, grades: Sequence[Grade]) -> dict[str, float]:
    """Mean reward of a dearer verifier and the means of its own figures. Pure."""
    known = [grade for grade in grades if grade.known]
    figures = {f"eval/{MAIN_SET}/{tier}_prompts": float(len(known))}
    if known:
        figures[f"eval/{MAIN_SET}/{tier}"] = sum(grade.reward for grade in known) / len(known)
    for name in {name for grade in known for name in grade.figures if name.startswith("r_")}:
        values = [grade.figures[name] for grade in known if name in grade.figures]
        figures[f"eval/{MAIN_SET}/{tier}_{name}"] = sum(values) / len(values)
    return figures


class Evaluator:
    """Evaluations of one run."""

    def __init__(
        self,
        run: str,
        config: RunConfig,
        tasks: Mapping[str, Task[Any]],
        codec: Codec,
        generator: Generator,
        verifications: Verifications,
        journal: Journal,
        waits: Waits,
        background: asyncio.TaskGroup,
    ) -> None:
        self._run = run
        self._config = config
        self._tasks = tasks
        self._codec = codec
        self._generator = generator
        self._verifications = verifications
        self._journal = journal
        self._waits = waits
        self._background = background
        self._tiers: list[asyncio.Task[None]] = []

    async def intermediate(self, step: int, version: int) -> dict[str, float]:
        """The main set, smaller."""
        count = self._config.evaluation.intermediate_prompts
        return await self._evaluate({MAIN_SET: count}, step, version, "intermediate")

    async def full(self, step: int, version: int) -> dict[str, float]:
        """All sets; the dearer verifiers grade a few of the main set's answers in the background."""
        prompts = self._config.evaluation.prompts
        counts = {name: prompts if name == MAIN_SET else max(1, prompts // 2) for name in self._tasks}
        return await self._evaluate(counts, step, version, "end")

    async def finished(self) -> None:
        """Returns when the dearer verifiers are done."""
        if self._tiers:
            with self._waits.on("evaluation", "the surrogate and full verifiers"):
                await asyncio.wait(self._tiers)

    async def _evaluate(self, counts: Mapping[str, int], step: int, version: int, kind: str) -> dict[str, float]:
        figures: dict[str, float] = {"version": float(version)}
        limit = asyncio.Semaphore(CONCURRENCY)
        for name, count in counts.items():
            with self._waits.on("evaluation", f"answers and grades of the set {name}"):
                answered = await self._answer(name, count, version, limit)
            figures |= set_figures(name, [one.grade for one in answered])
            if name == MAIN_SET and kind == "end":
                self._transcribe(answered[:TRANSCRIPTS], step, version)
                self._start_tiers(answered, step, version)
        await self._journal.write("evaluation", step, self._config.rl.steps, figures, {"kind": kind})
        return figures

    async def _answer(self, name: str, count: int, version: int, limit: asyncio.Semaphore) -> list[Answered]:
        task = self._tasks[name]
        questions = await asyncio.to_thread(lambda: [question(task, "heldout", index) for index in range(count)])

        async def one(asked: Question, attempt: int) -> Answered:
            async with limit:
                answered = await self._one(name, asked, version, attempt)
                self._waits.progress()
                return answered

        answered = list(await asyncio.gather(*(one(asked, 0) for asked in questions)))
        for attempt in range(1, _ROUNDS + 1):
            unknown = [place for place, each in enumerate(answered) if not each.grade.known]
            if len(unknown) <= MAX_UNKNOWN_SHARE * count:
                break
            text = f"{len(unknown)} of {count} answers of the held-out set {name} have no grade"
            cause = answered[unknown[-1]].grade
            if attempt == _ROUNDS:
                raise EvaluationFailed(
                    f"{text}, {_ROUNDS} times in a row; the last one: {cause.message or cause.outcome}"
                )
            log.warning("%s (%s), asking again", text, cause.message or cause.outcome)
            again = await asyncio.gather(*(one(answered[place].question, attempt) for place in unknown))
            for place, each in zip(unknown, again, strict=True):
                answered[place] = each
        return answered

    async def _one(self, name: str, asked: Question, version: int, attempt: int) -> Answered:
        # Another key for each attempt: a job of the sandbox that ended without a grade stays so.
        key = f"evaluation/{name}/{version}/{asked.index}" + (f"/{attempt}" if attempt else "")
        try:
            (sample,) = await self._generator.generate(
                f"{self._run}/{key}",
                self._codec.prompt_ids(asked),
                1,
                temperature=0.0,
                seed=0,
                min_version=version,
                seconds=_ANSWER_SECONDS,
            )
            answer = self._codec.answer_text(sample.token_ids)
            grade = await self._grade(key, self._config.rl.verifier, asked, answer, version)
            return Answered(asked, answer, grade)
        except (PeerAway, Refused) as error:
            log.warning("held-out prompt %d has no grade: %s", asked.index, error)
            return Answered(asked, "", Grade("infra_error", 0.0, message=str(error)))

    async def _grade(self, key: str, tier: str, asked: Question, answer: str, version: int) -> Grade:
        rl = self._config.rl
        seconds = rl.verify_deadline_seconds if tier == rl.verifier else _TIER_SECONDS[tier]
        verifier = verifier_of(self._config, tier)
        (grade,) = await self._verifications.grade(
            f"{key}/{tier}", verifier, asked.truth, [answer], seconds=seconds, version=version
        )
        return grade

    def _start_tiers(self, answered: Sequence[Answered], step: int, version: int) -> None:
        evaluation, task = self._config.evaluation, self._tasks[MAIN_SET]
        for tier, count in (("surrogate", evaluation.surrogate_prompts), ("full", evaluation.full_prompts)):
            if count and tier in task.verifiers:
                self._tiers.append(self._background.create_task(self._tier(tier, answered[:count], step, version)))

    async def _tier(self, tier: str, answered: Sequence[Answered], step: int, version: int) -> None:
        limit = asyncio.Semaphore(TIER_CONCURRENCY)

        async def one(each: Answered) -> Grade:
            async with limit:
                key = f"tier/{step}/{each.question.index}"
                try:
                    return await self._grade(key, tier, each.question, each.answer, version)
                except (PeerAway, Refused) as error:
                    return Grade("infra_error", 0.0, message=str(error))

        grades = await asyncio.gather(*map(one, answered))
        unknown = next((grade.message for grade in grades if not grade.known), "")
        if unknown:
            log.info("the %s verifier left answers ungraded, for example: %s", tier, unknown)
        await self._journal.write(
            "evaluation", step, self._config.rl.steps, tier_figures(tier, grades), {f"{tier}_unknown": unknown}
        )

    def _transcribe(self, answered: Sequence[Answered], step: int, version: int) -> None:
        for each in answered:
            truth = each.question.truth
            self._journal.sample(
                {
                    "stage": "evaluation",
                    "step": step,
                    "sample": f"{self._run}/held/{version}/{each.question.index}",
                    "prompt": self._codec.prompt_text(each.question),
                    "answer": each.answer,
                    "truth": each.question.answer_text,
                    "reward": each.grade.reward,
                    "outcome": each.grade.outcome,
                    "peaks": {
                        "two_theta": truth.get("two_theta_degrees", []),
                        "intensity": truth.get("intensity", []),
                    },
                }
            )
