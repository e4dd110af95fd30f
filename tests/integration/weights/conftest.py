"""Services of these tests are their own: settings of a stack that other tests started are not theirs."""

import os

import pytest


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("REFLUX_") and not name.startswith("REFLUX_TEST_")]:
        monkeypatch.delenv(name)
