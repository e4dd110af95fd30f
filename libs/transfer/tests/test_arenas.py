import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from weights import LAYOUT, SLICE, LastingShm, assert_holds, tensors

from reflux_transfer import fingerprint
from reflux_transfer.arenas.geometry import Extra, Gather, Packing
from reflux_transfer.arenas.publisher import PublisherArenas
from reflux_transfer.arenas.replica import ReplicaArenas
from reflux_transfer.arenas.staging import Staging
from reflux_transfer.backends.shm import ShmBackend
from reflux_transfer.errors import ArenasBusy, GenerationGone, LayoutError, PeerGone, WrongHandle
from reflux_transfer.handles import Scope
from reflux_transfer.pulling.source import RemoteSource
from reflux_transfer.pulling.stream import follow
from reflux_transfer.pulling.whole import whole
from reflux_transfer.regions import LocalRegion


@pytest.fixture
def backend() -> Iterator[ShmBackend]:
    opened = ShmBackend()
    yield opened
    opened.close()


@pytest.fixture
def arenas(backend: ShmBackend) -> PublisherArenas:
    return PublisherArenas(backend, LAYOUT, SLICE)


def staged(arenas: PublisherArenas, seed: int, deadline_seconds: float = 0.0) -> Staging:
    staging = arenas.begin(deadline_seconds)
    staging.write(tensors(seed))
    return staging


def test_training_on_does_not_change_what_readers_see(arenas: PublisherArenas) -> None:
    weights = tensors(1)
    staging = arenas.begin()
    found = staging.write(weights)
    weights["big"] += 1
    assert_holds(arenas.view(staging.generation), tensors(1))
    assert found == fingerprint.of(arenas.view(staging.generation), LAYOUT, SLICE) == arenas.fingerprint(1)


def test_the_committed_generation_stays_while_others_come_and_go(arenas: PublisherArenas) -> None:
    first = staged(arenas, 1)
    arenas.pin(first.generation)
    for seed in (2, 3, 4):  # aborted ones
        other = staged(arenas, seed)
        arenas.lease(other.generation, "sync", 60)
        arenas.release(other.generation, "sync")
        assert_holds(arenas.view(first.generation), tensors(1))
    arenas.pin(staged(arenas, 5).generation)
    staged(arenas, 6)
    with pytest.raises(KeyError):
        arenas.view(first.generation)


def test_both_arenas_leased_names_the_holders(arenas: PublisherArenas) -> None:
    arenas.pin(staged(arenas, 1).generation)
    arenas.lease(staged(arenas, 2).generation, "engine-0", 60)
    with pytest.raises(ArenasBusy, match="committed version, engine-0"):
        arenas.begin()


def test_a_waiting_stage_gets_the_arena_when_a_lease_ends(arenas: PublisherArenas) -> None:
    arenas.pin(staged(arenas, 1).generation)
    second = staged(arenas, 2)
    arenas.lease(second.generation, "engine-0", 60)
    arenas.lease(second.generation, "engine-1", 0.05)  # this one expires by itself
    threading.Timer(0.02, arenas.release, (second.generation, "engine-0")).start()
    assert arenas.begin(20).generation == second.generation + 1


def test_an_expired_lease_beside_a_live_one_does_not_make_the_wait_spin(
    arenas: PublisherArenas, monkeypatch: pytest.MonkeyPatch
) -> None:
    arenas.pin(staged(arenas, 1).generation)
    second = staged(arenas, 2)
    arenas.lease(second.generation, "engine-0", 60)
    arenas.lease(second.generation, "engine-1", 0.0)
    waits, wait = [], arenas._changed.wait

    def counted(seconds: float) -> bool:
        waits.append(seconds)
        return wait(seconds)

    monkeypatch.setattr(arenas._changed, "wait", counted)
    with pytest.raises(ArenasBusy, match=r"committed version, engine-0$"):
        arenas.begin(0.05)
    assert len(waits) < 5


