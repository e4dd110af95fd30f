import threading
import time

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
    with pool.borrowed(soon()), pool.borrowed(soon()):
        closers = [threading.Thread(target=pool.close, daemon=True) for _ in range(2)]
        for closer in closers:
            closer.start()
    for closer in closers:
        closer.join(30)
        assert not closer.is_alive()
    assert [each.closed for each in opened] == [True, True]
