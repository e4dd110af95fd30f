"""Causes of death, told apart: by rule, and for processor time by a child that uses it up."""

import signal
from typing import get_args

import pytest

from reflux.sandbox.v1 import sandbox_service_pb2 as pb
from reflux.sandbox.v1 import session_service_pb2 as session_pb
from reflux_sandbox.endings import Status, cause, describe
from reflux_sandbox.execution import CodeRequest, run_code
from reflux_sandbox.isolation.handle import Ending
from reflux_sandbox.isolation.limits_hit import DISK_SIGNAL, MEMORY_SIGNAL, PIDS_SIGNAL
from reflux_sandbox.isolation.prefork import PreforkIsolation
from reflux_sandbox.sessions.session import ExecStatus

CASES = {
    "ok": {"exit_code": 0},
    "nonzero": {"exit_code": 3},
    "signal": {"exit_code": -signal.SIGABRT},
    "memory": {"exit_code": -MEMORY_SIGNAL},
    "pids": {"exit_code": -PIDS_SIGNAL},
    "disk": {"exit_code": -DISK_SIGNAL},
    "cpu": {"exit_code": -signal.SIGXCPU},
    "policy": {"exit_code": -signal.SIGSYS},
    "output": {"exit_code": None, "flooded": True},
    "infra_error": {"exit_code": None},
}


def ending(**changes):
    return Ending(**({"exit_code": 0, "cpu_seconds": 0.1, "max_rss_bytes": 0, "memory_kills": 0} | changes))


@pytest.mark.parametrize("status", CASES)
def test_each_end_has_one_cause(status):
    assert cause(ending(**CASES[status]), timed_out=False, cpu_limit_seconds=10) == status


def test_a_kill_is_the_kernels_when_a_limit_is_used_up():
    assert cause(ending(exit_code=-9), timed_out=False, cpu_limit_seconds=10) == "signal"
    assert cause(ending(exit_code=-9, cpu_seconds=10.9), timed_out=False, cpu_limit_seconds=10) == "cpu"
    assert cause(ending(exit_code=-9, memory_kills=1), timed_out=False, cpu_limit_seconds=10) == "memory"
    assert cause(ending(exit_code=0, memory_kills=1), timed_out=False, cpu_limit_seconds=10) == "ok"
    assert cause(ending(exit_code=None, process_refusals=3), timed_out=False, cpu_limit_seconds=10) == "pids"
    assert cause(ending(exit_code=-signal.SIGXFSZ), timed_out=False, cpu_limit_seconds=10) == "disk"


def test_our_own_kills_come_first():
    assert cause(ending(exit_code=None), timed_out=True, cpu_limit_seconds=10) == "timeout"
    assert cause(ending(exit_code=None, flooded=True), timed_out=True, cpu_limit_seconds=10) == "output"


def test_every_status_has_its_value_in_the_protos():
    codes = {name.removeprefix("STATUS_").lower() for name in pb.RunCodeResponse.Status.DESCRIPTOR.values_by_name}
    assert codes == {"unspecified", *get_args(Status)}
    execs = {
        name.removeprefix("STATUS_").lower() for name in session_pb.ExecSessionResponse.Status.DESCRIPTOR.values_by_name
    }
    assert execs == {"unspecified", *get_args(ExecStatus)}


def test_a_sentence_says_the_cause_and_the_last_words():
    assert describe("the verifier", ending(exit_code=-6), 10, "abort") == "the verifier ended with -6: abort"
    assert describe("the verifier", ending(exit_code=-signal.SIGSYS), 10).endswith("made a forbidden system call")
    assert describe("the verifier", ending(exit_code=None), 10) == "the verifier was killed"


IGNORING = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"


@pytest.mark.parametrize("first", ["", pytest.param(IGNORING, marks=pytest.mark.slow)])
async def test_processor_time_has_a_limit_of_its_own(namespaces, isolation_options, first):
    isolation = PreforkIsolation(**isolation_options(graders="", idle_target=1, most_children=2))
    await isolation.start()
    try:
        request = CodeRequest(code=f"{first}while True: pass", wall_seconds=120, memory_bytes=128 << 20, cpu_seconds=1)
        result = await run_code(await isolation.acquire(), request)
    finally:
        await isolation.close()
    assert result.status == "cpu"
    assert result.cpu_seconds >= 0.9
