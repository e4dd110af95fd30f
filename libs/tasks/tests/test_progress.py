import pytest

from reflux_tasks import progress


def test_each_item_tells_how_many_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[float] = []
    monkeypatch.setattr(progress, "listener", heard.append)
    assert list(progress.tracked("abcd")) == ["a", "b", "c", "d"]
    assert heard == [0.0, 0.25, 0.5, 0.75]


def test_without_a_listener_nothing_happens() -> None:
    progress.report(0.5)
    assert list(progress.tracked([])) == []
