"""Stateful sessions over a real server and real children: state, time, caps, files, deaths."""

import asyncio
import os
import signal
import time
import uuid
from itertools import pairwise
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from reflux.sandbox.v1 import session_service_pb2 as pb
from reflux.sandbox.v1.session_service_pb2_grpc import SandboxSessionServiceStub
from reflux_kit.channel import open_channel
from reflux_kit.errors import CapacityExhausted, NotFound, WrongState, metadata_of
from reflux_kit.server import Service, running
from reflux_sandbox.isolation.base import Tier
from reflux_sandbox.isolation.prefork import PreforkIsolation
from reflux_sandbox.sessions import session as session_module
from reflux_sandbox.sessions.caps import SessionCaps
from reflux_sandbox.sessions.mount import open_sessions
from reflux_sandbox.sessions.registry import Sessions
from reflux_sandbox.sessions.session import SessionLimits
from reflux_sandbox.settings import SandboxSettings

pytestmark = pytest.mark.asyncio(loop_scope="module")
STATUS = pb.ExecSessionResponse.Status


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def isolation(namespaces, isolation_options):
    started = PreforkIsolation(**isolation_options(graders="", most_children=12))
    await started.start()
    yield started
    await started.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stub(isolation):
    settings = SandboxSettings(listen="127.0.0.1:0", drain_seconds=0, most_sessions=6, most_sessions_per_run=2)
    async with (
        open_sessions(settings, isolation) as mount,
        running(Service((mount,)), settings) as bound,
        open_channel(bound.grpc) as channel,
    ):
        yield SandboxSessionServiceStub(channel)


async def create(stub, run="", **changes):
    request = {"request_id": str(uuid.uuid4()), "run": run or f"run-{uuid.uuid4().hex[:8]}"} | changes
    return (await stub.CreateSession(pb.CreateSessionRequest(**request))).session


@pytest_asyncio.fixture(loop_scope="module")
async def name(stub):
    session = await create(stub)
    yield session.name
    await stub.CloseSession(pb.CloseSessionRequest(name=session.name))


async def run(stub, name, code, seconds=20.0):
    return await stub.ExecSession(pb.ExecSessionRequest(name=name, code=code, timeout_seconds=seconds))


async def write(stub, name, path, data=b"x", append=False):
    return await stub.WriteSessionFile(pb.WriteSessionFileRequest(name=name, path=path, data=data, append=append))


async def read(stub, name, path, **options):
    return await stub.ReadSessionFile(pb.ReadSessionFileRequest(name=name, path=path, **options))


async def refusal(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def until(condition, what):
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"not within 20 s: {what}")


async def test_names_files_and_modules_stay_from_call_to_call(stub, name):
    assert (await run(stub, name, "import math; x = 20")).status == STATUS.STATUS_OK
    result = await run(stub, name, "def twice(n): return 2 * n\nx = twice(x)\nx + 1")
    assert (result.status, result.stdout) == (STATUS.STATUS_OK, b"41\n")
    await run(stub, name, "open('note.txt', 'w').write('from the code')")
    assert (await read(stub, name, "note.txt")).data == b"from the code"
    await write(stub, name, "data/in.txt", b"1 2 3")
    assert (await write(stub, name, "data/in.txt", b" 4", append=True)).size_bytes == 7
    assert (await run(stub, name, "print(sum(map(int, open('data/in.txt').read().split())))")).stdout == b"10\n"
    part = await read(stub, name, "data/in.txt", offset_bytes=2, most_bytes=3)
    assert (part.data, part.size_bytes) == (b"2 3", 7)
    assert (await stub.GetSession(pb.GetSessionRequest(name=name))).session.execs == 4


async def test_output_belongs_to_its_call(stub, name):
    loud = await run(stub, name, "print('x' * (2 << 20)); print('end')")
    assert (loud.status, loud.output_truncated, len(loud.stdout)) == (STATUS.STATUS_OK, True, 1 << 20)
    quiet = await run(stub, name, "import sys; print('err', file=sys.stderr)")
    assert (quiet.stdout, quiet.stderr, quiet.output_truncated) == (b"", b"err\n", False)


