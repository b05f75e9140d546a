"""Escapes from the Python tool: each through the tool itself, through the kernel's layers alone, and without them."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from strop.environments import sandbox
from strop.environments.python_tool import python_tool

# what an honest program may do by mistake, and a dishonest one on purpose; OUT is a folder outside, CANARY a process
ESCAPES = {
    "open": "open(OUT + '/new', 'w')",
    "overwrite": "open(OUT + '/kept', 'r+').write('changed')",
    "append": "open(OUT + '/kept', 'ab').write(b'changed')",
    "sqlite3": "import sqlite3; sqlite3.connect(OUT + '/a.db').execute('create table t (x)')",
    "sqlite3 uri": "import sqlite3; sqlite3.connect('file:' + OUT + '/a.db', uri=True).execute('create table t (x)')",
    "mkfifo": "os.mkfifo(OUT + '/fifo')",
    "mknod": "os.mknod(OUT + '/node')",
    "utime": "os.utime(OUT + '/kept', (0, 0))",
    "chmod": "os.chmod(OUT + '/kept', 0)",
    "setxattr": "os.setxattr(OUT + '/kept', b'user.x', b'1')",
    "dir_fd": "os.open('new', os.O_CREAT | os.O_WRONLY, dir_fd=os.open(OUT, os.O_RDONLY))",
    "dir_fd unlink": "os.unlink('kept', dir_fd=os.open(OUT, os.O_RDONLY))",
    "remove": "os.remove(OUT + '/kept')",
    "rename": "os.rename(OUT + '/kept', 'mine')",
    "truncate": "os.truncate(OUT + '/kept', 0)",
    "mkdir": "os.mkdir(OUT + '/folder')",
    "hard link": "os.link(OUT + '/kept', 'linked'); open('linked', 'a').write('changed')",
    "symlink": "os.symlink(OUT + '/kept', 'linked'); open('linked', 'a').write('changed')",
    "kill": "os.kill(CANARY, 9)",
    "kill group": "os.killpg(os.getpgid(CANARY), 9)",
    "pidfd": "import signal; signal.pidfd_send_signal(os.pidfd_open(CANARY), 9)",
    "renice": "os.setpriority(os.PRIO_PROCESS, CANARY, 15)",
    "scheduler": "os.sched_setaffinity(CANARY, {0})",
    "limits of others": "import resource; resource.prlimit(CANARY, resource.RLIMIT_NOFILE, (5, 5))",
    "fork": "os.fork()",
    "fork bomb": "while True: os.fork()",
    "spawn": "os.posix_spawn('/bin/true', ['true'], {})",
    "fork_exec, as multiprocessing calls it": "import _posixsubprocess; r, w = os.pipe(); _posixsubprocess.fork_exec("
    "[b'/bin/true'], [b'/bin/true'], True, (w,), None, None, -1, -1, -1, -1, -1, -1, r, w, False, False, -1, None, None, None, "
    "-1, None, True)",
    "exec": "os.execv('/bin/true', ['true'])",
    "system": "import subprocess; subprocess.run(['/bin/true'], check=True)",
    "socket": "import socket; socket.socket()",
    "socketpair": "import socket; socket.socketpair()",
    "environment of another": "print(open(f'/proc/{CANARY}/environ').read())",
    "memory of another": "open(f'/proc/{CANARY}/mem', 'rb').read(1)",
    "memory of another, written": "os.open(f'/proc/{CANARY}/mem', os.O_RDWR)",
    "descriptors of another": "os.listdir(f'/proc/{CANARY}/fd'); open(f'/proc/{CANARY}/fd/0')",
    "larger limits": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
}
# only by C code: the kernel alone can refuse these
SYSTEM_CALLS = {
    "ptrace": "call(101, 16, CANARY, 0, 0)",
    "process_vm_readv": "call(310, CANARY, 0, 0, 0, 0, 0)",
    "kill": "call(62, CANARY, 9)",
    "tkill": "call(200, CANARY, 9)",
    "clone": "call(56, 17, 0, 0, 0, 0)",
    "clone3": "call(435, 0, 0)",
    "vfork by the other table of numbers": "call(0x40000000 | 57)",
    "socket": "call(41, 2, 1, 0)",
    "io_uring": "call(425, 8, ctypes.create_string_buffer(256))",
    "memfd": "call(319, b'm', 0)",
    "bpf": "call(321, 0, 0, 0)",
    "userfaultfd": "call(323, 0)",
    "key ring": "call(250, 0, -3, 0, 0, 0)",
    "mount": "call(165, b'none', b'/tmp', b'tmpfs', 0, 0)",
    "unshare": "call(272, 0x10000000)",
    "chroot": "call(161, b'.')",
    "shared memory": "call(29, 0, 1 << 20, 0o1600)",
    "typing into the terminal": "call(16, 0, 0x5412, b'x')",
    "limits of its own": "call(302, 0, 9, ctypes.create_string_buffer(b'\\xff' * 16), 0)",
}

PRELUDE = "import ctypes, os, sys\nOUT, CANARY = sys.argv[2], int(sys.argv[3])\n"
# sets all layers, and no hook: what is refused, the kernel refuses
KERNEL_ONLY = """
sys.path.insert(0, os.path.dirname(sys.argv[1]))
import sandbox_child
for name, error in sandbox_child.protect(sys.argv[4], 1 << 20, os.getcwd(), bytes.fromhex(sys.argv[5])):
    if error is not None:
        raise SystemExit(f"layer {name}: {error}")
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    if libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)) < 0:
        raise OSError(ctypes.get_errno(), "refused")
