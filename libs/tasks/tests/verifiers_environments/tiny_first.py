"""The same environment written for the first generation of `verifiers`."""

import verifiers as vf  # pyright: ignore[reportMissingImports]
from datasets import Dataset  # pyright: ignore[reportMissingImports]


def load_environment(largest: int = 4):
    rows = [
        {"prompt": [{"role": "user", "content": f"{a} plus {b}"}], "answer": str(a + b)}
        for a in range(largest)
        for b in range(5)
    ]

    async def correct(completion, answer) -> float:
        return float(completion[-1]["content"].strip() == answer)

    def short(completion, **kwargs) -> float:
        if "boom" in completion[-1]["content"]:
            raise RuntimeError("a bug of the environment")
        return float(len(completion[-1]["content"]) < 5)

    async def length(completion) -> float:
        return float(len(completion[-1]["content"]))

    rubric = vf.Rubric(funcs=[correct, short, length], weights=[1.0, 0.5, 0.0])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric)
