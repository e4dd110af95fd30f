"""Owns the sums: bytes and messages that every group of sources owes every target rank."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reflux_weightplan.buckets import Bucketing
from reflux_weightplan.classes import TensorClass
from reflux_weightplan.sides import Bools, Ints, Side
from reflux_weightplan.sources import Groups


@dataclass(frozen=True)
class Demand:
    """Both int64 [groups, target ranks]."""

    nbytes: Ints
    messages: Ints


class Accumulator:
    """Adds demand up for subsets of the tensors. A packed message carries all that one bucket brings to one audience,
    the set of target ranks that want the same packed bytes."""

    def __init__(self, classes: Sequence[TensorClass], groups: Groups, bucketing: Bucketing, target: Side) -> None:
        self.classes, self.groups, self.bucketing, self.target = classes, groups, bucketing, target
        self._audiences: dict[bytes, int] = {}
        self._packed = [self._packed_pairs(each) for each in classes]
        self.audiences = [np.frombuffer(key, bool) for key in self._audiences]

    def demand(self, label_T: Ints, wants_LD: Bools) -> Demand:
        """Demand when tensor t goes to the target ranks that want its label; `wants_LD` bool [labels, ranks]."""
        shape = (len(self.groups.ranks), self.target.ranks)
        nbytes, messages = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        codes: list[Ints] = []
        for index, each in enumerate(self.classes):
            labels = label_T[each.tensors]
            group_PU = self.groups.of_class[index]
            part = self.groups.part_of(len(labels))
            counts_PL = np.zeros((self.groups.parts, len(wants_LD)), np.int64)
            np.add.at(counts_PL, (part, labels), 1)
            self._add_class(each, group_PU, counts_PL @ wants_LD.astype(np.int64), nbytes, messages)
            if self._packed[index] is not None:
                codes.append(self._codes(index, labels, part, len(wants_LD)))
        if codes:
            self._add_packed(np.unique(np.concatenate(codes)), wants_LD, messages)
        return Demand(nbytes, messages)

    def _add_class(self, each: TensorClass, group_PU: Ints, counts_PD: Ints, nbytes: Ints, messages: Ints) -> None:
        template, box_D = each.template, self.target.box_KR[each.target_kind]
        columns = np.flatnonzero((box_D >= 0) & counts_PD.any(axis=0))
        if not len(columns):
            return
        shape = (group_PU.shape[1], int(box_D.max()) + 1)
        keep = template.target_box < shape[1]
        if keep.all():
            keep = slice(None)
        pair = (template.source_box[keep], template.target_box[keep])
        bytes_UV, messages_UV = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        np.add.at(bytes_UV, pair, template.nbytes[keep])
        np.add.at(messages_UV, pair, np.where(template.packed, 0, template.messages)[keep])
        boxes = box_D[columns]
        for part, groups_U in enumerate(group_PU):
            counts = counts_PD[part, columns]
            rows = np.flatnonzero(groups_U >= 0)
            at = np.ix_(groups_U[rows], columns)
            nbytes[at] += bytes_UV[rows][:, boxes] * counts
            messages[at] += messages_UV[rows][:, boxes] * counts

    def _packed_pairs(self, each: TensorClass) -> tuple[Ints, Ints, Ints] | None:
        """Source boxes, audiences and bucket parts of a class's packed pieces that somebody wants."""
        template = each.template
        if not template.packed.any():
            return None
        box_D = self.target.box_KR[each.target_kind]
        parts = self.bucketing.parts[id(template)]
        rows = np.unique(np.stack([template.source_box, template.target_box, parts])[:, template.packed], axis=1)
        audience_V = np.full(len(self.target.form_of_kind(each.target_kind).boxes), -1)
        for box in np.unique(rows[1]).tolist():
            mask = box_D == box
            if mask.any():
                audience_V[box] = self._audiences.setdefault(mask.tobytes(), len(self._audiences))
        audience = audience_V[rows[1]]
        wanted = audience >= 0
        return rows[0][wanted], audience[wanted], rows[2][wanted]

    def _codes(self, index: int, labels: Ints, part: Ints, num_labels: int) -> Ints:
        """(bucket, label, audience, group) of everything packed of a class, as one number each."""
        pairs = self._packed[index]
        assert pairs is not None
        box_Q, audience_Q, bucket_part_Q = pairs
        first = self.bucketing.first_TF[self.classes[index].tensors, 1]
        distinct = np.unique(np.stack([first, labels, part]), axis=1)
        bucket = distinct[0][:, None] + bucket_part_Q[None, :]
        group = self.groups.of_class[index][distinct[2]][:, box_Q]
        code = (bucket * num_labels + distinct[1][:, None]) * len(self._audiences) + audience_Q[None, :]
        return np.unique((code * len(self.groups.ranks) + group).reshape(-1))

    def _add_packed(self, codes: Ints, wants_LD: Bools, messages: Ints) -> None:
        groups, audiences = len(self.groups.ranks), len(self.audiences)
        rows, counts = np.unique(codes % (groups * audiences * len(wants_LD)), return_counts=True)
        readers, group = np.divmod(rows, groups)
        for reader in np.unique(readers).tolist():
            label, audience = divmod(reader, audiences)
            columns = np.flatnonzero(self.audiences[audience] & wants_LD[label])
            chosen = readers == reader
            messages[np.ix_(group[chosen], columns)] += counts[chosen][:, None]