def test_two_stagings_at_once_need_both_arenas(arenas: PublisherArenas) -> None:
    first, second = arenas.begin(), arenas.begin()
    with pytest.raises(ArenasBusy, match="another stage"):
        arenas.begin()
    first.fail("given up")
    assert arenas.begin().generation == second.generation + 1


PACKING = Packing("some plan", (Extra((Gather(0, 12, 40, 24),), 0),), 480)
"""Every other row of the first half of a tensor."""


def test_an_arena_gets_other_memory_when_it_is_packed_for_others(arenas: PublisherArenas, backend: ShmBackend) -> None:
    first = staged(arenas, 1)
    arenas.pin(first.generation)
    source = RemoteSource(backend.open(first.offer()), first.generation)
    second = arenas.begin(packings=[PACKING])
    second.write(tensors(2))
    assert (first.plans, second.plans) == ((), ("some plan",))
    assert_holds(arenas.view(first.generation), tensors(1))
    assert_holds(arenas.view(second.generation), tensors(2))
    arenas.pin(second.generation)
    arenas.begin(packings=[PACKING]).write(tensors(3))
    with pytest.raises(PeerGone):
        follow(backend, [source], backend.allocate(LAYOUT.region_bytes), whole(LAYOUT), deadline_seconds=5)
    regions = [arena.memory.region for arena in arenas._arenas]
    arenas.pin(3)
    arenas.begin(packings=[PACKING]).write(tensors(4))
    assert [arena.memory.region for arena in arenas._arenas] == regions, "the same readers need no other memory"


def test_what_is_packed_has_bounds(backend: ShmBackend) -> None:
    arenas = PublisherArenas(backend, LAYOUT, SLICE, pack_share=0.01)
    with pytest.raises(LayoutError, match="512 bytes are to be packed, there is room for 256"):
        arenas.begin(packings=[PACKING])
    with pytest.raises(LayoutError, match="packs for 16 plans at most, not 17"):
        arenas.begin(packings=[replace(PACKING, plan=f"plan {number}", pack_bytes=0) for number in range(17)])
    region = arenas._arenas[0].memory.region
    assert arenas.begin(packings=[Packing("nothing to pack", ())]).plans == ("nothing to pack",)
    assert arenas._arenas[0].memory.region is region


def test_memory_that_is_not_there_costs_one_version(arenas: PublisherArenas, backend: ShmBackend) -> None:
    allocate = backend.allocate

    def full(length: int, *, for_readers: bool = False) -> LocalRegion:
        backend.allocate = allocate
        raise MemoryError(f"no {length} bytes")

    backend.allocate = full
    with pytest.raises(MemoryError):
        arenas.begin(packings=[PACKING])
    assert arenas.begin(packings=[PACKING]).write(tensors(1)) == arenas.fingerprint(1)


def test_tensors_that_do_not_fit_are_named_and_free_the_arena(arenas: PublisherArenas) -> None:
    weights = tensors(1)
    for wrong, text in (
        ({**weights, "bigger": weights["big"]}, r"unexpected \['bigger'\]"),
        ({"big": weights["big"]}, r"missing \['scalar', 'half', 'last'\]"),
        ({**weights, "big": weights["big"][1:]}, r"big has shape \[999, 3\]; \[1000, 3\]"),
        ({**weights, "big": weights["big"].astype(np.float64)}, "8192 bytes do not fit a place of 4096"),
    ):
        with pytest.raises(LayoutError, match=text):
            arenas.begin().write(wrong)
    assert staged(arenas, 1).generation == 5


def test_an_offer_is_bound_to_its_run_and_generation(arenas: PublisherArenas, backend: ShmBackend) -> None:
    handle = arenas.begin().offer(Scope("run-a"))
    backend.open(handle, Scope("run-a", 1))
    for other in (Scope("run-b"), Scope("run-a", 2)):
        with pytest.raises(WrongHandle):
            backend.open(handle, other)


def local_region(backend: ShmBackend) -> LocalRegion:
    return backend.allocate(LAYOUT.region_bytes)


