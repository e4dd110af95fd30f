"""What a child of the prefork tier is like from inside; `test_attacks.py` has what it withstands."""

import os
import time
from pathlib import Path

import pytest
import pytest_asyncio

from reflux_sandbox.execution import CodeRequest, run_code
from reflux_sandbox.isolation.prefork import PreforkIsolation

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def prefork(namespaces, isolation_options):
    isolation = PreforkIsolation(**isolation_options(warm_modules=("numpy", "numpy.random")))
    await isolation.start()
    yield isolation
    await isolation.close()


async def run(prefork, code, seconds=5.0, memory_bytes=256 << 20):
    request = CodeRequest(code=code, wall_seconds=seconds, memory_bytes=memory_bytes)
    return await run_code(await prefork.acquire(), request)


async def test_writes_to_private_folders_stay_private(prefork):
    name = f"reflux-probe-{os.getpid()}"
    folders = ("/dev/shm", "/tmp", "/box")
    result = await run(
        prefork, f"for f in {folders!r}: open(f + '/{name}', 'w').write('x'); print(open(f + '/{name}').read())"
    )
    assert (result.status, result.stdout) == ("ok", b"x\nx\nx\n")
    assert not any(Path(folder, name).exists() for folder in folders)
    again = await run(prefork, "import os; print([os.listdir(f) for f in ('/dev/shm', '/box')], os.listdir('/tmp'))")
    assert again.stdout.startswith(b"[[], []]")
    assert name.encode() not in again.stdout, "/tmp shows at most this Python's own folder, when it lives there"


async def test_only_the_own_processes_are_visible(prefork):
    result = await run(prefork, "import os; print(os.getpid(), [d for d in os.listdir('/proc') if d.isdigit()])")
    assert result.stdout == b"2 ['2']\n"


async def test_no_secret_of_the_service_is_inherited(namespaces, isolation_options, monkeypatch):
    monkeypatch.setenv("REFLUX_STACK_SECRET", "do-not-leak")
    isolation = PreforkIsolation(**isolation_options(idle_target=1, most_children=2))
    await isolation.start()
    try:
        result = await run(isolation, "import os; print(sorted(os.environ))")
    finally:
        await isolation.close()
    assert b"REFLUX" not in result.stdout
    assert b"HOME" in result.stdout


async def test_there_is_no_network_device_but_a_dead_loopback(prefork):
    result = await run(
        prefork, "import os; print(open('/proc/self/net/dev').read() if os.path.exists('/proc/self/net/dev') else 'lo')"
    )
    assert b"eth" not in result.stdout


async def test_two_children_have_different_users(prefork):
    if os.geteuid() != 0:
        pytest.skip("needs root: without it each child has a user namespace instead")
    first, second = [await run(prefork, "import os; print(os.getresuid())") for _ in range(2)]
    assert b"(0," not in first.stdout + second.stdout


async def test_many_small_processes_cannot_add_up_to_more_memory(prefork):
    if not any("cgroup limits" in reason for reason in prefork.reasons):
        pytest.skip("needs writable cgroups with the memory controller")
    code = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        block = bytearray(b"x") * (128 << 20)  # one buffer: a copy on the way would meet the limit of the process
        time.sleep(1)
        os._exit(0)
for _ in range(8):
    assert os.wait()[1] == 0
"""
    result = await run(prefork, code)
    assert result.status == "memory", result


async def test_a_daemonised_grandchild_neither_delays_nor_survives(prefork):
    code = """
import os, time
print('before', flush=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
os.wait()
"""
    start = time.monotonic()
    result = await run(prefork, code, seconds=30)
    assert (result.status, result.stdout) == ("ok", b"before\n")
    assert time.monotonic() - start < 15


async def test_a_busy_loop_in_c_dies_at_the_deadline(prefork):
    result = await run(prefork, "sum(range(10**12))", seconds=0.3)
    assert result.status == "timeout"
    assert result.wall_seconds < 10
    assert result.cpu_seconds > 0


async def test_exit_codes_and_signals_are_told_apart(prefork):
    assert (await run(prefork, "raise SystemExit(64)")).exit_code == 64
    assert (await run(prefork, "import sys; sys.exit('a message')")).stderr == b"a message\n"
    aborted = await run(prefork, "import os; os.abort()")
    assert (aborted.status, aborted.exit_code) == ("signal", -6)
    terminated = await run(prefork, "import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert (terminated.status, terminated.exit_code) == ("signal", -15)
    failed = await run(prefork, "1/0")
    assert failed.stderr.startswith(b"Traceback")
    assert b'File "main.py", line 1' in failed.stderr
    assert b"worker.py" not in failed.stderr


async def test_ordinary_programs_run(prefork):
    code = """
import asyncio, json, numpy, threading, tempfile
async def main():
    await asyncio.sleep(0.01)
    return 41
numbers = []
worker = threading.Thread(target=lambda: numbers.append(1))
worker.start()
with tempfile.TemporaryFile() as file:
    file.write(b'x')
print(json.dumps(asyncio.run(main()) + int(numpy.ones(1).sum())))
"""
    result = await run(prefork, code)
    assert (result.status, result.stdout) == ("ok", b"42\n"), result.stderr


async def test_children_do_not_share_random_state(prefork):
    code = "import random, numpy; print(random.random(), numpy.random.random())"
    first, second = [(await run(prefork, code)).stdout.split() for _ in range(2)]
    assert first[0] != second[0]
    assert first[1] != second[1]
