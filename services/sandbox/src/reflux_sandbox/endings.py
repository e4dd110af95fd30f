"""Tells causes of death apart: one status per limit, for runs, sessions and verifiers alike. Pure."""

from typing import Literal

from reflux_sandbox.isolation.handle import Ending
from reflux_sandbox.isolation.limits_hit import DISK_SIGNAL, MEMORY_SIGNAL, PIDS_SIGNAL

Status = Literal[
    "ok", "nonzero", "signal", "timeout", "cpu", "memory", "pids", "disk", "output", "policy", "infra_error"
]

_SIGKILL, _SIGXCPU, _SIGXFSZ, _SIGSYS = 9, 24, 25, 31
_BY_SIGNAL: dict[int, Status] = {
    MEMORY_SIGNAL: "memory",
    PIDS_SIGNAL: "pids",
    DISK_SIGNAL: "disk",
    _SIGXCPU: "cpu",
    _SIGXFSZ: "disk",
    _SIGSYS: "policy",
}


def cause(ending: Ending, *, timed_out: bool, cpu_limit_seconds: int) -> Status:
    """Status of a child that ended. `timed_out`: we killed it at its deadline.

    A SIGKILL that nobody of ours sent is the kernel's: for memory when its group counts one more, for processor time
    when the limit is used up (code may ignore the SIGXCPU that comes a second earlier).
    """
    code = ending.exit_code
    if ending.flooded:
        return "output"
    if timed_out:
        return "timeout"
    if ending.memory_kills and code != 0:
        return "memory"
    if code is None:  # gVisor gives up as a whole when its group refuses it a process
        return "pids" if ending.process_refusals else "infra_error"
    if code == -_SIGKILL and ending.cpu_seconds >= cpu_limit_seconds:
        return "cpu"
    if code < 0:
        return _BY_SIGNAL.get(-code, "signal")
    return "ok" if code == 0 else "nonzero"


_WORDS: dict[Status, str] = {
    "cpu": "used up its processor time",
    "memory": "was killed for memory",
    "pids": "hit its limit of processes",
    "disk": "filled its disk",
    "output": "wrote without end",
    "policy": "made a forbidden system call",
}


def describe(who: str, ending: Ending, cpu_limit_seconds: int, text: str = "") -> str:
    """One sentence on how `who` ended, with what it said last."""
    status = cause(ending, timed_out=False, cpu_limit_seconds=cpu_limit_seconds)
    how = "was killed" if ending.exit_code is None else f"ended with {ending.exit_code}"
    sentence = f"{who} {_WORDS.get(status, how)}"
    return f"{sentence}: {text}" if text else sentence
