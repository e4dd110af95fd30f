"""What model-written code tries; each attempt fails, the host is untouched and the pool goes on."""

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


REFUSED = {
    "ipv4 socket": "import socket; socket.socket()",
    "ipv6 socket": "import socket; socket.socket(socket.AF_INET6)",
    "unix socket": "import socket; socket.socket(socket.AF_UNIX)",
    "netlink socket": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "exec": "import os; os.execv('/usr/bin/id', ['id'])",
    "subprocess": "import subprocess; subprocess.run(['/usr/bin/id'])",
    "exec from memory": (
        "import os; f = os.memfd_create('x'); os.write(f, open('/usr/bin/id', 'rb').read()); os.execve(f, ['id'], {})"
    ),
    "write to the root": "open('/probe', 'w')",
    "write to the system": "open('/usr/probe', 'w')",
    "write to the interpreter": "import os; open(os.path.dirname(os.__file__) + '/probe.py', 'w')",
    "write to verifier code": "import sample_graders; open(sample_graders.__file__, 'a')",
    "delete the system": "import os; os.unlink('/usr/bin/env')",
    "read shadow": "open('/etc/shadow').read()",
    "read a home folder": "import os; os.listdir('/home')",
    "read host state": "import os; os.listdir('/var')",
    "open sysfs": "import os; os.listdir('/sys')",
    "path traversal": "open('../../../etc/shadow').read()",
    "root through proc": "import os; os.listdir('/proc/1/root')",
    "symlink to the outside": "import os; os.symlink('/etc/shadow', 'link'); open('link').read()",
    "hard link to the outside": "import os; os.link('/usr/bin/env', '/box/env')",
    "memory of process 1": "open('/proc/1/mem', 'r+b')",
    "descriptors of process 1": "import os; os.listdir('/proc/1/fd')",
    "kernel messages": "open('/dev/kmsg').read()",
    "kernel memory": "open('/dev/mem').read(1)",
    "make a device": "import os, stat; os.mknod('/box/disk', 0o600 | stat.S_IFBLK, os.makedev(8, 0))",
    "become root": "import os; os.setuid(0)",
    "change groups": "import os; os.setgroups([0])",
    "chroot": "import os; os.chroot('/box')",
    "raise a limit": "import resource as r; r.setrlimit(r.RLIMIT_NPROC, (10**6, 10**6))",
    "descriptors of others": "import os; [os.fstat(fd) for fd in range(3, 256)]",
    "a file above the cap": "open('/box/big', 'wb').write(bytes(9 << 20))",
    "fill the disk": "for i in range(9): open(f'/box/{i}', 'wb').write(bytes(1 << 20))",
    "100000 files": "for i in range(10**5): open(f'/tmp/{i}', 'w').close()",
}


@pytest.mark.parametrize("name", REFUSED)
async def test_an_attack_ends_with_an_exception(prefork, name):
    result = await run(prefork, REFUSED[name])
    assert (result.status, result.exit_code) == ("nonzero", 1), result
    assert b"Error" in result.stderr


SYSTEM_CALLS = {  # x86-64 numbers, called through libc
    "ptrace": 101,
    "mount": 165,
    "umount2": 166,
    "pivot_root": 155,
    "unshare": 272,
    "setns": 308,
    "keyctl": 250,
    "add_key": 248,
    "bpf": 321,
    "perf_event_open": 298,
    "io_uring_setup": 425,
    "userfaultfd": 323,
    "process_vm_readv": 310,
    "pidfd_getfd": 438,
    "init_module": 175,
    "kexec_load": 246,
    "open_by_handle_at": 304,
    "personality": 135,
    "shmget": 29,
    "reboot": 169,
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="system call numbers of x86-64")
async def test_system_calls_outside_the_list_are_refused(prefork):
    code = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for name, number in {SYSTEM_CALLS!r}.items():
    ctypes.set_errno(0)
    result = libc.syscall(number, 0, 0, 0, 0, 0, 0)
    print(name, result, ctypes.get_errno())
libc.unshare(0x10000000)
print('clone', libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0))
"""
    result = await run(prefork, code)
    lines = result.stdout.decode().splitlines()
    assert result.status == "ok", result
    assert [line for line in lines[:-1] if not line.endswith("-1 1")] == []
    assert len(lines) == len(SYSTEM_CALLS) + 1
    assert lines[-1] == "clone -1"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="machine code for x86-64")
async def test_a_32_bit_system_call_kills_the_process(prefork):
    code = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex('b814000000cd80c3'))  # mov eax, 20 (getpid); int 0x80; ret
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
print(ctypes.CFUNCTYPE(ctypes.c_int)(address)())
"""
    result = await run(prefork, code)
    assert result.status == "signal"
    assert result.stdout == b""


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


async def test_a_fork_bomb_hits_its_own_limit_and_nothing_else(prefork):
    bomb = await run(prefork, "import os\nwhile True: os.fork()", seconds=2.0)
    assert bomb.status in ("pids", "timeout")
    neighbour = await run(prefork, "import os; pid = os.fork(); print(os.waitpid(pid, 0)[1] if pid else os._exit(0))")
    assert (neighbour.status, neighbour.stdout) == ("ok", b"0\n")


async def test_a_thread_bomb_is_told_as_pids(prefork):
    code = """
import threading, time
for _ in range(100):
    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
"""
    assert (await run(prefork, code, memory_bytes=480 << 20)).status == "pids"


async def test_a_memory_hog_is_told_as_memory(prefork):
    assert (await run(prefork, "x = bytearray(3 << 30)")).status == "memory"
    assert (await run(prefork, "x = []\nwhile True: x.append(bytearray(1 << 20))")).status == "memory"


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


async def test_50_megabytes_of_output_are_drained_and_cut(prefork):
    result = await run(prefork, "import sys\nfor _ in range(50): sys.stdout.write('x' * (1 << 20))", seconds=20)
    assert (result.status, result.exit_code, result.output_truncated) == ("ok", 0, True)
    assert len(result.stdout) == 1 << 20


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


async def test_a_setsid_double_fork_dies_with_the_timeout(prefork):
    code = """
import os, time
for _ in range(3):
    if os.fork():
        break
    os.setsid()
print(os.getpid(), flush=True)
while True: time.sleep(1)
"""
    result = await run(prefork, code, seconds=0.3)
    assert result.status == "timeout"
    assert len(result.stdout.split()) == 4


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


async def test_signals_to_the_supervisor_change_nothing(prefork):
    code = "import os, signal\nfor s in (9, 15, 19, 2):\n    os.kill(1, s)\nprint('alive')"
    result = await run(prefork, code)
    assert (result.status, result.stdout) == ("ok", b"alive\n")


async def test_a_forged_verdict_on_stdout_is_only_output(prefork):
    code = """
import os
for fd in range(1, 256):
    try:
        os.write(fd, b'0 0.0 0')
    except OSError:
        pass
os._exit(3)
"""
    result = await run(prefork, code)
    assert (result.status, result.exit_code) == ("nonzero", 3)


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
