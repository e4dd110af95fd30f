"""An environment written for `verifiers` 0.4: sums, graded by two rewards."""

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        if "boom" in trace.last_reply:
            raise RuntimeError("a bug of the environment")
        return float(len(trace.last_reply) < 5)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for a in range(4):
            for b in range(5):
                yield SumTask(SumData(prompt=f"{a} plus {b}", answer=str(a + b)), self.config.task)


__all__ = ["SumTaskset"]
