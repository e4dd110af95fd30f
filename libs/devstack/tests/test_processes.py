import asyncio
import os
import signal
import sys

import psutil
import pytest
import redis.asyncio

from reflux_devstack.layout import choose_layout, valkey_spec
from reflux_devstack.processes import ProcessSpec, StackError, Supervised

HANG_SECONDS = 30


async def ready_at_once():
    return


async def never_ready():
    await asyncio.Event().wait()


def supervised(tmp_path, code, ready=ready_at_once, **limits):
    restarted = asyncio.Event()
    argv = (sys.executable, "-c", code)
    spec = ProcessSpec(name="child", argv=argv, environment=os.environ, ready=ready, **limits)
    return Supervised(spec, tmp_path / "child.log", restarted.set), restarted


async def test_a_killed_process_is_started_again(tmp_path):
    child, restarted = supervised(tmp_path, "import time; time.sleep(600)")
    await child.start()
    first = child.process.pid
    watching = asyncio.create_task(child.watch())
    os.kill(first, signal.SIGKILL)
    await asyncio.wait_for(restarted.wait(), HANG_SECONDS)
    assert child.process.pid != first
    assert child.restarts == 1
    await child.stop(5)
    await asyncio.wait_for(watching, HANG_SECONDS)


async def test_a_process_that_keeps_ending_ends_the_stack_with_its_last_words(tmp_path):
    child, _ = supervised(tmp_path, "print('no space left'); raise SystemExit(7)", max_restarts=2)
    await child._spawn()
    with pytest.raises(StackError, match="no space left"):
        await asyncio.wait_for(child.watch(), HANG_SECONDS)


async def test_a_process_that_ends_at_start_is_an_error_with_its_last_words(tmp_path):
    child, _ = supervised(tmp_path, "import sys; sys.exit('the port is in use')", ready=never_ready)
    with pytest.raises(StackError, match="the port is in use"):
        await asyncio.wait_for(child.start(), HANG_SECONDS)


async def test_stop_kills_the_whole_group_of_a_process_that_ignores_sigterm(tmp_path):
    code = (
        "import signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid, flush=True)\n"
        "time.sleep(600)"
    )
    child, _ = supervised(tmp_path, code)
    await child.start()
    for _ in range(500):
        if (tmp_path / "child.log").read_text().strip():
            break
        await asyncio.sleep(0.02)
    grandchild = psutil.Process(int((tmp_path / "child.log").read_text()))
    await child.stop(0.2)
    psutil.wait_procs([grandchild], timeout=HANG_SECONDS)
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE


async def test_valkey_keeps_every_answered_write_over_kill_9(tmp_path):
    layout = choose_layout(tmp_path, {})
    valkey = Supervised(valkey_spec(layout), tmp_path / "valkey.log", lambda: None)
    await valkey.start()
    async with redis.asyncio.from_url(layout.redis_url) as client:
        for number in range(200):
            await client.xadd("stream", {"n": number})
    watching = asyncio.create_task(valkey.watch())
    os.kill(valkey.process.pid, signal.SIGKILL)
    await valkey.process.wait()
    await asyncio.sleep(0)
    while valkey.restarts == 0:
        await asyncio.sleep(0.02)
    await asyncio.wait_for(valkey.spec.ready(), HANG_SECONDS)
    async with redis.asyncio.from_url(layout.redis_url) as client:
        assert await client.xlen("stream") == 200
    await valkey.stop(5)
    await asyncio.wait_for(watching, HANG_SECONDS)