"""


@pytest.fixture(scope="module")
def python():
    return python_tool(seconds=20)


@pytest.fixture
def bare(monkeypatch):
    """The tool as it is on a kernel without any layer."""
    monkeypatch.setattr(sandbox, "layers", lambda: dict.fromkeys(sandbox.WITHOUT, "not here"))
    with pytest.warns(UserWarning, match="protected less on this machine"):
        return python_tool(seconds=20)


@pytest.fixture
def outside(tmp_path):
    """A folder with a file, and a process with a secret; both must be as they were afterwards."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "kept").write_text("kept")
    before = (folder / "kept").stat()
    canary = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, env={"SECRET": "s3cr3t"})
    yield folder, canary.pid
    try:
        assert canary.poll() is None, "the process was stopped"
        assert os.getpriority(os.PRIO_PROCESS, canary.pid) == os.getpriority(os.PRIO_PROCESS, 0)
        assert len(os.sched_getaffinity(canary.pid)) == len(os.sched_getaffinity(0))
        assert resource.prlimit(canary.pid, resource.RLIMIT_NOFILE) == resource.getrlimit(resource.RLIMIT_NOFILE)
        after = (folder / "kept").stat()
        assert [path.name for path in folder.iterdir()] == ["kept"]
        assert (folder / "kept").read_text() == "kept"
        assert (after.st_mtime_ns, after.st_mode, after.st_nlink) == (before.st_mtime_ns, before.st_mode, 1)
    finally:
        canary.kill()
        canary.communicate()


def given(code, outside):
    return f"import os\nOUT, CANARY = {str(outside[0])!r}, {outside[1]}\n{code}\nprint('ESCAPED')"


@pytest.mark.parametrize("name", ESCAPES)
def test_the_tool_refuses(name, python, outside):
    with pytest.raises(RuntimeError, match=r"Error") as refused:
        python(given(ESCAPES[name], outside))
    assert "s3cr3t" not in str(refused.value)


@pytest.mark.parametrize("name", ESCAPES)
def test_without_the_kernel_python_refuses_too(name, bare, outside):
    with pytest.raises(RuntimeError, match=r"Error"):
        bare(given(ESCAPES[name], outside))


