"""Owns the list of attacks: what hostile text tries in a child, and how each attempt must end.

docs/sandbox-isolation.md has a row for each; test_attacks.py runs them.
"""

import platform
from dataclasses import dataclass

from reflux_sandbox.isolation import syscalls


@dataclass(frozen=True)
class Attack:
    """`code` must end with one of `endings`; with "ok" it must also have printed `prints` (contained, not refused)."""

    code: str
    endings: tuple[str, ...] = ("nonzero",)
    prints: str = ""
    seconds: float = 20.0
    """Generous: only the attacks that end by it are waited for."""
    memory_bytes: int = 256 << 20


def contained(code: str, prints: str, **options: float) -> Attack:
    """The attempt does nothing to anybody else: the code goes on and says what it sees."""
    return Attack(code, ("ok",), prints, **options)  # type: ignore[arg-type]


def call(name: str) -> Attack:
    """A system call that ends the process."""
    number = syscalls.killed(platform.machine())[name] if syscalls.supported() else 0
    return Attack(
        f"import ctypes; ctypes.CDLL(None).syscall({number}, 0, 0, 0, 0, 0, 0); print('through')", ("policy",)
    )


def refused_call(number: int) -> Attack:
    """A system call of x86-64 that is refused with EPERM, since honest programs try it too."""
    return contained(
        f"import ctypes as c; l = c.CDLL(None, use_errno=True); print(l.syscall({number}, 0, 0, 0, 0), c.get_errno())",
        "-1 1\n",
    )


FILES = {
    "write to the root": Attack("open('/probe', 'w')"),
    "write to the system": Attack("open('/usr/probe', 'w')"),
    "write to the interpreter": Attack("import os; open(os.path.dirname(os.__file__) + '/probe.py', 'w')"),
    "write to verifier code": Attack("import sample_graders; open(sample_graders.__file__, 'a')"),
    "replace verifier code": Attack("import os, sample_graders as s; os.rename(s.__file__, '/box/x')"),
    "delete the system": Attack("import os; os.unlink('/usr/bin/env')"),
    "read shadow": Attack("open('/etc/shadow').read()"),
    "read a home folder": Attack("import os; os.listdir('/root/.ssh'); os.listdir('/home/x')"),
    "read host state": Attack("import os; os.listdir('/var')"),
    "read the service's secrets in /run": Attack("import os; os.listdir('/run')"),
    "container socket": Attack("open('/var/run/docker.sock')"),
    "path traversal": Attack("open('../../../etc/shadow').read()"),
    "root through /proc/1/root": Attack("import os; print(os.listdir('/proc/1/root'))"),
    "work folder of another process": Attack("import os; print(os.listdir('/proc/1/cwd'))"),
    "symbolic link to the outside": Attack("import os; os.symlink('/etc/shadow', 'link'); open('link').read()"),
    "hard link to the system": Attack("import os; os.link('/usr/bin/env', '/box/env')"),
    "make a device": Attack("import os, stat; os.mknod('/box/d', 0o600 | stat.S_IFBLK, os.makedev(8, 0))"),
    "chroot out": Attack("import os; os.mkdir('/box/c'); os.chroot('/box/c')"),
    "delete its own tree": contained(
        "import shutil\nfor f in ('/box', '/usr/sbin'): shutil.rmtree(f, ignore_errors=True)\nprint('on')",
        "on\n",
    ),
    "write to /dev/shm": contained("open('/dev/shm/reflux-probe', 'w').write('x'); print('private')", "private\n"),
    "write to /tmp": contained("open('/tmp/reflux-probe', 'w').write('x'); print('private')", "private\n"),
}

