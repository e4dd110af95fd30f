"""Full verification that the value of information saves on a replayed run, and the advantage error that it causes.

    python benchmarks/sandbox/value.py [REPLAY.json ...]

The replays are groups that a policy answered while it learned X-ray phase identification, with the real grades of the
surrogate and of the full verifier and the CPU seconds that the latter took (data/make_xrd_replay.py). They are played
in their order through the product's own policies: calibration, trust, audit draw, forecast, selection. Each group is
settled before the next one is released. The rule verifier of the task compares with the truth; it is not used.

- `voi_cpu_saved`: 1 - CPU seconds of the verifications that ran / of all. Equal answers of a group count once on both
  sides (the result cache runs them once). What calibration needs at the start and the audit are in what ran.
- `voi_advantage_error`: mean over all samples of |A_used - A_full|, A by GRPO (over the sample deviation plus 1e-6).
  A_full comes from all full rewards; A_used from the full rewards that were verified and the mean of the forecast for
  the skipped ones.
- `audit_advantage_error`: the same figure as the service reports it, from audited groups alone.

Figures are means over ten draws of the audit; `_worst` is the worst of them. The first replay gives the figures;
further ones (another seed of task, policy and prompts) are printed with the prefix of their file. The last line is
JSON.
"""

import json
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from reflux_sandbox.ladder.calibration import Record, TrustLimits, figures, is_trusted
from reflux_sandbox.ladder.release import is_audited
from reflux_sandbox.ladder.selection import Answer, ValuePolicy, audit, estimates, plan
from reflux_sandbox.ladder.value import Forecaster, advantages, leads

DATA = Path(__file__).parent / "data"
WINDOW = 1024
SEEDS = range(10)
DECLARED_COST_SECONDS = 1.0
"""Of the full verifier, before anything was measured."""


@dataclass
class Tally:
    """What a replay adds up."""

    all_cpu: float = 0.0
    spent_cpu: float = 0.0
    error: float = 0.0
    samples: int = 0
    verified: int = 0
    answers: int = 0
    audit_errors: list[tuple[float, int]] = field(default_factory=list)


class Replay:
    """One run played through the policies."""

    def __init__(self, policy: ValuePolicy, limits: TrustLimits, seed: int = 0) -> None:
        self._policy, self._limits, self._seed = policy, limits, seed
        self.window: deque[Record] = deque(maxlen=WINDOW)
        self.trusted = False
        self.tally = Tally()

    def play(self, number: int, of_sample: Sequence[int], rows: Sequence[Sequence[float | None]]) -> None:
        """Releases and settles one group."""
        copies = np.bincount(of_sample, minlength=len(rows))
        cheap = [float(row[0] or 0.0) for row in rows]
        answers = [
            Answer(cheap=reward, lead=lead, copies=int(count))
            for reward, lead, count in zip(cheap, leads(cheap), copies, strict=True)
        ]
        audited = is_audited(self._seed, "replay", str(number), self._policy.audit_share)
        forecaster = Forecaster(self.window)
        settled = self._verify(answers, rows, forecaster, exempt=audited or not self.trusted)
        self._count(settled, rows, forecaster, audited)

    def _verify(
        self, answers: list[Answer], rows: Sequence[Sequence[float | None]], forecaster: Forecaster, *, exempt: bool
    ) -> list[Answer]:
        """Verifies what the plan wants, verdict by verdict."""
        while wanted := plan(
            answers, forecaster, self._policy, exempt=exempt, cost_seconds=DECLARED_COST_SECONDS
        ).wanted:
            for position in wanted:
                old = answers[position]
                answers[position] = Answer(
                    cheap=old.cheap, lead=old.lead, copies=old.copies, full=rows[position][1], ended=True
                )
        return answers

    def _count(
        self,
        answers: list[Answer],
        rows: Sequence[Sequence[float | None]],
        forecaster: Forecaster,
        audited: bool,
    ) -> None:
        tally, cpu = self.tally, [float(row[2] or 0.0) for row in rows]
        used = np.array([estimates(answers, forecaster, self._policy)], dtype=np.float64)
        truth = np.array([[row[1] for row in rows]], dtype=np.float64)
        copies = np.array([answer.copies for answer in answers])
        apart = advantages(used, copies, "grpo") - advantages(truth, copies, "grpo")
        tally.error += float((np.abs(apart) * copies).sum())
        tally.samples += int(copies.sum())
        tally.all_cpu += sum(cpu)
        tally.spent_cpu += sum(seconds for seconds, answer in zip(cpu, answers, strict=True) if answer.ended)
        tally.answers += len(answers)
        tally.verified += sum(answer.ended for answer in answers)
        weight = dict.fromkeys(range(len(answers)), 1.0)
        if audited and self.trusted:
            played = audit(answers, forecaster, self._policy, DECLARED_COST_SECONDS)
            tally.audit_errors.append((played.advantage_error, int(copies.sum())))
            weight |= dict.fromkeys(set(weight) - played.verified, 1.0 / self._policy.audit_share)
        for position, answer in enumerate(answers):
            assert answer.cheap is not None
            known = len(forecaster) >= self._policy.least_pairs
            interval = forecaster.outlook(answer.cheap, answer.lead, 1).interval if known else None
            self.window.append(
                Record(
                    cheap=answer.cheap,
                    lead=answer.lead,
                    copies=answer.copies,
                    full=answer.full,
                    weight=weight[position],
                    cpu_seconds=cpu[position] if answer.ended else 0.0,
                    predicted=interval,
                )
            )
        self.trusted = is_trusted(self.trusted, figures(list(self.window)), self._limits)


def replayed(path: Path, policy: ValuePolicy, seed: int) -> dict[str, float]:
    """Figures of one file; groups with an answer that the full verifier could not judge are left out."""
    replay = Replay(policy, TrustLimits(), seed)
    for number, (_, of_sample, rows) in enumerate(json.loads(path.read_text())["groups"]):
        if all(row[1] is not None for row in rows):
            replay.play(number, of_sample, rows)
    tally, window = replay.tally, figures(list(replay.window))
    audits = sum(count for _, count in tally.audit_errors)
    return {
        "voi_cpu_saved": 1 - tally.spent_cpu / tally.all_cpu,
        "voi_advantage_error": tally.error / tally.samples,
        "audit_advantage_error": sum(e * n for e, n in tally.audit_errors) / audits if audits else 0.0,
        "verified_share": tally.verified / tally.answers,
        "rank_correlation": window.rank_correlation,
        "bias": window.bias,
        "interval_coverage": window.interval_coverage,
    }


def over_seeds(path: Path) -> dict[str, float]:
    """Means over the draws of the audit, and the worst of the two figures that have a bar."""
    found = [replayed(path, ValuePolicy(), seed) for seed in SEEDS]
    means = {name: float(np.mean([figure[name] for figure in found])) for name in found[0]}
    return means | {
        "voi_cpu_saved_worst": min(figure["voi_cpu_saved"] for figure in found),
        "voi_advantage_error_worst": max(figure["voi_advantage_error"] for figure in found),
    }


def main() -> None:
    paths = [Path(name) for name in sys.argv[1:]] or [DATA / "xrd_replay.json", DATA / "xrd_replay_2.json"]
    found: dict[str, float] = {}
    for number, path in enumerate(paths):
        for name, value in over_seeds(path).items():
            key = f"{path.stem}_{name}" if number else name
            found[key] = round(value, 4)
            print(f"{key:44} {value:10.4f}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