def kernel_only(code, outside, tmp_path):
    """Run a program under all layers that are here, without the audit hook."""
    missing = {name: reason for name, reason in sandbox.layers().items() if reason}
    if "calls" in missing or "files" in missing:
        pytest.skip(f"this kernel lacks layers: {missing}")
    inside = tmp_path / "inside"
    inside.mkdir()
    command = sandbox.command(str(inside), sandbox.available(), 20, 512)
    child, layers, filtered = command[3], command[9], command[10]
    program = PRELUDE + KERNEL_ONLY + code + "\nprint('ESCAPED')"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, child, str(outside[0]), str(outside[1]), layers, filtered],
        cwd=inside, env={}, capture_output=True, encoding="utf-8", timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize("name", ESCAPES)
def test_the_kernel_alone_refuses(name, outside, tmp_path):
    if name == "larger limits" and os.getuid():
        pytest.skip("only root may raise a limit")
    done = kernel_only(ESCAPES[name], outside, tmp_path)
    assert "s3cr3t" not in done.stdout
    assert "ESCAPED" not in done.stdout
    assert done.returncode == 1, done.stderr
    assert re.search(r"(OSError|PermissionError|FileNotFoundError|OperationalError|ValueError)", done.stderr), (
        done.stderr
    )


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86_64")
@pytest.mark.parametrize("name", SYSTEM_CALLS)
def test_the_kernel_refuses_the_call(name, outside, tmp_path):
    done = kernel_only(SYSTEM_CALLS[name], outside, tmp_path)
    expected = "[Errno 38]" if name == "clone3" else "[Errno 1]"
    assert "ESCAPED" not in done.stdout
    assert expected in done.stderr, done.stderr


def test_the_hostile_numbers_do_something_without_the_filter(outside, tmp_path):
    """The checker itself: without layers an escape is seen."""
    program = PRELUDE + ESCAPES["environment of another"]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, "", str(outside[0]), str(outside[1])], capture_output=True, encoding="utf-8",
        timeout=60,
    )  # fmt: skip
    assert "s3cr3t" in done.stdout


@pytest.mark.parametrize("kind", ["python", "bare"])
def test_many_files_have_a_size_together(kind, request):
    """150 MB in files of less than 1 MB each; stopped by the kernel, or by a look at the folder."""
    tool = request.getfixturevalue(kind)
    code = (
        "import time\nfor i in range(150):\n    open(f'{i}', 'wb').write(bytes(10**6))\ntime.sleep(2)\nprint('ESCAPED')"
    )
    with pytest.raises(RuntimeError, match=r"No space left|at most 1000, and 32 MB together"):
        tool(code)


@pytest.mark.parametrize("kind", ["python", "bare"])
def test_the_number_of_files_is_limited(kind, request):
    code = "import time\nfor i in range(3000): open(str(i), 'w').close()\ntime.sleep(2)\nprint('ESCAPED')"
    with pytest.raises(RuntimeError, match=r"No space left|at most 1000, and 32 MB together"):
        request.getfixturevalue(kind)(code)


def test_the_folder_is_the_programs_own(python):
    """Where the kernel checks files, a program may also remove, rename and make folders there."""
    if "files" not in sandbox.available():
        pytest.skip("this kernel does not check files")
    code = (
        "import os, pathlib, shutil, tempfile\n"
        "with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as file: pathlib.Path(folder, 'a').write_text('x')\n"
        "pathlib.Path('a').write_text('x'); shutil.copyfile('a', 'b'); os.rename('b', 'c'); os.remove('a'); os.mkdir('d')\n"
        "print(sorted(os.listdir()))"
    )
    assert python(code) == "['c', 'd']"


@pytest.mark.parametrize("kind", ["python", "bare"])
@pytest.mark.parametrize(
    "code",
    [
        "x = [bytearray(1 << 20) for _ in range(4096)]",
        "x = 'a'\nwhile True: x += x",
        "import threading, time\nfor _ in range(4000): threading.Thread(target=time.sleep, args=(9,)).start()",
        "open('large', 'wb').write(bytes(2 << 20)); open('large', 'ab').write(b'1')",
        "files = [open(f'{i}', 'w') for i in range(64)]",
    ],
    ids=["memory", "text", "threads", "one file", "open files"],
)
def test_resource_bombs_are_stopped(kind, code, request):
    with pytest.raises(RuntimeError, match=r"MemoryError|can't start new thread|too large|Too many open files|signal"):
        request.getfixturevalue(kind)(code)