async def test_an_exception_or_exit_leaves_the_session_alive(stub, name):
    await run(stub, name, "x = 1")
    failed = await run(stub, name, "def f():\n    return 1 / 0\nf()")
    assert failed.status == STATUS.STATUS_EXCEPTION
    assert failed.stderr.startswith(b'Traceback (most recent call last):\n  File "call-2.py", line 3')
    assert b"return 1 / 0" in failed.stderr
    assert (await run(stub, name, "raise SystemExit(3)")).status == STATUS.STATUS_EXCEPTION
    assert (await run(stub, name, "this is no python")).status == STATUS.STATUS_EXCEPTION
    assert (await run(stub, name, "bytearray(1 << 40)")).status == STATUS.STATUS_MEMORY
    assert (await run(stub, name, "open('f', 'wb').write(bytes(9 << 20))")).status == STATUS.STATUS_DISK
    assert (await run(stub, name, "x")).stdout == b"1\n"


async def test_a_call_that_reacts_to_its_interrupt_costs_only_itself(stub, name, monkeypatch):
    monkeypatch.setattr(session_module, "_GRACE_SECONDS", 30.0)
    await run(stub, name, "x = 7")
    late = await run(stub, name, "while True: pass", seconds=0.1)
    assert (late.status, late.ended) == (STATUS.STATUS_TIMEOUT, False)
    assert (await run(stub, name, "x")).stdout == b"7\n"


async def test_a_call_that_holds_the_interpreter_ends_the_session(stub, monkeypatch):
    monkeypatch.setattr(session_module, "_GRACE_SECONDS", 0.2)
    session = await create(stub)
    late = await run(stub, session.name, "sum(range(10**12))", seconds=0.1)
    assert (late.status, late.ended) == (STATUS.STATUS_TIMEOUT, True)
    error = await refusal(run(stub, session.name, "1"))
    assert (error.code(), metadata_of(error)["cause"]) == (grpc.StatusCode.NOT_FOUND, late.ended_cause)


DEATHS = {
    "os._exit": ("import os; os._exit(0)", "EXITED"),
    "a signal": ("import os; os.abort()", "SIGNAL"),
    "a forbidden call": ("import os, ctypes; ctypes.CDLL(None).unshare(0x10000000)", "POLICY"),
    "a closed channel": ("import os; os.closerange(3, 64)", "EXITED"),
    "an answer of its own": ("import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'\\x02\\0\\0\\0{}')\n"
                             "    except OSError: pass", "INFRA_ERROR"),
    "output without end": ("import os\nwhile True: os.write(1, b'x' * 65536)", "OUTPUT"),
}  # fmt: skip


@pytest.mark.parametrize("how", DEATHS)
async def test_a_session_that_dies_says_how(stub, how):
    code, status = DEATHS[how]
    session = await create(stub)
    result = await run(stub, session.name, code, seconds=60)
    assert (STATUS.Name(result.status), result.ended) == (f"STATUS_{status}", True), result
    assert (await refusal(read(stub, session.name, "x"))).code() is grpc.StatusCode.NOT_FOUND


async def test_an_answer_that_code_made_up_for_a_file_ends_the_session(stub):
    session = await create(stub)
    await run(
        stub,
        session.name,
        """
import base64
base64.b64encode = lambda data: b'no base64!'
open('x', 'w').write('x')
""",
    )
    error = await refusal(read(stub, session.name, "x"))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert metadata_of(error)["cause"].startswith("broken")


async def test_a_fork_that_comes_back_is_not_the_session(stub, name):
    result = await run(stub, name, "import os\npid = os.fork()\nif pid: os.wait()")
    assert result.status == STATUS.STATUS_OK
    assert (await run(stub, name, "pid > 0")).stdout == b"True\n"


PATHS = [
    "../../etc/passwd",
    "/etc/passwd",
    "a/../../x",
    "",
    "a\0b",
    "x" * 600,
    "link",
    "link/shadow",
    "up/x",
    "pipe",
    ".",
]


