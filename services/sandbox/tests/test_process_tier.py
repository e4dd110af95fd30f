"""The weak tier: limits hold, it says that it is weak, and model-written code is refused unless asked for by name."""

from pathlib import Path

import pytest

from reflux_kit.errors import StartupError, WrongState
from reflux_sandbox.code_runner import CodeRunner
from reflux_sandbox.execution import CodeRequest, GradeSession, run_code
from reflux_sandbox.isolation import choose
from reflux_sandbox.isolation.base import IsolationUnavailable
from reflux_sandbox.isolation.process import ProcessIsolation


@pytest.fixture
async def isolation(isolation_options):
    weak = ProcessIsolation(**isolation_options(idle_target=1))
    await weak.start()
    yield weak
    await weak.close()


def code(text, seconds=5.0):
    return CodeRequest(code=text, wall_seconds=seconds, memory_bytes=128 << 20)


async def test_it_says_that_it_is_unsafe_and_offers_only_verifiers_that_accept_that(isolation):
    assert isolation.reasons[0].startswith("UNSAFE")
    assert {info.name for info in isolation.verifiers} == {"test/length", "test/native"}
    assert "verifier test/hang is not offered: it wants prefork or stronger" in isolation.reasons


async def test_model_written_code_never_runs(isolation):
    with pytest.raises(WrongState, match="unsafe for model-written code"):
        await CodeRunner(isolation, 1).run(code("print(1)"))


async def test_verifiers_and_limits_work(isolation):
    async with GradeSession(isolation, "grade", 256 << 20, 60, family="test") as session:
        assert (await session.grade("test/length", "{}", ["abc"]))["grades"][0]["reward"] == 3.0
    assert (await run_code(await isolation.acquire(), code("bytearray(1 << 30)"))).status == "memory"
    assert (await run_code(await isolation.acquire(), code("import socket; socket.socket()"))).status == "nonzero"


async def test_a_timeout_kills_what_left_the_process_group(isolation):
    text = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), os.getcwd(), flush=True)
while True: time.sleep(1)
"""
    result = await run_code(await isolation.acquire(), code(text, 1.0))
    pid, folder = result.stdout.decode().split()
    assert result.status == "timeout"
    assert not Path(f"/proc/{pid}").exists()
    assert not Path(folder).exists()


class Impossible(ProcessIsolation):
    async def start(self):
        raise IsolationUnavailable("unshare is refused")


class Fallback(ProcessIsolation):
    name = "bwrap"


async def test_the_choice_falls_back_with_a_warning_and_the_reason(isolation_options, monkeypatch, caplog):
    monkeypatch.setitem(choose.TIERS, "prefork", Impossible)
    monkeypatch.setitem(choose.TIERS, "bwrap", Fallback)
    async with choose.open_isolation("auto", **isolation_options(idle_target=1)) as (chosen, reasons):
        assert chosen.name == "bwrap"
        assert reasons[0] == "tier prefork is not possible here: unshare is refused"
    assert "unshare is refused" in next(
        record.getMessage() for record in caplog.records if record.levelname == "WARNING"
    )


async def test_the_unsafe_tier_is_never_chosen_without_its_name(isolation_options, monkeypatch, caplog):
    for name in ("prefork", "bwrap", "gvisor"):
        monkeypatch.setitem(choose.TIERS, name, Impossible)
    options = isolation_options(idle_target=1)
    with pytest.raises(StartupError, match="REFLUX_SANDBOX_ISOLATION=process"):
        async with choose.open_isolation("auto", **options):
            pass
    with pytest.raises(StartupError, match="unshare is refused"):
        async with choose.open_isolation("prefork", **options):
            pass
    async with choose.open_isolation("process", **options) as (chosen, _):
        assert chosen.name == "process"
    assert "UNSAFE" in next(record.getMessage() for record in caplog.records if record.levelname == "WARNING")