def pulled(backend: ShmBackend, replica: ReplicaArenas, handle: bytes, generation: int) -> int:
    local = replica.shadow_region(backend)
    source = RemoteSource(backend.open(handle), generation)
    report = follow(backend, [source], local, whole(LAYOUT), deadline_seconds=9)
    replica.swap()
    return report.fingerprint


def test_a_replica_serves_what_it_pulled_until_it_pulls_again(arenas: PublisherArenas, backend: ShmBackend) -> None:
    staging = staged(arenas, 1)
    first, second = (ReplicaArenas(LAYOUT, backend=backend, slice_bytes=SLICE) for _ in range(2))
    source = RemoteSource(backend.open(staging.offer()), staging.generation)
    report = follow(backend, [source], first.shadow_region(backend), whole(LAYOUT), deadline_seconds=9)
    first.swap()
    for given in (report, None):  # with known checksums, and hashed anew
        generation, handle = first.offer(first.live_index, report=given)
        assert pulled(backend, second, handle, generation) == report.fingerprint
        assert_holds(second.view(second.live_index), tensors(1))
    first.swap()
    first.shadow_region(backend)
    with pytest.raises(GenerationGone, match="withdrawn: the replica takes the next version"):
        pulled(backend, second, handle, generation)


def test_a_version_that_is_offered_again_is_another_generation(arenas: PublisherArenas, backend: ShmBackend) -> None:
    staging = staged(arenas, 1)
    first, second = (ReplicaArenas(LAYOUT, backend=backend, slice_bytes=SLICE) for _ in range(2))
    offers = []
    for _ in range(3):  # the third one lies where the first one was
        pulled(backend, first, staging.offer(), staging.generation)
        offers.append(first.offer(first.live_index))
    (generation, handle), *_, (last, _) = offers
    with pytest.raises(GenerationGone, match=f"generation {generation} was overwritten by generation {last}"):
        pulled(backend, second, handle, generation)
    with pytest.raises(KeyError):
        first.lease(generation, "joiner", 60)


def test_a_lease_delays_the_next_pull_into_a_buffer(backend: ShmBackend) -> None:
    replica = ReplicaArenas(LAYOUT, buffers=1, backend=backend, slice_bytes=SLICE)
    assert replica.live_index == replica.shadow_index == 0
    generation, _ = replica.offer(0)
    replica.lease(generation, "joiner", 60)
    released = threading.Event()
    threading.Timer(0.02, lambda: (released.set(), replica.release(generation, "joiner"))).start()
    replica.shadow_region(backend, 20)
    assert released.is_set()
    with pytest.raises(KeyError):
        replica.lease(generation, "joiner", 60)


def test_the_same_version_twice_is_the_same_bits(arenas: PublisherArenas, backend: ShmBackend) -> None:
    staging = staged(arenas, 1)
    replica = ReplicaArenas(LAYOUT, buffers=1, backend=backend, slice_bytes=SLICE)
    once = pulled(backend, replica, staging.offer(), staging.generation)
    bits = bytes(replica.view(0))
    assert pulled(backend, replica, staging.offer(), staging.generation) == once
    assert bytes(replica.view(0)) == bits


def test_closed_arenas_tell_their_readers() -> None:
    """By their header: where the memory itself vanishes, readers lose the owner, which is the backends' to test."""
    backend = LastingShm()
    arenas, replica = PublisherArenas(backend, LAYOUT, SLICE), ReplicaArenas(LAYOUT, backend=backend, slice_bytes=SLICE)
    staging, (generation, handle) = staged(arenas, 1), replica.offer(0)
    remotes = [(backend.open(staging.offer()), staging.generation), (backend.open(handle), generation)]
    arenas.close()
    replica.close()
    for (remote, generation), text in zip(remotes, ("has closed its arenas", "takes the next version"), strict=True):
        with pytest.raises(GenerationGone, match=f"withdrawn: .*{text}"):
            follow(backend, [RemoteSource(remote, generation)], local_region(backend), [], deadline_seconds=9)
    backend.close()
