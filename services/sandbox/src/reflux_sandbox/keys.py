"""What an answer is equal to: text forms here, forms that parse more than words in a child of their own."""

import asyncio
import dataclasses
import logging

from reflux_sandbox.execution import GradeSession
from reflux_sandbox.isolation.base import Isolation, VerifierInfo
from reflux_sandbox.jobs import JobSpec
from reflux_tasks.canonical import text_form

log = logging.getLogger(__name__)

_CHILD_SECONDS = 5.0
_CHILD_CPU_SECONDS = 10
_MOST_CHILDREN = 4
"""At one time."""
_ROOM_SECONDS = 15.0
"""How long a creation waits for one of them: a large batch goes on without canonical texts."""
_MOST_CHARACTERS = 1 << 16
"""A longer canonical text is not taken: the answer then stands for itself."""


class AnswerKeys:
    """Fills in `JobSpec.canonical`. No plug-in runs in this process, and no failure stops a job: an answer without a
    canonical text stands for itself, which costs at most a second grading."""

    def __init__(self, isolation: Isolation, memory_bytes: int) -> None:
        self._isolation = isolation
        self._memory_bytes = memory_bytes
        self._room = asyncio.Semaphore(_MOST_CHILDREN)

    async def filled(self, spec: JobSpec, info: VerifierInfo) -> JobSpec:
        """The job with one canonical text per answer; for "own" forms one child of at most 5 s, after at most 15 s."""
        if info.canonical_form != "own":
            return dataclasses.replace(
                spec, canonical=tuple(text_form(info.canonical_form, answer) for answer in spec.answers)
            )
        texts = await self._own(spec, info)
        canonical = tuple(
            f"words\0{text_form('words', answer)}" if text is None else f"own\0{text}"
            for text, answer in zip(texts, spec.answers, strict=True)
        )
        return dataclasses.replace(spec, canonical=canonical)

    async def _own(self, spec: JobSpec, info: VerifierInfo) -> list[str | None]:
        nothing: list[str | None] = [None] * len(spec.answers)
        try:
            async with asyncio.timeout(_ROOM_SECONDS) as limit, self._room:
                limit.reschedule(asyncio.get_running_loop().time() + min(_CHILD_SECONDS, spec.deadline_seconds))
                limits = (self._memory_bytes, _CHILD_CPU_SECONDS)
                session = GradeSession(self._isolation, "grade", *limits, family=info.family)
                async with session:
                    answer = await session.grade(f"{spec.verifier}#canonical", spec.payload, list(spec.answers))
        except (TimeoutError, ConnectionError, ValueError) as error:
            log.warning("no canonical answers for %s: %s", spec.verifier, error or "no answer in time")
            return nothing
        texts = answer.get("canonical")
        if not isinstance(texts, list) or len(texts) != len(spec.answers):
            log.warning("no canonical answers for %s: %s", spec.verifier, str(answer.get("message"))[:200])
            return nothing
        return [text if _is_key(text) else None for text in texts]


def _is_key(text: object) -> bool:
    """Half a surrogate pair is no text that a key could be made of."""
    return isinstance(text, str) and len(text) <= _MOST_CHARACTERS and text.encode(errors="ignore").decode() == text