@pytest.mark.parametrize("kind", ["python", "bare"])
@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("import threading; t = threading.Thread(target=print, args=('so',)); t.start(); t.join()", "so"),
        ("import sqlite3; c = sqlite3.connect('a.db'); c.execute('create table t (x)'); c.execute('insert into t values (7)')\n"
         "c.commit(); print(*c.execute('select x from t'))", "(7,)"),
        ("import sqlite3; print(*sqlite3.connect(':memory:').execute('select 1'))", "(1,)"),
        ("open('x', 'w').write('1'); open('x', 'a').write('2'); print(open('x').read())", "12"),
        ("import decimal, fractions, itertools, random, re, statistics; print(statistics.mean([1, 2, 3]))", "2"),
        ("import os; print('HOME' in os.environ); open(os.devnull, 'w').write('x')", "False"),
        ("import sys; sys.exit(3)", ""),
    ],
)  # fmt: skip
def test_honest_programs_run(kind, code, answer, request):
    assert request.getfixturevalue(kind)(code) == answer


def test_it_names_its_error_as_python_does(python):
    with pytest.raises(RuntimeError, match=r"^json\.decoder\.JSONDecodeError: Expecting"):
        python("import json; json.loads('{')")
    with pytest.raises(RuntimeError, match=r"^KeyError: 'a'$"):
        python("{}['a']")
    with pytest.raises(RuntimeError, match=r"^ValueError$"):
        python("raise ValueError")


def test_a_protection_that_is_gone_stops_the_tool(python, monkeypatch):
    """Nothing falls back in silence: a layer that was there once must be there at each call."""
    monkeypatch.setattr(sandbox, "call_filter", lambda machine: b"")
    if "calls" not in sandbox.available():
        pytest.skip("this kernel has no filter of system calls")
    with pytest.raises(
        RuntimeError, match=r"the code was not run: the protection that this machine had before is missing now .calls: "
    ):
        python("print(1)")


def test_missing_protections_are_reported(monkeypatch):
    monkeypatch.setattr(sandbox, "layers", lambda: {"folder": "Operation not permitted", "files": "", "calls": ""})
    assert sandbox.unprotected() == (
        "the folder's size is checked every 20 ms, not limited by the kernel (Operation not permitted)"
    )
    with pytest.warns(UserWarning, match="the folder's size is checked every 20 ms"):
        tool = python_tool(seconds=20)
    assert tool("print(1)") == "1"


@pytest.mark.parametrize(("machine", "place"), [("x86_64", 0), ("aarch64", 1)])
def test_the_filter_ends_and_jumps_within_itself(machine, place):
    code = sandbox.call_filter(machine)
    rows = [(code[i : i + 2], code[i + 2], code[i + 3]) for i in range(0, len(code), 8)]
    assert len(rows) < 4096
    assert all(i + 1 + max(yes, no) < len(rows) for i, (kind, yes, no) in enumerate(rows) if kind != b"\x06\x00")
    assert rows[-1][0] == b"\x06\x00"


@pytest.mark.parametrize(
    ("place", "header", "pattern"),
    [
        (0, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", r"__NR_(\w+) (\d+)"),
        (1, "/usr/include/asm-generic/unistd.h", r"__NR(?:3264)?_(\w+) (\d+)"),
    ],
)
def test_the_numbers_are_those_of_the_kernels_headers(place, header, pattern):
    if not Path(header).exists():
        pytest.skip(f"{header} is not installed")
    there = {name: int(number) for name, number in re.findall(pattern, Path(header).read_text())}
    there |= {"newfstatat": there["newfstatat" if place == 0 else "fstatat"]}
    special = {"clone": sandbox.CLONE, "clone3": sandbox.CLONE3, "prlimit64": sandbox.PRLIMIT, "ioctl": sandbox.IOCTL}
    wrong = {
        name: (numbers[place], there.get(name))
        for name, numbers in (sandbox.CALLS | special).items()
        if there.get(name, numbers[place]) != numbers[place]
    }
    assert wrong == {}
