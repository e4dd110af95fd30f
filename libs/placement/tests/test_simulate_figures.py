import numpy as np
import pytest

from reflux_placement.gang import Assignment, GangDemand, Relation, RoleDemand
from reflux_placement.simulate.clusters import grid
from reflux_placement.simulate.compare import Comparison, as_data, trials
from reflux_placement.simulate.engine import simulate
from reflux_placement.simulate.figures import block_bootstrap, figures, over_seeds
from reflux_placement.simulate.fragmentation import RequestClass, fragmented_gpus, request_mix
from reflux_placement.simulate.jobs import SimJob
from reflux_placement.simulate.openb import Workload
from reflux_placement.simulate.policies import POLICIES
from reflux_placement.simulate.spans import cross_share, fewest_racks, num_domains
from reflux_placement.topology import Resources

GPU = Resources(1, 1_000, 1 << 30)
FOUR = grid("four", racks=4, nodes_per_rack=2, racks_per_block=2, each=GPU.times(4))


def gang(count, each=4, **more):
    return GangDemand(roles=(RoleDemand(role="worker", count=count, each=GPU.times(each), **more),))


def placed(*nodes):
    return Assignment("cluster", 0, {"worker": np.array(nodes)})


def test_traffic_between_racks_is_the_share_of_pairs_that_cross():
    assert cross_share(FOUR, gang(2), placed(0, 1)) == 0.0
    assert cross_share(FOUR, gang(2), placed(0, 2)) == 1.0
    assert cross_share(FOUR, gang(4), placed(0, 1, 2, 3)) == pytest.approx(8 / 12)
    assert cross_share(FOUR, gang(1), placed(3)) == 0.0


def test_flows_between_roles_count_by_their_bytes():
    roles = (
        RoleDemand(role="prefill", count=1, each=GPU, traffic=10.0),
        RoleDemand(role="decode", count=2, each=GPU, traffic=30.0),
    )
    both = GangDemand(roles=roles, relations=(Relation(role="decode", near="prefill", traffic=70.0),))
    where = Assignment("cluster", 0, {"prefill": np.array([0]), "decode": np.array([1, 2])})
    assert cross_share(FOUR, both, where) == pytest.approx((30.0 + 70.0 / 2) / 100.0)


def test_racks_are_counted_and_the_fewest_possible_are_known():
    assert num_domains(FOUR, 1, np.array([0, 1, 5])) == 2
    assert [fewest_racks(FOUR, gang(count)) for count in (1, 2, 3, 5)] == [1, 1, 2, 3]


def test_fragmentation_counts_free_gpus_that_no_gang_of_the_mix_can_use():
    pairs = (RequestClass(GPU.times(4), 2, 1.0, 1),)
    usable = FOUR.capacity_NR.copy()
    assert fragmented_gpus(FOUR, usable, pairs) == 0.0
    usable[0] -= np.array([4, 4_000, 4 << 30])
    assert fragmented_gpus(FOUR, usable, pairs) == 4.0
    usable[2] -= np.array([1, 0, 0])
    assert fragmented_gpus(FOUR, usable, pairs) == 4.0 + 7.0
    usable[7] = -1
    assert fragmented_gpus(FOUR, usable, pairs) == 4.0 + 7.0 + 4.0
    singles = (RequestClass(GPU, 1, 0.5, 0), RequestClass(GPU.times(4), 2, 0.5, 1))
    assert fragmented_gpus(FOUR, usable, singles) == 0.5 * 15.0


def test_gpus_that_lack_cpus_are_fragmented_too():
    usable = FOUR.capacity_NR.copy()
    usable[:, 1] = 1_500
    assert fragmented_gpus(FOUR, usable, (RequestClass(GPU, 1, 1.0, 0),)) == 32 - 8


def test_the_mix_takes_segments_as_they_are_and_finds_the_tightest_level():
    mix = request_mix(FOUR, [gang(2), gang(2), gang(8, segment_size=2), gang(4)])
    assert {(each.count, each.level): each.share for each in mix} == {(2, 1): 0.75, (4, 2): 0.25}


def test_the_figures_of_a_tiny_run_are_those_worked_out_by_hand():
    jobs = [
        SimJob(name="a", gang=gang(8), arrives_at=0, seconds=100),
        SimJob(name="b", gang=gang(2), arrives_at=50, seconds=50),
        SimJob(name="c", gang=gang(1), arrives_at=150, seconds=100),
    ]
    result = figures(simulate(FOUR, jobs, POLICIES["fifo-first-fit"]()))
    assert (result.jct_mean, result.jct_p50) == (pytest.approx((100 + 100 + 100) / 3), 100)
    assert (result.wait_mean, result.wait_p99) == (pytest.approx(50 / 3), pytest.approx(49.0))
    assert result.slowdown_mean == pytest.approx((1 + 2 + 1) / 3)
    assert result.utilisation == pytest.approx((32 * 100 + 8 * 50) / (32 * 150))
    assert (result.cross_rack_gangs, result.avoidable_cross_rack_gangs, result.cross_block_gangs) == (1, 0, 1)
    assert result.excess_racks == 1.0
    assert result.makespan == 250


def test_ratios_compare_with_the_best_rival_of_each_seed():
    def workload(seed):
        wide = [SimJob(name=f"w{at}", gang=gang(2), arrives_at=at, seconds=60 + seed) for at in range(6)]
        return Workload(tuple(wide), ("three",))

    policies = {name: POLICIES[name]() for name in ("reflux", "fifo-first-fit", "reflux-fifo")}
    done = [trial for trial, _ in trials(FOUR, workload, policies, [0, 1])]
    comparison = Comparison(("three",), tuple(done))
    assert comparison.ratios_to_best("jct_mean") == [1.0, 1.0]
    assert comparison.ratios_to_best("cross_rack_gangs") == [1.0, 1.0]
    data = as_data(comparison)
    assert data["seeds"] == [0, 1]
    assert data["policies"]["reflux"]["jct_mean"]["low"] <= data["policies"]["reflux"]["jct_mean"]["value"]


def test_the_bootstrap_covers_the_mean_of_dependent_values_about_as_often_as_it_says():
    covered = 0
    for seed in range(60):
        noise = np.random.default_rng(seed).standard_normal(420)
        values = np.convolve(noise, np.ones(20) / 20, mode="valid")[:400]
        bar = block_bootstrap(values, lambda each: float(each.mean()), rounds=200, seed=seed)
        covered += bar.low <= 0.0 <= bar.high
    assert 45 <= covered <= 60
    assert over_seeds([3.0, 1.0, 2.0]) == over_seeds([1.0, 2.0, 3.0])
