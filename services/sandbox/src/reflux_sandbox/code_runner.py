"""Runs model-written code: bounded concurrency, bounded waiting, one single-use child per call."""

import asyncio

from reflux_kit.errors import CapacityExhausted, WrongState
from reflux_sandbox import metrics
from reflux_sandbox.execution import CodeRequest, CodeResult, run_code
from reflux_sandbox.isolation.base import Isolation, Tier

_WAITING_PER_SLOT = 8


class CodeRunner:
    """`unsafe` allows tiers below prefork, where the code can read what the service can read."""

    def __init__(self, isolation: Isolation, concurrency: int, *, unsafe: bool) -> None:
        self._isolation = isolation
        self._slots = asyncio.Semaphore(concurrency)
        self._most = concurrency * (1 + _WAITING_PER_SLOT)
        self._present = 0
        self._unsafe = unsafe

    async def run(self, request: CodeRequest) -> CodeResult:
        """Raises WrongState on a weak tier and CapacityExhausted when too many wait."""
        if self._isolation.tier < Tier.PREFORK and not self._unsafe:
            raise WrongState(
                f"the {self._isolation.name} tier is too weak for model-written code; "
                "run the service where namespaces work, or set REFLUX_SANDBOX_UNSAFE_CODE=1",
                tier=self._isolation.name,
            )
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