PROCESS_AND_KERNEL = {
    "memory of the supervisor": Attack("open('/proc/1/mem', 'r+b')"),
    "descriptors of the supervisor": Attack(
        "import os; [os.write(os.open(f'/proc/1/fd/{n}', 1), b'0 0.0 0') for n in os.listdir('/proc/1/fd')]"
    ),
    "environment of the supervisor": Attack("open('/proc/1/environ').read()"),
    "trigger through sysrq": Attack("open('/proc/sysrq-trigger', 'w').write('c')"),
    "kernel settings": Attack("open('/proc/sys/kernel/core_pattern', 'w').write('|/box/x')"),
    "kernel messages": Attack("open('/dev/kmsg').read()"),
    "kernel memory": Attack("open('/dev/mem').read(1)"),
    "kernel core": Attack("open('/proc/kcore', 'rb').read(1)[0]"),
    "firmware in /sys": Attack("import os; open('/sys/kernel/uevent_helper', 'w'); os.listdir('/sys/firmware')"),
    "become root": Attack("import os; os.setuid(0)"),
    "change groups": Attack("import os; os.setgroups([0])"),
    "raise a limit": Attack("import resource as r; r.setrlimit(r.RLIMIT_NPROC, (10**6, 10**6))"),
    "start a program": Attack("import subprocess; subprocess.run(['/usr/bin/id'])"),
    "start a program from memory": Attack(
        "import os; f = os.memfd_create('x'); os.write(f, open('/usr/bin/env', 'rb').read()); os.execve(f, ['x'], {})"
    ),
    "start a set-user-ID program": Attack("import os; os.execv('/usr/bin/passwd', ['passwd'])"),
    "signals to the supervisor": contained(
        """
import os, signal
for number in (9, 15, 19, 2):
    try:
        os.kill(1, number)
    except PermissionError:
        pass
print('on')
""",
        "on\n",
    ),
    "signal to everybody": contained(
        """
import os, signal
signal.signal(15, signal.SIG_IGN)
try:
    os.kill(-1, 15)
except OSError:
    pass
print('on')
""",
        "on\n",
    ),
    "stop itself": Attack("import os; os.kill(os.getpid(), 19)", ("timeout",), seconds=0.2),
    "descriptors of others": Attack("import os; [os.fstat(fd) for fd in range(3, 64)]"),
    "ptrace": call("ptrace"),
    "read another process's memory": call("process_vm_readv"),
    "steal a descriptor": call("pidfd_getfd"),
    "compare kernel objects": call("kcmp"),
    "keyring: add a key": call("add_key"),
    "keyring: ask for keys": call("keyctl"),
    "keyring: request a key": call("request_key"),
    "new user namespace": call("unshare"),
    "join a namespace": call("setns"),
    "mount": call("mount"),
    "unmount": call("umount2"),
    "pivot_root": call("pivot_root"),
    "mount by the new interface": call("fsopen"),
    "bpf": call("bpf"),
    "userfaultfd": call("userfaultfd"),
    "load a module": call("init_module"),
    "kexec": call("kexec_load"),
    "open by handle": call("open_by_handle_at"),
    "set the clock": call("settimeofday"),
    "reboot": call("reboot"),
}

X86_64 = {
    "io_uring": refused_call(425),
    "performance counters": refused_call(298),
    "System V shared memory": refused_call(29),
    "personality": refused_call(135),
    "new user namespace by clone": contained(
        "import ctypes; print(ctypes.CDLL(None).syscall(56, 0x10000000 | 17, 0, 0, 0, 0))", "-1\n"
    ),
    "32-bit system call": Attack(
        """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex('b814000000cd80c3'))  # mov eax, 20 (getpid); int 0x80; ret
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
""",
        ("policy",),
    ),
}

NETWORK = {
    "IPv4": Attack("import socket; socket.create_connection(('127.0.0.1', 6379), 1)"),
    "IPv6": Attack("import socket; socket.socket(socket.AF_INET6)"),
    "unix socket": Attack("import socket; socket.socket(socket.AF_UNIX).connect('/run/x')"),
    "abstract unix socket": Attack("import socket; socket.socket(socket.AF_UNIX).connect('\\0x')"),
    "netlink": Attack("import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)"),
    "raw packets": Attack("import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)"),
    "cloud metadata address": Attack("import urllib.request as u; u.urlopen('http://169.254.169.254/', timeout=1)"),
    "datagram by a socket pair": Attack(
        "import socket; a, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.sendto(b'x', '\\0x')"
    ),
}