@pytest.mark.parametrize("path", PATHS)
async def test_no_path_leads_out_of_the_work_folder(stub, name, path):
    await run(
        stub,
        name,
        "import os; os.symlink('/etc', 'link'); os.symlink('..', 'up'); os.mkfifo('pipe'); open('/tmp/x', 'w').close()",
    )
    for call in (read(stub, name, path), write(stub, name, path)):
        assert (await refusal(call)).code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_files_have_a_quota_and_the_missing_are_not_found(stub, name):
    assert (await refusal(read(stub, name, "missing"))).code() is grpc.StatusCode.NOT_FOUND
    for number in range(3):
        await write(stub, name, f"big-{number}", bytes(2 << 20))
    full = await refusal(write(stub, name, "one-more", bytes(3 << 20)))
    assert full.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    many = await run(stub, name, "for i in range(10**5): open(f'{i}', 'w').close()")
    assert many.status == STATUS.STATUS_DISK
    assert (await refusal(write(stub, name, "x", bytes(4 << 20)))).code() in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    )


async def test_sessions_are_apart_from_each_other_and_have_no_network_or_programs(stub, name):
    other = await create(stub)
    await write(stub, other.name, "secret", b"s")
    seen = await run(stub, name, "import os; print(os.listdir('.'), [d for d in os.listdir('/proc') if d.isdigit()])")
    assert seen.stdout == b"[] ['2']\n"
    assert (await run(stub, name, "import socket; socket.socket()")).status == STATUS.STATUS_EXCEPTION
    assert (await run(stub, name, "import os; os.execv('/usr/bin/id', ['id'])")).status == STATUS.STATUS_EXCEPTION
    await stub.CloseSession(pb.CloseSessionRequest(name=other.name))


async def test_a_repeated_request_gets_the_same_session_and_closing_twice_is_fine(stub):
    request = pb.CreateSessionRequest(request_id=str(uuid.uuid4()), run="again")
    first, second = await asyncio.gather(stub.CreateSession(request), stub.CreateSession(request))
    assert first.session.name == second.session.name
    for _ in range(2):
        await stub.CloseSession(pb.CloseSessionRequest(name=first.session.name))
    error = await refusal(stub.GetSession(pb.GetSessionRequest(name=first.session.name)))
    assert (error.code(), metadata_of(error)["cause"]) == (grpc.StatusCode.NOT_FOUND, "closed")
    never = pb.CloseSessionRequest(name="sessions/" + "0" * 32)
    assert (await refusal(stub.CloseSession(never))).code() is grpc.StatusCode.NOT_FOUND


async def test_caps_hold_per_run_and_a_closed_session_makes_room(stub):
    sessions = [await create(stub, "greedy") for _ in range(2)]
    error = await refusal(create(stub, "greedy"))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await stub.CloseSession(pb.CloseSessionRequest(name=sessions[0].name))
    third = await create(stub, "greedy")
    for session in (sessions[1], third):
        await stub.CloseSession(pb.CloseSessionRequest(name=session.name))


@pytest.mark.parametrize(
    "changes",
    [
        {"request_id": "x"},
        {"run": "a b"},
        {"idle_seconds": -1.0},
        {"ttl_seconds": float("nan")},
        {"ttl_seconds": 1e9},
        {"memory_bytes": 1},
    ],
)
async def test_a_bad_creation_is_refused(stub, changes):
    request = pb.CreateSessionRequest(**({"request_id": str(uuid.uuid4()), "run": "r"} | changes))
    assert (await refusal(stub.CreateSession(request))).code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_calls_of_one_session_run_one_after_the_other(stub, name):
    code = "import time\nmark = time.monotonic()\ntime.sleep(0.02)\nprint(mark, time.monotonic())"
    results = await asyncio.gather(*(run(stub, name, code) for _ in range(4)))
    spans = sorted(tuple(map(float, result.stdout.split())) for result in results)
    assert all(earlier[1] <= later[0] for earlier, later in pairwise(spans))


