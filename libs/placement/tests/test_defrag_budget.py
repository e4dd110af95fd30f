"""How far the search for a migration goes: in counts, which bound its time."""

import pytest
from defrag_worlds import book, cluster, gang_of, live_of

from reflux_placement.gang import GangDemand
from reflux_placement.policy.config import PolicyConfig
from reflux_placement.policy.defrag import Plan, Undecided, plan
from reflux_placement.policy.defrag_trial import Limits, Trial
from reflux_placement.policy.defrag_yard import Yard
from reflux_placement.policy.makeroom import search_limits
from reflux_placement.policy.view import Live
from reflux_placement.room import Room


def _pairs_apart() -> tuple[Room, dict[str, Live]]:
    """Pairs over both racks of a block, which no other block has room for: no rack is ever cleared."""
    room = Room(cluster(blocks=8, racks=2, nodes=4))
    for start in range(0, 64, 8):
        for node in (start, start + 1):
            apart = gang_of(2, required_level="block", max_per_domain=1, spread_level="rack")
            book(room, f"pair{node}", apart, [node, node + 4])
        book(room, f"fixed{start}", gang_of(1), [start + 2])
    return room, live_of(room, tuple(f"fixed{start}" for start in range(0, 64, 8)))


def test_a_search_in_vain_ends_with_its_budget_in_its_last_stage_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """First single members are tried, then pairs as a whole. Each attempt tries one piece in one place."""
    room, live = _pairs_apart()
    calls: list[str] = []
    for name in ("place", "cut"):
        real = getattr(Yard, name)
        monkeypatch.setattr(Yard, name, lambda *args, real=real, name=name: calls.append(name) or real(*args))

    def counted(attempts: int) -> tuple[int, int]:
        calls.clear()
        found = plan(room, live, gang_of(4, required_level="rack"), Limits(moves=attempts, attempts=attempts))
        assert isinstance(found, Undecided)
        return calls.count("place"), calls.count("cut")

    assert counted(4000) == (40, 3)
    assert counted(30) == (30, 3)
    assert counted(20) == (20, 1)  # nothing is left for pairs: the jobs are not even cut into them


def test_a_larger_cluster_gets_a_larger_budget_and_each_of_its_scopes_a_share_of_one() -> None:
    budgets = [search_limits(PolicyConfig(), nodes) for nodes in (8, 2_400, 3_600, 25_200, 1_000_000)]
    assert [limits.attempts for limits in budgets] == [200, 200, 300, 2_000, 2_000]
    assert [limits.moves for limits in budgets] == [limits.attempts for limits in budgets]
    assert search_limits(PolicyConfig(defragmentation_moves=50), 25_200).attempts == 50


def test_half_of_many_racks_are_cleared_as_shipped() -> None:
    """One job in the way in each of 480 racks: 230 have to move."""
    room = Room(cluster(blocks=60, racks=8, nodes=8))
    for rack in range(480):
        book(room, f"j{rack}", gang_of(1), [8 * rack])
    live, gang = live_of(room), gang_of(8 * 230, segment_size=8)
    found = plan(room, live, gang, search_limits(PolicyConfig(), room.topology.num_nodes))
    assert isinstance(found, Plan)
    assert len(found.moves) == 230
    assert isinstance(plan(room, live, gang, Limits(moves=200, attempts=200)), Undecided)


def test_the_domains_of_a_search_share_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    room, live = _pairs_apart()
    gang = GangDemand(roles=gang_of(4).roles, required_level="rack")
    spent: list[bool] = []
    spend = Trial._spend
    monkeypatch.setattr(Trial, "_spend", lambda trial: spent.append(spend(trial)) or spent[-1])

    def attempts(most: int) -> int:
        spent.clear()
        assert isinstance(plan(room, live, gang, Limits(moves=4000, attempts=most)), Undecided)
        return sum(spent)

    needed = attempts(4000)
    assert needed > 12
    assert attempts(needed // 2) == needed // 2
