"""Owns the way from a plan to one rank's work: the templates of its classes times their tensors."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from reflux_weightplan.plan import Plan
from reflux_weightplan.sides import Ints
from reflux_weightplan.templates import PIECE_BYTES
from reflux_weightplan.transfers import FETCH, PIECE, TRANSFER, Pieces, Transfers


class Expander:
    """Makes the rows of single ranks; keeps the tables of the source ranks it has met, some 100 KB each."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._tables: dict[int, _SourceTable] = {}
        self._box_starts = [
            np.searchsorted(each.template.source_box, np.arange(int(each.template.source_box.max(initial=-1)) + 2))
            for each in plan.classes
        ]
        self._audiences = _Audiences(plan)
        # Stages of the relayed route have schedules of their own, in which a rank meets a source more than once.
        self._start_SD = plan.schedule.start_SD if plan.schedule else np.zeros(plan.traffic.shape)

    def transfers(self, target_rank: int) -> Transfers:
        """What a target rank reads from the sources: everything, or its own share when the plan relays."""
        parts = [
            rows
            for index in range(len(self.plan.classes))
            if self.plan.target.box_KR[self.plan.classes[index].target_kind, target_rank] >= 0
            for rows in self._class_rows(index, target_rank)
        ]
        rows = np.concatenate(parts) if parts else np.zeros(0, TRANSFER)
        start_S = self._start_SD[:, target_rank]
        keys = [rows[key] for key in ("target_offset", "source_offset", "packed", "source_rank")]
        rows = rows[np.lexsort((*keys, start_S[rows["source_rank"]], rows["bucket"]))]
        return Transfers(tuple(tensor.name for tensor in self.plan.target.layout.tensors), rows)

    def pieces(self, source_rank: int) -> Pieces:
        """What a source rank publishes, for all target ranks."""
        table = self._table(source_rank)
        return Pieces(table.rows(), table.pack_bytes)

    def fetches(self, target_rank: int) -> NDArray[np.void]:
        """What a target rank reads from its peers when the plan relays: FETCH rows by slab."""
        relay, target = self.plan.relay, self.plan.target
        if relay is None:
            return np.zeros(0, FETCH)
        servers = relay.servers(target_rank)
        region = target.region(target_rank)
        parts = []
        for each in self.plan.classes:
            nbytes = int(target.bytes_KR[each.target_kind, target_rank])
            form = target.form_of_kind(each.target_kind)
            slab, share = np.divmod(relay.division.label_T[each.tensors], relay.division.shares)
            peer = np.array([servers.get(number, -1) for number in range(relay.division.shares)])[share]
            chosen = peer >= 0
            if not nbytes or not chosen.any():
                continue
            rows = np.zeros(int(chosen.sum()), FETCH)
            rows["tensor"], rows["slab"], rows["peer"] = each.tensors[chosen], slab[chosen], peer[chosen]
            rows["offset"] = target.offsets(region, each.tensors)[chosen]
            rows["run_bytes"], rows["runs"], rows["pitch"] = nbytes, 1, nbytes
            if form.block_rows:
                inner = int(np.prod(form.shape[1:], dtype=np.int64)) * form.item_bytes * form.block_rows
                rows["run_bytes"], rows["runs"], rows["pitch"] = inner, nbytes // inner, form.block_bytes
            parts.append(rows)
        rows = np.concatenate(parts) if parts else np.zeros(0, FETCH)
        return rows[np.lexsort((rows["offset"], rows["slab"]))]

    def _class_rows(self, index: int, target_rank: int) -> Iterator[NDArray[np.void]]:
        plan, each = self.plan, self.plan.classes[index]
        template = each.template
        box = plan.target.box_KR[each.target_kind, target_rank]
        pieces = np.flatnonzero(template.target_box == box)
        chosen = np.arange(len(each.tensors))
        if plan.relay:
            share = plan.relay.division.label_T[each.tensors] % plan.relay.division.shares
            chosen = np.flatnonzero(share == plan.peers.share_D[target_rank])
        part = plan.groups.part_of(len(each.tensors))[chosen]
        choice = plan.relay.choice if plan.relay else plan.choice
        bases = plan.target.offsets(plan.target.region(target_rank), each.tensors)
        for number in np.unique(part).tolist():
            positions = chosen[part == number]
            groups = plan.groups.of_class[index][number][template.source_box[pieces]]
            rows = np.zeros((len(pieces), len(positions)), TRANSFER)
            self._fill_source(rows, index, positions, pieces, choice[groups, target_rank])
            rows["tensor"] = each.tensors[positions]
            rows["bucket"] = plan.bucketing.of(each, each.tensors[positions], pieces)
            rows["target_offset"] = template.target_offset[pieces][:, None] + bases[positions]
            for field in ("run_bytes", "runs", "target_pitch", "packed"):
                rows[field] = getattr(template, field)[pieces][:, None]
            pitch = np.where(template.packed, template.run_bytes, template.source_pitch)
            rows["source_pitch"] = pitch[pieces][:, None]
            yield rows.reshape(-1)

    def _fill_source(self, rows: NDArray[np.void], index: int, positions: Ints, pieces: Ints, sources: Ints) -> None:
        starts = self._box_starts[index]
        inside = pieces - starts[self.plan.classes[index].template.source_box[pieces]]
        piece, offset = rows["piece"], rows["source_offset"]
        for row, (rank, number) in enumerate(zip(sources.tolist(), inside.tolist(), strict=True)):
            table = self._table(rank)
            start, width = table.blocks[index]
            at = start + number * width + positions
            piece[row], offset[row] = table.piece[at], table.read_offset[at]
        rows["source_rank"] = sources[:, None]

    def _table(self, rank: int) -> "_SourceTable":
        if rank not in self._tables:
            self._tables[rank] = _SourceTable(self.plan, rank, self._box_starts, self._audiences)
        return self._tables[rank]


