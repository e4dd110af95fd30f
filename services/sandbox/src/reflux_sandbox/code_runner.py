"""Runs model-written code: bounded concurrency, bounded waiting, one single-use child per call."""

import asyncio

from reflux_kit.errors import CapacityExhausted, WrongState
from reflux_sandbox import metrics
from reflux_sandbox.execution import CodeRequest, CodeResult, run_code
from reflux_sandbox.isolation.base import Isolation, Tier

_WAITING_PER_SLOT = 8


def refuse_weak(isolation: Isolation) -> None:
    """Raises WrongState below prefork: text that a model wrote could read and change what the service can."""
    if isolation.tier < Tier.PREFORK:
        raise WrongState(
            f"the {isolation.name} tier is unsafe for model-written code, which it never runs; "
            "run the service where prefork, bwrap or gvisor works",
            tier=isolation.name,
        )


class CodeRunner:
    """Refuses below prefork, and what would wait too long."""

    def __init__(self, isolation: Isolation, concurrency: int) -> None:
        self._isolation = isolation
        self._slots = asyncio.Semaphore(concurrency)
        self._most = concurrency * (1 + _WAITING_PER_SLOT)
        self._present = 0

    async def run(self, request: CodeRequest) -> CodeResult:
        """Raises WrongState on a weak tier and CapacityExhausted when too many wait."""
        refuse_weak(self._isolation)
        if self._present >= self._most:
            raise CapacityExhausted(f"{self._present} runs are under way or wait; try again later")
        self._present += 1
        try:
            async with self._slots:
                result = await run_code(await self._isolation.acquire(), request)
        finally:
            self._present -= 1
        metrics.CODE.labels(result.status).inc()
        return result
