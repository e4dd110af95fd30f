"""The order of operations: monotone ids, the last answers kept, so that a repeated call has no second effect."""

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from reflux_trainer.learner.ops import BatchFigures, StepFigures

Kind = Literal["forward_backward", "optim_step"]
Figures = BatchFigures | StepFigures

_TYPES: Mapping[Kind, type[BatchFigures] | type[StepFigures]] = {
    "forward_backward": BatchFigures,
    "optim_step": StepFigures,
}
KEPT_ANSWERS = 64


class OutOfOrderError(ValueError):
    """The operation neither follows the last one nor repeats one whose answer is still known."""


@dataclass(frozen=True)
class _Entry:
    kind: Kind
    figures: Figures


class Journal:
    """Answers of the last operations by id; `last` is the newest id, 0 after CreateModel."""

    def __init__(self, last: int = 0, kept: int = KEPT_ANSWERS) -> None:
        self.last = last
        self._kept = kept
        self._entries: OrderedDict[int, _Entry] = OrderedDict()

    def recall(self, op_id: int, kind: Kind) -> Figures | None:
        """None when `op_id` is the next one, its answer when it is done. Raises `OutOfOrderError` for all others."""
        if op_id == self.last + 1:
            return None
        if op_id > self.last:
            raise OutOfOrderError(
                f"operation {op_id} does not follow operation {self.last}; send {self.last + 1} first"
            )
        entry = self._entries.get(op_id)
        if entry is None:
            raise OutOfOrderError(f"operation {op_id} is done, but its answer is no longer kept (last is {self.last})")
        if entry.kind != kind:
            raise OutOfOrderError(f"operation {op_id} was {entry.kind}, not {kind}")
        return entry.figures

    def may_load(self, op_id: int) -> bool:
        """Whether a load of state may be operation `op_id`: it is the next, or repeats the load that was the last."""
        return op_id == self.last + 1 or (op_id == self.last and op_id not in self._entries)

    def record(self, op_id: int, kind: Kind, figures: Figures) -> None:
        """Books the next operation as done."""
        assert op_id == self.last + 1
        self.last = op_id
        self._entries[op_id] = _Entry(kind, figures)
        while len(self._entries) > self._kept:
            self._entries.popitem(last=False)

    def dump(self) -> bytes:
        """JSON that `load` reads back exactly (floats are written with all their digits)."""
        entries = [[op_id, entry.kind, asdict(entry.figures)] for op_id, entry in self._entries.items()]
        return json.dumps({"last": self.last, "entries": entries}).encode()

    @classmethod
    def load(cls, raw: bytes, kept: int = KEPT_ANSWERS) -> "Journal":
        """The journal that `dump` wrote."""
        content = json.loads(raw)
        journal = cls(content["last"], kept)
        for op_id, kind, figures in content["entries"]:
            if kind == "forward_backward":
                figures["logprobs"] = tuple(tuple(row) for row in figures.get("logprobs", ()))
            journal._entries[op_id] = _Entry(kind, _TYPES[kind](**figures))
        return journal
