"""Who computes a prompt for whom: same weights always, the own rack first, nobody for what is short or known."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflux_inference_gateway.routing.pairing import Pairing, Peer, distance

PLACES = ["", "z/r0/n0", "z/r0/n1", "z/r1/n0", "y/r0/n0"]
places = st.sampled_from(PLACES)
peers = st.lists(
    st.builds(
        Peer,
        name=st.just(""),
        version=st.integers(1, 2),
        epoch=st.integers(1, 2),
        location=places,
        queued_tokens=st.integers(0, 9000),
    ),
    max_size=6,
).map(lambda found: [replace(one, name=f"p{at}", order=at) for at, one in enumerate(found)])
LONG = tuple(range(1000))


def decode(place="z/r0/n0", **fields):
    return Peer(**{"name": "d", "version": 1, "epoch": 1, "location": place, **fields})


@given(peers, places, st.sets(st.integers(0, 5)))
def test_the_cheapest_of_the_same_weights_is_chosen_and_no_tried_one(found, place, tried):
    pairing, names = Pairing(), [f"p{at}" for at in tried]
    pairing.choose(decode(place), found, LONG, "1")
    paired = pairing.choose(decode(place), found, LONG, "1", names or ["gone"])
    fit = [one for one in found if (one.version, one.epoch) == (1, 1) and one.name not in names]
    if not fit:
        assert (paired.name, paired.why) == ("", "nobody")
        return
    chosen = next(one for one in fit if one.name == paired.name)
    here = decode(place)
    assert all(pairing.cost(here, chosen) <= pairing.cost(here, one) for one in fit)
    nearer = [one for one in fit if distance(place, one.location) < distance(place, chosen.location)]
    assert all(one.queued_tokens > chosen.queued_tokens for one in nearer), "a nearer one only gives way with a queue"
    same = [one for one in fit if distance(place, one.location) == distance(place, chosen.location)]
    assert chosen.queued_tokens == min(one.queued_tokens for one in same)


@given(places, places, places)
def test_distance_is_a_metric_on_places(one, two, three):
    assert distance(one, two) == distance(two, one)
    assert (distance(one, two) == 0) == (one == two)
    assert distance(one, three) <= distance(one, two) + distance(two, three)


@pytest.mark.parametrize(("there", "levels"), [("z/r0/n0", 0), ("z/r0/n1", 1), ("z/r1/n0", 2), ("y/r0/n0", 3)])
def test_distance_counts_the_levels_below_the_common_one(there, levels):
    assert distance("z/r0/n0", there) == levels


@given(st.integers(1, 600), st.integers(0, 600))
def test_what_is_short_or_known_is_computed_where_it_is_decoded(length, known):
    pairing, peer = Pairing(min_tokens=256), Peer(name="p", version=1, epoch=1)
    prompt = LONG[:length]
    pairing.choose(decode(), [peer], prompt[:known], "1")
    missing = pairing.missing("d", prompt, "1")
    assert missing <= max(0, length - 1 - min(known, length) // 16 * 16) + 1
    paired = pairing.choose(decode(), [peer], prompt, "1")
    assert bool(paired.name) == (missing >= 256)
    assert paired.why == ("" if missing >= 256 else "short" if length < 256 else "cached")


def test_a_prompt_of_other_weights_is_not_taken_for_known_and_a_second_try_is_no_second_use():
    pairing, peer = Pairing(), Peer(name="p", version=1, epoch=1)
    assert pairing.choose(decode(), [peer], LONG, "1").name == "p"
    assert pairing.choose(decode(), [peer], LONG, "1").why == "cached"
    assert pairing.choose(decode(), [peer], LONG, "2").name == "p"
    assert pairing.choose(decode(), [peer, replace(peer, name="q")], LONG, "2", ["p"]).name == "q"