EXHAUSTION = {
    "fork bomb": Attack("import os\nwhile True: os.fork()", ("pids", "timeout"), seconds=2.0),
    "thread bomb": Attack(
        """
import threading, time
for _ in range(100):
    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
""",
        ("pids",),
        memory_bytes=480 << 20,
    ),
    "memory at once": Attack("x = bytearray(3 << 30)", ("memory",)),
    "memory bit by bit": Attack("x = []\nwhile True: x.append(bytearray(1 << 20))", ("memory",)),
    "huge pickle": Attack(
        "import pickle; pickle.loads(b'\\x80\\x04\\x8e' + (1 << 40).to_bytes(8, 'little'))", ("nonzero", "memory")
    ),
    "pickle bomb": Attack(
        "import pickle; pickle.loads(b'(' + b'I0\\n' * 10 + b'l' + b'2((' * 200000 + b'.')", ("nonzero", "memory")
    ),
    "a file above the cap": Attack("open('/box/big', 'wb').write(bytes(9 << 20))", ("disk",)),
    "fill the disk": Attack("for i in range(9): open(f'/box/{i}', 'wb').write(bytes(1 << 20))", ("disk",)),
    "fill the disk by a hole": Attack("import os; os.posix_fallocate(os.open('/box/f', 66), 0, 1 << 40)", ("disk",)),
    "100000 files": Attack("for i in range(10**5): open(f'/box/{i}', 'w').close()", ("disk",)),
    "folders in folders": Attack(
        "import os\nfor i in range(10**5):\n    os.mkdir('d')\n    os.chdir('d')", ("disk", "nonzero")
    ),
    "open files without end": Attack("import os\nwhile True: os.dup(1)"),
    "50 MB of output": contained("import os\nfor _ in range(50): os.write(1, b'x' * (1 << 20))", "x" * 100, seconds=30),
    "output without end": Attack("import os\nwhile True: os.write(1, b'x' * (1 << 20))", ("output",), seconds=60),
    "deep recursion": Attack(
        "import sys; sys.setrecursionlimit(10**9)\nr = []\nfor _ in range(10**5): r = [r]\nrepr(r)",
        ("signal", "memory"),
    ),
    "recursion in JSON": Attack("import json; json.loads('[' * 10**6)"),
    "endless loop": Attack("while True: pass", ("timeout",), seconds=0.2),
    "a call in C that holds the GIL": Attack("sum(range(10**12))", ("timeout",), seconds=0.2),
    "ignored signals": Attack(
        "import signal\nfor n in set(range(1, 32)) - {9, 19}: signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        ("timeout",),
        seconds=0.2,
    ),
}

ESCAPES_AND_FORGERY = {
    "setsid and double fork": Attack(
        """
import os, time
for _ in range(3):
    if os.fork():
        break
    os.setsid()
while True: time.sleep(1)
""",
        ("timeout",),
        seconds=0.2,
    ),
    "orphan that holds the pipe": contained(
        """
import os, time
print('before', flush=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
os.wait()
""",
        "before\n",
        seconds=30,
    ),
    "fake verdict on every descriptor": Attack(
        """
import os
for fd in range(256):
    for text in (b'0 0.0 0', b'\\x15\\0\\0\\0{"ended":[0,0.0,0]}'):
        try:
            os.write(fd, text)
        except OSError:
            pass
os._exit(3)
"""
    ),
    "fake exit by a child": Attack("import os\nif os.fork() == 0: os._exit(0)\nos.wait(); os._exit(4)"),
    "the parent's frames": Attack(
        "import gc, socket; s = [o for o in gc.get_objects() if isinstance(o, socket.socket)]; s[0].send(b'x')"
    ),
    "reopen descriptors through /proc/self/fd": Attack(
        "import os; [os.open(f'/proc/self/fd/{n}', 1) for n in range(3, 64)]"
    ),
    "inject code by sys.modules": contained("import sys; sys.modules['os'] = None; print('mine only')", "mine only\n"),
}

GROUPS: dict[str, dict[str, Attack]] = {
    "files": FILES,
    "processes and kernel": PROCESS_AND_KERNEL,
    "processes and kernel (x86-64)": X86_64,
    "network": NETWORK,
    "exhaustion": EXHAUSTION,
    "escape and forgery": ESCAPES_AND_FORGERY,
}
ATTACKS: dict[str, Attack] = {name: attack for group in GROUPS.values() for name, attack in group.items()}

FORGED_VERDICTS = {
    "frame without the nonce": (
        "import json, os\ng = {'outcome': 'scored', 'reward': 1.0, 'figures': {}, 'message': ''}\n"
        "b = json.dumps({'grades': [g]})\n"
        "for fd in range(3, 64):\n    try: os.write(fd, len(b).to_bytes(4, 'little') + b.encode())\n"
        "    except OSError: pass"
    ),
    "frame with a guessed nonce": (
        "import json, os\nb = json.dumps({'nonce': '0' * 32, 'grades': []})\n"
        "for fd in range(3, 64):\n    try: os.write(fd, len(b).to_bytes(4, 'little') + b.encode())\n"
        "    except OSError: pass"
    ),
    "frame of 4 GB announced": (
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'\\xff' * 4)\n    except OSError: pass"
    ),
    "frame that is no JSON": (
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'\\x01\\0\\0\\0{')\n    except OSError: pass"
    ),
    "end before the verdict": "import os; os._exit(0)",
}
"""Text that an untrusted verifier runs in its own interpreter; each must be a lost session, never a grade."""
