"""The filters, run by a small interpreter of BPF: what is allowed does not depend on this machine."""

import errno
import struct

import pytest

from reflux_sandbox.isolation import kernel, seccomp, syscalls

DANGEROUS = """
mount umount2 pivot_root chroot unshare setns ptrace process_vm_readv process_vm_writev keyctl add_key request_key bpf
perf_event_open io_uring_setup io_uring_enter userfaultfd init_module finit_module kexec_load open_by_handle_at
name_to_handle_at personality socket connect bind listen accept accept4 setuid setgid setresuid setgroups pidfd_getfd
vmsplice reboot swapon quotactl kcmp fanotify_init mount_setattr move_mount fsopen open_tree
"""
ALLOW, KILL = 0x7FFF0000, 0x80000000


def verdict(program, machine, number, arguments=()):
    """Runs a filter on one system call; `arguments` are 64-bit values."""
    values = list(arguments) + [0] * (6 - len(arguments))
    record = struct.pack("<iIQ6Q", number, syscalls.ARCHITECTURES[machine], 0, *values)
    accumulator, position = 0, 0
    while True:
        code, when_true, when_false, value = struct.unpack_from("<HBBI", program, position * 8)
        position += 1
        if code == 0x20:
            accumulator = struct.unpack_from("<I", record, value)[0]
        elif code == 0x06:
            return value
        else:
            holds = {0x15: accumulator == value, 0x25: accumulator > value, 0x35: accumulator >= value}
            taken = bool(accumulator & value) if code == 0x45 else holds[code]
            position += when_true if taken else when_false


def refused(code):
    return 0x00050000 | code


@pytest.mark.parametrize("machine", syscalls.ARCHITECTURES)
def test_the_list_allows_exactly_its_names(machine):
    program = seccomp.allow_list(machine)
    plain = set(syscalls.plain(machine).values())
    killed = set(syscalls.killed(machine).values())
    special = set(syscalls.special(machine).values())
    assert not plain & killed
    for number in set(range(500)) - special:
        wanted = ALLOW if number in plain else KILL if number in killed else refused(errno.EPERM)
        assert verdict(program, machine, number) == wanted, number
    assert len(program) // 8 < 4096


@pytest.mark.parametrize("machine", syscalls.ARCHITECTURES)
def test_arguments_decide_about_the_special_calls(machine):
    program, calls = seccomp.allow_list(machine), syscalls.special(machine)
    denied = refused(errno.EPERM)
    assert verdict(program, machine, calls["clone"], [17]) == ALLOW
    for flag in (kernel.CLONE_NEWUSER, kernel.CLONE_NEWPID, kernel.CLONE_NEWNET, kernel.CLONE_NEWNS):
        assert verdict(program, machine, calls["clone"], [flag | 17]) == denied
    assert verdict(program, machine, calls["clone3"]) == refused(errno.ENOSYS)
    assert verdict(program, machine, calls["prctl"], [kernel.PR_SET_NO_NEW_PRIVS]) == ALLOW
    assert verdict(program, machine, calls["prctl"], [35]) == denied  # PR_SET_MM
    assert verdict(program, machine, calls["ioctl"], [0, 0x5401]) == ALLOW
    assert verdict(program, machine, calls["ioctl"], [0, 0x5412]) == denied  # TIOCSTI
    assert verdict(program, machine, calls["socketpair"], [1]) == ALLOW
    assert verdict(program, machine, calls["socketpair"], [2]) == denied
    assert verdict(program, machine, calls["execve"]) == ALLOW


@pytest.mark.parametrize("machine", syscalls.ARCHITECTURES)
def test_the_second_filter_takes_exec_away(machine):
    program, calls = seccomp.without_exec(machine), syscalls.special(machine)
    assert verdict(program, machine, calls["execve"]) == refused(errno.EPERM)
    assert verdict(program, machine, calls["execveat"]) == refused(errno.EPERM)
    assert verdict(program, machine, syscalls.plain(machine)["read"]) == ALLOW


def test_foreign_and_x32_calls_kill():
    program = seccomp.allow_list("x86_64")
    record_of_arm = verdict(seccomp.allow_list("aarch64"), "x86_64", 0)
    assert record_of_arm == KILL
    assert verdict(program, "x86_64", 0x40000000) == KILL


def test_dangerous_names_are_on_no_list():
    for machine in syscalls.ARCHITECTURES:
        assert not set(DANGEROUS.split()) & (set(syscalls.plain(machine)) | set(syscalls.special(machine)))