async def test_a_caller_that_goes_away_does_not_break_the_session(stub, name):
    call = stub.ExecSession(pb.ExecSessionRequest(name=name, code="import time; time.sleep(0.2); y = 5"))
    while (await stub.GetSession(pb.GetSessionRequest(name=name))).session.execs == 0:
        await asyncio.sleep(0.01)
    call.cancel()
    assert (await run(stub, name, "y")).stdout == b"5\n"


def limits(**changes):
    return SessionLimits(**({"idle_seconds": 60.0, "ttl_seconds": 60.0, "memory_bytes": 128 << 20} | changes))


class SlowIsolation:
    """Hands a child out only after the session's whole life would have been over, had it counted from the request."""

    tier, name = Tier.PREFORK, "prefork"

    def __init__(self, isolation, seconds):
        self._isolation, self._seconds = isolation, seconds

    async def acquire(self, family=""):
        await asyncio.sleep(self._seconds)
        return await self._isolation.acquire(family)


async def test_time_counts_from_ready_and_the_end_is_told(isolation):
    async with Sessions(SlowIsolation(isolation, 0.6), SessionCaps(most=4, most_per_run=4)) as sessions:
        asked_at = time.monotonic()
        session = await sessions.create("1", "r", limits(ttl_seconds=0.5))
        assert time.monotonic() - asked_at - session.age_seconds >= 0.6
        await until(lambda: _gone(sessions, session.name), "the end of its life")
        with pytest.raises(NotFound, match=r"ttl: it lived its 0\.5 s"):
            sessions.get(session.name)
        idle = await sessions.create("2", "r", limits(idle_seconds=0.2))
        await until(lambda: _gone(sessions, idle.name), "the end of its patience")
        with pytest.raises(NotFound, match=r"idle: no call for 0\.2 s"):
            await idle.exec("1", 1.0)


async def test_a_call_under_way_is_not_idle(isolation):
    async with Sessions(isolation, SessionCaps(most=4, most_per_run=4)) as sessions:
        session = await sessions.create("1", "r", limits(idle_seconds=60.0))
        call = asyncio.create_task(session.exec("import time; time.sleep(0.2); print('done')", 20.0))
        await until(lambda: session.execs == 1, "the call")
        assert session.idle_left_seconds == 60.0
        assert (await call).stdout == b"done\n"
        assert session.idle_left_seconds < 60.0


def _gone(sessions, name):
    try:
        sessions.get(name)
    except NotFound:
        return True
    return False


async def test_a_weak_tier_has_no_sessions(isolation):
    weak = SlowIsolation(isolation, 0)
    weak.tier, weak.name = Tier.PROCESS, "process"
    async with Sessions(weak, SessionCaps(most=4, most_per_run=4)) as sessions:
        with pytest.raises(WrongState, match="unsafe for model-written code"):
            await sessions.create("1", "r", limits())


async def test_all_sessions_end_with_the_service_and_free_their_children(isolation):
    before = isolation.busy_children
    async with Sessions(isolation, SessionCaps(most=2, most_per_run=2)) as sessions:
        made = [await sessions.create(str(number), "r", limits()) for number in range(2)]
        with pytest.raises(CapacityExhausted):
            await sessions.create("3", "other", limits())
        assert all([(await session.exec("print(1)", 20.0)).status == "ok" for session in made])
        assert isolation.busy_children >= before + 2
    await until(lambda: isolation.busy_children <= before, "no busy child of theirs")


async def test_a_child_that_is_killed_between_calls_ends_its_session_at_once(isolation):
    async with Sessions(isolation, SessionCaps(most=2, most_per_run=2)) as sessions:
        session = await sessions.create("1", "r", limits())
        assert (await session.exec("print(1)", 20.0)).status == "ok"
        _kill_busy_child(isolation)
        await until(lambda: _gone(sessions, session.name), "the session's end")
        with pytest.raises(NotFound, match="died"):
            sessions.get(session.name)


def _kill_busy_child(isolation):
    """Ends every child of the code template, the session's too."""
    launcher = isolation.warm_parent_pid()
    warm = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()[0]
    for child in Path(f"/proc/{warm}/task/{warm}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)
