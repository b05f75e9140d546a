"""The process of `python_tool`: set limits and kernel layers, add a hook, then run the model's program.

It is run as a script of its own and imports nothing of strop. Arguments: seconds, megabytes, bytes of a file, bytes of
the folder, the folder, the layers to set (or "probe"), the system call filter in hexadecimal digits. A layer that
cannot be set ends the process with NOT_PROTECTED before the program begins; "probe" prints which layers can be set.
"""

import os
import resource
import sys

NOT_PROTECTED = 97
NEW_USER, NEW_MOUNTS = 0x10000000, 0x00020000  # flags of unshare
NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER = 38, 22, 2  # arguments of prctl
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # Landlock's calls, on every architecture
MAX_FILES, MAX_NODES = 32, 1000  # maximum number of open files; of files in the folder


def protect(layers, total, folder, call_filter):
    """Set the layers in this order; yield (layer, error or None) for each."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    libc.prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)

    def check(result):
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result

    def limit_folder():
        """Mount a file system of this size over the folder; it is gone when the process ends."""
        user, group = os.getuid(), os.getgid()
        check(libc.unshare(NEW_USER | NEW_MOUNTS))
        maps = (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1"))
        for name, text in maps:
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
        place, options = folder.encode(), f"size={total},nr_inodes={MAX_NODES},mode=700".encode()
        check(libc.mount(b"tmpfs", place, b"tmpfs", ctypes.c_ulong(2 | 4), options))  # no setuid, no devices
        os.chdir(folder)

    def limit_files():
        """Set Landlock: write in the folder and to /dev/null only; run no program; reach no process outside."""
        abi = check(libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1))
        write, truncate = 1 << 1, (1 << 14) * (abi >= 3)
        in_folder = write | truncate | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8  # also remove and make folders and files
        handled = (1 << 13) - 1 - (1 << 2 | 1 << 3)  # all rights of the first version but reading files and folders
        handled |= truncate | (1 << 13) * (abi >= 2) | (1 << 15) * (abi >= 5)
        sizes = 8 * (1 + (abi >= 4) + (abi >= 6))
        attributes = (ctypes.c_uint64 * 3)(handled, 3, 3)  # no TCP; no signals or abstract sockets to the outside
        rules = check(libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(sizes), 0))
        for path, rights in ((folder, in_folder), (os.devnull, write | truncate)):
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = rights.to_bytes(8, sys.byteorder) + place.to_bytes(4, sys.byteorder)
            check(libc.syscall(ADD_RULE, rules, 1, rule, 0))
            os.close(place)
        check(libc.syscall(RESTRICT_SELF, rules, 0))
        os.close(rules)

    def limit_calls():
        """Drop all capabilities, then allow only the system calls of the filter (seccomp)."""
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        check(libc.capset(header, (ctypes.c_uint32 * 6)()))
        program = ctypes.create_string_buffer(call_filter, len(call_filter))
        length = (len(call_filter) // 8).to_bytes(8, sys.byteorder)  # 2 bytes and padding on little-endian machines
        address = ctypes.addressof(program).to_bytes(8, sys.byteorder)
        check(libc.prctl(SET_SECCOMP, FILTER, length + address, 0, 0))

    check(libc.prctl(NO_NEW_PRIVILEGES, 1, None, 0, 0))
    for name, set_layer in (("folder", limit_folder), ("files", limit_files), ("calls", limit_calls)):
        if layers == "probe" or name in layers.split(","):
            try:
                set_layer()
            except (OSError, AttributeError) as error:
                yield name, error
            else:
                yield name, None


def refuser(folder, kernel_checks_files):
    """Return an audit hook that refuses events with a readable message. It cannot be removed again."""
    refused: tuple[str, ...] = (
        "socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.kill", "ctypes.", "pty.", "os.chmod",
        "os.chown", "os.lchown", "os.link", "os.symlink", "os.truncate", "os.utime", "os.setxattr", "os.removexattr", "os.chflags",
        "signal.pthread_kill",
    )  # fmt: skip
    if not kernel_checks_files:  # otherwise these work in the folder, as `tempfile` needs, and nowhere else
        refused += ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "shutil.")
    absolute, real_path, own = os.path.isabs, os.path.realpath, f"/proc/{os.getpid()}/"
    write_flags = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def is_inside(path):
        return isinstance(path, str) and (real_path(path) + os.sep).startswith(folder + os.sep)

    def refuse(event, arguments):
        if event == "open":
            path, mode, flags = (*arguments, None, None)[:3]
            writes = isinstance(flags, int) and flags & write_flags
            # a path that may be relative to another folder
            beside_folder = mode is None and isinstance(path, str) and not absolute(path)
            if writes and path != os.devnull and (not is_inside(path) or (beside_folder and not kernel_checks_files)):
                raise PermissionError(f"files may be written in the tool's own folder only, not {path!r}")
            if isinstance(path, str) and "proc" in path:
                real = real_path(path)
                if real[:6] == "/proc/" and real[6:7].isdigit() and not real.startswith(own):
                    raise PermissionError(f"the tool does not allow reading other processes, {path!r}")
        elif event == "sqlite3.connect":
            path = os.fsdecode(arguments[0])
            if path not in (":memory:", "") and (not is_inside(path) or path.startswith("file:")):
                raise PermissionError(f"files may be written in the tool's own folder only, not {path!r}")
        elif event.startswith(refused):
            raise PermissionError(f"the tool does not allow {event}")

    return refuse


def remove_functions():
    """Replace functions that raise no audit event by functions that refuse."""
    import _posixsubprocess
    import posix
    import signal

    def refusing(name):
        def refuse(*_, **__):
            raise PermissionError(f"the tool does not allow {name}")

        return refuse

    names = (
        "mkfifo", "mknod", "setpriority", "nice", "sched_setscheduler", "sched_setparam", "sched_setaffinity", "pidfd_open",
        "memfd_create", "unshare", "setns", "chroot", "setuid", "setgid",
    )  # fmt: skip
    others = ((signal, "pidfd_send_signal"), (_posixsubprocess, "fork_exec"), (resource, "prlimit"))
    for module, name in (*((os, name) for name in names), *((posix, name) for name in names), *others):
        if hasattr(module, name):
            setattr(module, name, refusing(f"{'os' if module is posix else module.__name__}.{name}"))


def describe(error):
    """Return the last line of an error as Python prints it, without importing traceback."""
    kind, said = type(error), getattr(error, "msg", None) if isinstance(error, SyntaxError) else str(error)
    name = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    name += kind.__qualname__
    return f"{name}: {said}".strip().splitlines()[-1].removesuffix(": ").removesuffix(":")


def main():
    seconds, megabytes, largest, total = map(int, sys.argv[1:5])
    folder, layers, call_filter = sys.argv[5:8]
    code = sys.stdin.read()
    limits = (
        (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, megabytes << 20), (resource.RLIMIT_FSIZE, largest),
        (resource.RLIMIT_NOFILE, MAX_FILES), (resource.RLIMIT_CORE, 0),
    )  # fmt: skip
    for limit, most in limits:
        resource.setrlimit(limit, (most, most))
    if layers:
        for name, error in protect(layers, total, folder, bytes.fromhex(call_filter)):
            if layers == "probe":
                print(f"{name}:{error or ''}")
            elif error is not None:
                print(f"{name}: {error}")
                sys.exit(NOT_PROTECTED)
        for name in [name for name in sys.modules if "ctypes" in name]:
            del sys.modules[name]
    remove_functions()
    sys.addaudithook(refuser(folder, "files" in layers.split(",")))
    try:
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
    except BaseException as error:
        if not isinstance(error, SystemExit):
            print(describe(error))
            sys.exit(1)


if __name__ == "__main__":
    main()