class _Audiences:
    """Numbers of the sets of target ranks that want the same packed bytes, by class and target box."""

    def __init__(self, plan: Plan) -> None:
        numbers: dict[bytes, int] = {}
        self.of_class: list[Ints] = []
        for each in plan.classes:
            boxes = len(plan.target.form_of_kind(each.target_kind).boxes)
            audience = np.full(boxes, -1)
            if each.template.packed.any():
                box_D = plan.target.box_KR[each.target_kind]
                for box in np.unique(box_D[box_D >= 0]).tolist():
                    audience[box] = numbers.setdefault((box_D == box).tobytes(), len(numbers))
            self.of_class.append(audience)


class _SourceTable:
    """Pieces of one source rank. Rows are grouped by class: (pieces of its box) x (tensors), `blocks` says where."""

    def __init__(self, plan: Plan, rank: int, box_starts: list[Ints], audiences: _Audiences) -> None:
        self.blocks: dict[int, tuple[int, int]] = {}
        region = plan.source.region(rank)
        parts: list[Ints] = []
        total = 0
        label_T = plan.label_T
        for index, each in enumerate(plan.classes):
            box = int(plan.source.box_KR[each.source_kind, rank])
            if box < 0 or box + 1 >= len(box_starts[index]):
                continue
            template = each.template
            pieces = np.arange(box_starts[index][box], box_starts[index][box + 1])
            audience = audiences.of_class[index][template.target_box[pieces]]
            shape = (len(pieces), len(each.tensors))
            packed = template.packed[pieces]
            columns = (
                plan.bucketing.of(each, each.tensors, pieces),
                np.where(packed, audience, -1)[:, None],
                plan.groups.of_class[index][plan.groups.part_of(len(each.tensors)), box],
                label_T[each.tensors],
                template.source_offset[pieces][:, None] + plan.source.offsets(region, each.sources),
                template.run_bytes[pieces][:, None],
                template.runs[pieces][:, None],
                template.source_pitch[pieces][:, None],
                each.sources,
                packed[:, None].astype(np.int64),
            )
            parts.append(np.stack([np.broadcast_to(column, shape).reshape(-1) for column in columns]))
            self.blocks[index] = (total, len(each.tensors))
            total += len(pieces) * len(each.tensors)
        self._columns = np.concatenate(parts, axis=1) if parts else np.zeros((10, 0), np.int64)
        self._number()

    def _number(self) -> None:
        """Numbers the pieces by bucket. Packed rows of one bucket, audience, group and label, which a reader takes all
        or none of, follow each other in the pack area and share a piece; it is cut after 4 MiB."""
        bucket, audience, group, label, offset, run, runs, _, _, packed = self._columns
        order = np.lexsort((offset, packed * label, packed * group, audience, bucket))
        nbytes, held = (run * runs)[order], packed[order].astype(bool)
        packed_bytes = np.where(held, nbytes, 0)
        pack_offset = np.cumsum(packed_bytes) - packed_bytes
        key = np.stack([bucket, audience, group, label])[:, order]
        opens = np.ones(len(order), bool)
        opens[1:] = ~held[1:] | (key[:, 1:] != key[:, :-1]).any(axis=0)
        first = np.flatnonzero(opens)
        block_of = np.cumsum(opens) - 1
        opens[1:] |= np.diff((pack_offset - pack_offset[first][block_of]) // PIECE_BYTES) > 0
        self.pack_bytes = int(packed_bytes.sum())
        self.piece, self.read_offset = np.empty(len(order), np.int32), np.empty(len(order), np.int64)
        self.piece[order] = np.cumsum(opens) - 1
        self.read_offset[order] = np.where(held, pack_offset, offset[order])
        self._order = order

    def rows(self) -> NDArray[np.void]:
        """PIECE rows in the order of their numbers."""
        bucket, _, _, _, offset, run, runs, pitch, tensor, packed = self._columns[:, self._order]
        rows = np.zeros(len(bucket), PIECE)
        rows["tensor"], rows["bucket"], rows["piece"] = tensor, bucket, self.piece[self._order]
        rows["source_offset"], rows["run_bytes"], rows["runs"], rows["pitch"] = offset, run, runs, pitch
        rows["pack_offset"] = np.where(packed, self.read_offset[self._order], -1)
        return rows
