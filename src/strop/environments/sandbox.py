"""The kernel's confinement of the `python_tool` process: the layers of protection, and the filter of system calls.

    folder   the tool's folder is a file system of limited size (a user and a mount namespace)
    files    Landlock: write in the folder only, run no program, reach no other process
    calls    seccomp: no capabilities, and only the system calls of CALLS

Layers that this kernel or container does not allow are left out; `unprotected` names the missing protection.
"""

import functools
import platform
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

CHILD = Path(__file__).with_name("sandbox_child.py")
LARGEST = 1 << 20  # maximum bytes of a file, and of all that is printed
TOTAL = 32 << 20  # maximum bytes of all files in the folder

WITHOUT = {
    "folder": "the folder's size is checked every 20 ms, not limited by the kernel",
    "files": "C code, such as SQLite's, can write wherever you can, and other processes can be read",
    "calls": "the network, other processes and their priorities are refused in Python only",
}

# system call: its numbers on x86_64 and on aarch64; None if the machine has no such call
CALLS = {
    "read": (0, 63), "write": (1, 64), "open": (2, None), "close": (3, 57), "stat": (4, None), "fstat": (5, 80),
    "lstat": (6, None), "poll": (7, None), "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215),
    "brk": (12, 214), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66), "access": (21, None),
    "pipe": (22, None), "select": (23, None), "sched_yield": (24, 124), "mremap": (25, 216), "msync": (26, 227),
    "madvise": (28, 233), "dup": (32, 23), "dup2": (33, None), "pause": (34, None), "nanosleep": (35, 101),
    "getitimer": (36, 102), "alarm": (37, None), "setitimer": (38, 103), "getpid": (39, 172), "sendfile": (40, 71),
    "exit": (60, 93), "uname": (63, 160), "fcntl": (72, 25), "flock": (73, 32), "fsync": (74, 82), "fdatasync": (75, 83),
    "truncate": (76, 45), "ftruncate": (77, 46), "getdents": (78, None), "getcwd": (79, 17), "chdir": (80, 49),
    "fchdir": (81, 50), "rename": (82, None), "mkdir": (83, None), "rmdir": (84, None), "creat": (85, None),
    "unlink": (87, None), "readlink": (89, None), "umask": (95, 166), "gettimeofday": (96, 169), "getrlimit": (97, 163),
    "getrusage": (98, 165), "sysinfo": (99, 179), "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176),
    "geteuid": (107, 175), "getegid": (108, 177), "getppid": (110, 173), "getpgrp": (111, None), "getgroups": (115, 158),
    "getresuid": (118, 148), "getresgid": (120, 150), "getpgid": (121, 155), "getsid": (124, 156),
    "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132),
    "statfs": (137, 43), "fstatfs": (138, 44), "getpriority": (140, 141), "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120), "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126),
    "arch_prctl": (158, None), "gettid": (186, 178), "time": (201, None), "futex": (202, 98),
    "sched_getaffinity": (204, 123), "getdents64": (217, 61), "set_tid_address": (218, 96), "restart_syscall": (219, 128),
    "fadvise64": (221, 223), "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115),
    "exit_group": (231, 94), "epoll_wait": (232, None), "epoll_ctl": (233, 21), "openat": (257, 56), "mkdirat": (258, 34),
    "newfstatat": (262, 79), "unlinkat": (263, 35), "renameat": (264, 38), "readlinkat": (267, 78), "faccessat": (269, 48),
    "pselect6": (270, 72), "ppoll": (271, 73), "set_robust_list": (273, 99), "epoll_pwait": (281, 22),
    "fallocate": (285, 47), "eventfd2": (290, 19), "epoll_create1": (291, 20), "dup3": (292, 24), "pipe2": (293, 59),
    "preadv": (295, 69), "pwritev": (296, 70), "getcpu": (309, 168), "renameat2": (316, 276), "getrandom": (318, 278),
    "membarrier": (324, 283), "copy_file_range": (326, 285), "statx": (332, 291), "rseq": (334, 293),
    "faccessat2": (439, 439),
}  # fmt: skip
# allowed with some arguments only; clone3 "does not exist", since a filter cannot see its arguments
CLONE, CLONE3, PRLIMIT, IOCTL = (56, 220), (435, 435), (302, 261), (16, 29)
THREAD = 0x10000  # flag of clone: a thread of this process
REQUESTS = (
    0x5401,
    0x5413,
    0x541B,
    0x5421,
    0x5450,
    0x5451,
)  # allowed requests of ioctl: terminals, sizes, and flags of a descriptor
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # seccomp's name; column in CALLS

LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, KILL, NOT_PERMITTED, NO_SUCH_CALL = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
NUMBER, MACHINE, ARGUMENTS = 0, 4, 16  # offsets in the data of a filter; an argument has two halves of 4 bytes


def call_filter(machine: str) -> bytes:
    """Return the seccomp program that allows CALLS and answers every other call with "operation not permitted"."""
    token, place = MACHINES[machine]
    program = [(LOAD, 0, 0, MACHINE), (EQUAL, 1, 0, token), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    for number in sorted(number for numbers in CALLS.values() if (number := numbers[place]) is not None):
        program += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    program += [(EQUAL, 0, 1, CLONE3[place]), (RETURN, 0, 0, NO_SUCH_CALL)]
    threads = [(LOAD, 0, 0, ARGUMENTS), (ANY_BIT, 0, 1, THREAD), (RETURN, 0, 0, ALLOW)]
    own_limits = []  # prlimit may only read the limits of this process: no process id, no new limit
    for half in (ARGUMENTS, ARGUMENTS + 16, ARGUMENTS + 20):
        own_limits += [(LOAD, 0, 0, half), (EQUAL, 1, 0, 0), (RETURN, 0, 0, NOT_PERMITTED)]
    own_limits.append((RETURN, 0, 0, ALLOW))
    requests = [(LOAD, 0, 0, ARGUMENTS + 8)]
    for request in REQUESTS:
        requests += [(EQUAL, 0, 1, request), (RETURN, 0, 0, ALLOW)]
    for numbers, checks in ((CLONE, threads), (PRLIMIT, own_limits), (IOCTL, requests)):
        refused = [*checks, (RETURN, 0, 0, NOT_PERMITTED)]
        program += [(EQUAL, 0, len(refused), numbers[place]), *refused]
    program.append((RETURN, 0, 0, NOT_PERMITTED))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def command(folder: str, layers: str, seconds: int, megabytes: int) -> list[str]:
    """Return the command that runs a program from standard input in the folder, which must be a real path."""
    limits = [str(number) for number in (seconds, megabytes, LARGEST, TOTAL)]
    machine = platform.machine()
    filtered = call_filter(machine).hex() if layers and machine in MACHINES else ""
    return [sys.executable, "-I", "-S", str(CHILD), *limits, folder, layers, filtered]


@functools.cache
def layers() -> dict[str, str]:
    """Return for each layer the reason why it is not available here, or "". A process tests this once."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        return dict.fromkeys(WITHOUT, f"not on {platform.system()} {platform.machine()}")
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command(str(Path(folder).resolve()), "probe", 20, 512), stdin=subprocess.DEVNULL, capture_output=True, cwd=folder,
            env={}, encoding="utf-8", errors="replace", timeout=60,
        )  # fmt: skip
    told = dict(line.split(":", 1) for line in done.stdout.splitlines() if ":" in line)
    return {name: told.get(name, f"the trial ended with {done.returncode}").strip() for name in WITHOUT}


def available() -> str:
    """Return the names of the available layers, separated by commas."""
    return ",".join(name for name, reason in layers().items() if not reason)


def unprotected() -> str:
    """Return the protection that the kernel does not give here; "" if it gives all."""
    return "; ".join(f"{WITHOUT[name]} ({reason})" for name, reason in layers().items() if reason)
