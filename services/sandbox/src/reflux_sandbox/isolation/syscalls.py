"""Numbers of the system calls that a sandboxed process may use, for the two architectures we run on.

Format of the tables: `name=x86_64/aarch64`, `-` where the architecture has no such call. What is not here is
refused: no socket(), no io_uring, no perf events, no user changes. What no honest program calls in a sandbox (mounts,
namespaces, ptrace and other processes' memory, keyrings, bpf, modules, clocks) ends the process: a policy violation.
"""

import platform

_FILES = """
read=0/63 write=1/64 open=2/- close=3/57 stat=4/- fstat=5/80 lstat=6/- poll=7/- lseek=8/62 pread64=17/67
pwrite64=18/68 readv=19/65 writev=20/66 preadv=295/69 pwritev=296/70 preadv2=327/286 pwritev2=328/287 access=21/-
pipe=22/- select=23/- dup=32/23 dup2=33/- dup3=292/24 pipe2=293/59 sendfile=40/71 flock=73/32 fsync=74/82
fdatasync=75/83 truncate=76/45 ftruncate=77/46 getdents=78/- getdents64=217/61 getcwd=79/17 chdir=80/49 fchdir=81/50
rename=82/- mkdir=83/- rmdir=84/- creat=85/- link=86/- unlink=87/- symlink=88/- readlink=89/- chmod=90/- fchmod=91/52
chown=92/- fchown=93/55 lchown=94/- umask=95/166 utime=132/- utimes=235/- mknod=133/- statfs=137/43 fstatfs=138/44
sync_file_range=277/84 openat=257/56 mkdirat=258/34 mknodat=259/33 fchownat=260/54 futimesat=261/- newfstatat=262/79
unlinkat=263/35 renameat=264/38 renameat2=316/276 linkat=265/37 symlinkat=266/36 readlinkat=267/78 fchmodat=268/53
fchmodat2=452/452 faccessat=269/48 faccessat2=439/439 pselect6=270/72 ppoll=271/73 utimensat=280/88 fallocate=285/47
statx=332/291 copy_file_range=326/285 openat2=437/437 close_range=436/436 getxattr=191/8 lgetxattr=192/9
fgetxattr=193/10 listxattr=194/11 llistxattr=195/12 flistxattr=196/13 fadvise64=221/223 splice=275/76 tee=276/77
eventfd=284/- eventfd2=290/19 epoll_create=213/- epoll_create1=291/20 epoll_ctl=233/21 epoll_ctl_old=214/-
epoll_wait=232/- epoll_pwait=281/22 epoll_pwait2=441/441 inotify_init=253/- inotify_init1=294/26
inotify_add_watch=254/27 inotify_rm_watch=255/28 signalfd=282/- signalfd4=289/74 timerfd_create=283/85
timerfd_settime=286/86 timerfd_gettime=287/87 memfd_create=319/279 fcntl=72/25 shutdown=48/210 sendto=44/206
recvfrom=45/207 sendmsg=46/211 recvmsg=47/212
"""

_MEMORY = """
mmap=9/222 mprotect=10/226 munmap=11/215 brk=12/214 mremap=25/216 msync=26/227 mincore=27/232 madvise=28/233
mlock=149/228 munlock=150/229 mlock2=325/284 membarrier=324/283 get_mempolicy=239/236 pkey_alloc=330/289
pkey_free=331/290 pkey_mprotect=329/288
"""

_PROCESSES = """
rt_sigaction=13/134 rt_sigprocmask=14/135 rt_sigreturn=15/139 rt_sigpending=127/136 rt_sigtimedwait=128/137
rt_sigqueueinfo=129/138 rt_sigsuspend=130/133 rt_tgsigqueueinfo=297/240 sigaltstack=131/132 sched_yield=24/124
nanosleep=35/101 clock_nanosleep=230/115 getitimer=36/102 setitimer=38/103 alarm=37/- pause=34/- getpid=39/172
getppid=110/173 gettid=186/178 getuid=102/174 geteuid=107/175 getgid=104/176 getegid=108/177 getresuid=118/148
getresgid=120/150 getgroups=115/158 getpgid=121/155 getpgrp=111/- setpgid=109/154 getsid=124/156 setsid=112/157
fork=57/- vfork=58/- exit=60/93 exit_group=231/94 wait4=61/260 waitid=247/95 kill=62/129 tkill=200/130 tgkill=234/131
uname=63/160 getrlimit=97/163 setrlimit=160/164 prlimit64=302/261 getrusage=98/165 times=100/153 sysinfo=99/179
gettimeofday=96/169 time=201/- clock_gettime=228/113 clock_getres=229/114 futex=202/98 futex_waitv=449/449
set_tid_address=218/96 set_robust_list=273/99 get_robust_list=274/100 rseq=334/293 restart_syscall=219/128
arch_prctl=158/- sched_getaffinity=204/123 sched_setaffinity=203/122 sched_getparam=143/121 sched_getscheduler=145/120
sched_get_priority_max=146/125 sched_get_priority_min=147/126 sched_rr_get_interval=148/127 getpriority=140/141
setpriority=141/140 getrandom=318/278 getcpu=309/168 capget=125/90 timer_create=222/107 timer_settime=223/110
timer_gettime=224/108 timer_getoverrun=225/109 timer_delete=226/111 pidfd_open=434/434 pidfd_send_signal=424/424
"""

_SPECIAL = """
clone=56/220 clone3=435/435 socketpair=53/199 prctl=157/167 ioctl=16/29 execve=59/221 execveat=322/281 seccomp=317/277
"""

_KILLED = """
ptrace=101/117 process_vm_readv=310/270 process_vm_writev=311/271 kcmp=312/272 pidfd_getfd=438/438 bpf=321/280
mount=165/40 umount2=166/39 pivot_root=155/41 mount_setattr=442/442 move_mount=429/429 fsopen=430/430 fsmount=432/432
open_tree=428/428 unshare=272/97 setns=308/268 keyctl=250/219 add_key=248/217 request_key=249/218 init_module=175/105
finit_module=313/273 delete_module=176/106 kexec_load=246/104 kexec_file_load=320/294 open_by_handle_at=304/265
reboot=169/142 swapon=167/224 swapoff=168/225 acct=163/89 settimeofday=164/170 clock_settime=227/112 adjtimex=159/171
clock_adjtime=305/266 userfaultfd=323/282 fanotify_init=300/262 quotactl=179/60 sethostname=170/161 iopl=172/-
ioperm=173/- lookup_dcookie=212/18
"""

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH value by machine name, as the kernel puts it in front of the filter."""


def _parse(table: str, column: int) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for entry in table.split():
        name, _, columns = entry.partition("=")
        if (number := columns.split("/")[column]) != "-":
            numbers[name] = int(number)
    return numbers


def supported() -> bool:
    """Whether there is a table for this machine."""
    return platform.machine() in ARCHITECTURES


def plain(machine: str) -> dict[str, int]:
    """Calls allowed with any arguments, name -> number, on `machine`."""
    return _parse(_FILES + _MEMORY + _PROCESSES, list(ARCHITECTURES).index(machine))


def special(machine: str) -> dict[str, int]:
    """Calls whose arguments are looked at or that depend on the profile, name -> number, on `machine`."""
    return _parse(_SPECIAL, list(ARCHITECTURES).index(machine))


def killed(machine: str) -> dict[str, int]:
    """Calls that end the process, name -> number, on `machine`."""
    return _parse(_KILLED, list(ARCHITECTURES).index(machine))
