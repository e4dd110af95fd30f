"""Which replicas compute something else than the learner: log-probs of one probe prompt under the same epoch. Pure."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from reflux_weight_broker.plan import Tensors

_EPOCHS = 4
_NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Thresholds:
    """Largest difference of a log-prob that is no fault, by the precision of the weights."""

    full: float = 1e-4
    narrow: float = 5e-2

    def of(self, tensors: Tensors) -> float:
        """The one for a layout; a single narrow tensor makes it narrow."""
        return self.narrow if any(dtype in _NARROW for _, dtype in tensors.shapes.values()) else self.full


@dataclass
class _Probe:
    learner: Sequence[float] | None = None
    replicas: dict[str, Sequence[float]] = field(default_factory=dict)


class Health:
    """Probes of the last epochs of one model; whoever comes first waits for the other."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._probes: OrderedDict[int, _Probe] = OrderedDict()

    def report(self, epoch: int, replica: str, logprobs: Sequence[float], tensors: Tensors) -> dict[str, str]:
        """Takes the log-probs of a replica, or of the learner when the name is empty.

        Returns what can be said now: replica -> what is wrong with it, empty when nothing is.
        """
        probe = self._probes.setdefault(epoch, _Probe())
        while len(self._probes) > _EPOCHS:
            self._probes.popitem(last=False)
        if replica:
            probe.replicas[replica] = logprobs
        else:
            probe.learner = logprobs
        if probe.learner is None:
            return {}
        threshold = self._thresholds.of(tensors)
        judged = [replica] if replica else list(probe.replicas)
        return {name: _fault(probe.learner, probe.replicas[name], epoch, threshold) for name in judged}


def _fault(learner: Sequence[float], replica: Sequence[float], epoch: int, threshold: float) -> str:
    if len(learner) != len(replica):
        return f"probe of epoch {epoch}: {len(replica)} log-probs, the learner has {len(learner)}"
    worst = max((abs(a - b) for a, b in zip(learner, replica, strict=True)), default=0.0, key=_nan_last)
    if worst <= threshold:
        return ""
    return f"probe of epoch {epoch}: a log-prob differs by {worst:.3g} from the learner's, more than {threshold:g}"


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value
