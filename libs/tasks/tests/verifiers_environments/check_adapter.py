"""Runs an environment of the real library through the adapter; prints ok. `python check_adapter.py MODULE`"""

import json
import sys
from pathlib import Path

from reflux_tasks.adapters.verifiers_env import verifiers_task
from reflux_tasks.verify import VerificationError


def main(module: str) -> None:
    task = verifiers_task("tiny", module).create(0, Path("unused"), {})
    verifier = task.verifiers["reward"]
    verifier.prepare()
    assert "verifiers-0." in verifier.version, verifier.version
    for split in ("train", "heldout"):
        problem = task.problem(split, 3)
        a, _, b = task.prompt_text(problem).split()
        payload = json.loads(json.dumps(task.truth(problem)))
        right = " ".join(task.answer_words(problem))
        assert right == f"{int(a) + int(b)} <eos>", right
        good, wrong, long = verifier.grade(payload, [right, "99 <eos>", f"{'9' * 9}<|im_end|>"])
        assert (good.reward, wrong.reward, long.reward) == (1.5, 0.5, 0.0), (good, wrong, long)
        assert dict(long.detail) | {"num_turns": 0.0} == {"correct": 0.0, "short": 0.0, "length": 9.0, "num_turns": 0.0}
        assert _failure(lambda: verifier.grade(payload, ["boom"])) is VerificationError  # noqa: B023
    assert _failure(lambda: verifier.grade({"x": 1}, ["1"])) is ValueError
    print("ok")


def _failure(call) -> type[Exception] | None:
    try:
        call()
    except Exception as error:
        return type(error)
    return None


if __name__ == "__main__":
    main(sys.argv[1])
