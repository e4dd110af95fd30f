import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from reflux_transfer.backends.connections import ConnectionPool
from reflux_transfer.errors import PeerGone, ReadDeadlineExceeded, RegionClosed


class Fake:
    def __init__(self, opened: list["Fake"]) -> None:
        self.usable, self.closed = True, False
        opened.append(self)

    def close(self) -> None:
        self.closed = True


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def test_no_more_connections_than_the_limit_and_free_ones_are_used_again() -> None:
    opened: list[Fake] = []
    pool = ConnectionPool(lambda _end: Fake(opened), 2)
    with pool.borrowed(soon()) as first, pool.borrowed(soon()) as second:
        assert first is not second
        with pytest.raises(ReadDeadlineExceeded, match="busy"), pool.borrowed(soon(0.01)):
            pass
    with pool.borrowed(soon()) as third:
        assert third in (first, second)
    assert len(opened) == 2
    pool.close()
    assert all(each.closed for each in opened)


def test_an_unusable_connection_is_closed_and_makes_room() -> None:
    opened: list[Fake] = []
    pool = ConnectionPool(lambda _end: Fake(opened), 1)
    with pool.borrowed(soon()) as first:
        first.usable = False
    assert first.closed
    with pool.borrowed(soon()) as second:
        assert second is not first
    pool.close()


def test_the_hold_ends_after_the_connection_that_may_still_write() -> None:
    opened: list[Fake] = []
    pool, ends = ConnectionPool(lambda _end: Fake(opened), 1), []

    @contextmanager
    def hold() -> Iterator[None]:
        yield
        ends.append(opened[0].closed)

    with pool.borrowed(soon(), hold()) as first:
        first.usable = False
    assert ends == [True]
    pool.close()


def test_a_hold_that_is_refused_gives_the_connection_back() -> None:
    opened: list[Fake] = []
    pool = ConnectionPool(lambda _end: Fake(opened), 1)

    @contextmanager
    def refuse() -> Iterator[None]:
        raise RegionClosed("unregistered")
        yield

    for _ in range(2):
        with pytest.raises(RegionClosed, match="unregistered"), pool.borrowed(soon(), refuse()):
            pass
    pool.close()
    assert [each.closed for each in opened] == [True]


def test_a_connection_that_fails_makes_room() -> None:
    def refuse(_end: float) -> Fake:
        raise PeerGone("nobody there")

    pool = ConnectionPool(refuse, 1)
    for _ in range(2):
        with pytest.raises(PeerGone), pool.borrowed(soon()):
            pass
    pool.close()


def test_closing_waits_for_reads_and_refuses_new_ones() -> None:
    opened: list[Fake] = []
    pool = ConnectionPool(lambda _end: Fake(opened), 1)
    waiting: list[type[Exception]] = []

    def wait_in_vain() -> None:
        try:
            with pool.borrowed(soon()):
                pass
        except RegionClosed as error:
            waiting.append(type(error))

    closer, waiter = threading.Thread(target=pool.close), threading.Thread(target=wait_in_vain)
    with pool.borrowed(soon()) as only:
        waiter.start()
        closer.start()
        waiter.join(30)
        assert waiting == [RegionClosed]
        assert closer.is_alive()
        assert not only.closed
    closer.join(30)
    assert only.closed
    with pytest.raises(RegionClosed), pool.borrowed(soon()):
        pass


def test_two_threads_may_close() -> None:
    opened: list[Fake] = []
    pool = ConnectionPool(lambda _end: Fake(opened), 2)
    second = threading.Thread(target=pool.close, daemon=True)

    def close_slowly() -> None:
        second.start()
        second.join(0.2)  # time to come into the middle of the first one

    with pool.borrowed(soon()), pool.borrowed(soon()):
        pass
    opened[0].close = close_slowly  # the first one to go
    pool.close()
    second.join(10)
    assert not second.is_alive()
    assert opened[1].closed
