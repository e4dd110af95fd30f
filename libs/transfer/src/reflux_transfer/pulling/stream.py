"""Follows arenas while they are filled: pulls what is ready, and ends when all of them are sealed."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

from reflux_transfer.arenas.header import version_of
from reflux_transfer.backends.base import TransferBackend
from reflux_transfer.errors import ReadCancelled
from reflux_transfer.pulling.pull import RankPull
from reflux_transfer.pulling.report import PullReport
from reflux_transfer.pulling.source import ArenaReader, RemoteSource
from reflux_transfer.pulling.whole import Move
from reflux_transfer.regions import LocalRegion

_NAP_SECONDS = 0.0005


def follow(
    backend: TransferBackend,
    remotes: Sequence[RemoteSource],
    local: LocalRegion,
    transfers: Iterable[Move],
    *,
    deadline_seconds: float,
    cancelled: Callable[[], bool] = lambda: False,
    plan_hash: str = "",
) -> PullReport:
    """Pulls and verifies the transfers of all sources; blocks until the sources are sealed, so call it in a thread.

    `local` is this rank's tensors area, of which gaps below 256 bytes between tensors may be overwritten; `plan_hash`
    names the plan that packed transfers come from. All ranks of the version are to be given, also those that nothing is
    read from: its fingerprint is made of theirs. Sources have their turns in the order of the transfers.

    Raises `GenerationGone`, `ChecksumMismatch` naming the tensor, `PlanNotStaged` before it has written anything,
    `ReadCancelled` soon after `cancelled()` turns true, `LayoutError` for transfers that do not fit a source, and what
    `read` raises. The local region is to be thrown away after an error.
    """
    start, moves = time.monotonic(), list(transfers)
    by_rank = {remote.rank: [move for move in moves if move.source_rank == remote.rank] for remote in remotes}
    unknown = {move.source_rank for move in moves} - set(by_rank)
    if unknown or not remotes or len(by_rank) != len(remotes):
        raise ValueError(f"each source rank is to be given once; missing are {sorted(unknown)}")
    pulls: list[RankPull] = []
    with ExitStack() as opened:
        for remote in sorted(remotes, key=lambda remote: remote.rank):
            reader = ArenaReader(backend, remote, start + deadline_seconds)
            opened.callback(reader.close)
            mine, alone = by_rank[remote.rank], len(remotes) == 1
            pulls.append(RankPull(backend, reader, local, mine, plan_hash=plan_hash, only_source=alone))
            opened.callback(pulls[-1].close)
        turns = {rank: turn for turn, rank in enumerate(dict.fromkeys(move.source_rank for move in moves))}
        _run(sorted(pulls, key=lambda pull: turns.get(pull.reader.rank, len(turns))), cancelled)
    return _report(pulls, moves, time.monotonic() - start)


def _run(pulls: Sequence[RankPull], cancelled: Callable[[], bool]) -> None:
    """Every turn looks at the headers, which raises when the time is over."""
    waiting = list(pulls)
    while waiting:
        progress = False
        for pull in list(waiting):
            if cancelled():
                raise ReadCancelled(f"the pull was cancelled before {pull.next_name}")
            if pull.advance():
                progress = True
            if pull.complete:
                waiting.remove(pull)
        if waiting and not progress:
            time.sleep(_NAP_SECONDS)


def _report(pulls: Sequence[RankPull], moves: Sequence[Move], seconds: float) -> PullReport:
    headers = [pull.reader.header for pull in pulls]
    same = len(pulls) == 1 and all(move.source_offset == move.target_offset for move in moves)
    whole = same and pulls[0].direct == headers[0].pieces
    return PullReport(
        sum(pull.bytes for pull in pulls),
        sum(pull.slices for pull in pulls),
        seconds,
        version_of(headers),
        headers[0].slice_bytes if whole else 0,
        tuple(pulls[0].reader.checksums[: headers[0].pieces].tolist()) if whole else (),
    )
