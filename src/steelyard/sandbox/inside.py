"""What runs inside a sandbox: the nursery, the supervisor of one sandbox, and the child of one run.

Standard library only: this file is mounted into the sandbox and run there by path, never imported from
``steelyard`` inside. The host imports it for the wire format alone.

::

    host ==control==> nursery (pid 1 of bubblewrap)            "start 7" + a socket, "kill 7"; answers "gone 7"
                        |- clone into new namespaces
    host ==socket 7=> supervisor 7 (pid 1 of its own)          run, put, get, name; one reply each
                        |- fork                                 fresh for each run, killed with all it started
                        v
                      untrusted program                         has fds 0, 1, 2 (pipes) and nothing else

Without a nursery, bubblewrap starts the supervisor directly. Trust ends at the fork: whatever the program
does to the interpreter that it got, it does to its own copy. The supervisor tells the host how the child
ended from ``wait`` alone, never from anything that the child said.

*consumes* requests on a socket; *waits for* the child, at most until its deadline; *unblocked by* its exit,
the deadline, too much output, or the host closing the socket; *produces* one reply a request.
"""

import ctypes
import gc
import importlib
import json
import math
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
import traceback
import types
from typing import NoReturn

# One request: operation, deadline in seconds, bytes of the first and of the second part that follow.
REQUEST = struct.Struct("!cdII")
# One reply: status, return code, duration in seconds, bytes of the first and of the second part that follow.
REPLY = struct.Struct("!BidII")
# Nursery control, both ways: operation, number of the sandbox.
NOTICE = struct.Struct("!cI")

RUN, PUT, GET, NAME = b"r", b"p", b"g", b"n"
START, KILL, GONE, READY = b"s", b"k", b"g", b"R"
OK, CRASHED, TIMED_OUT, OUTPUT_LIMIT, MEMORY_LIMIT, KILLED, REFUSED = range(7)

WORK_DIRECTORY = "/box"
# How a child says that it ran out of memory. A program can say so too; either way it failed.
_MEMORY_EXIT = 97
_CHUNK_BYTES = 65_536

_CLONE_NEW = 0x20000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000  # mount, uts, ipc, user, pid
_CLONE_NEWNET = 0x40000000
_CLONE_NUMBERS = {"x86_64": 56, "aarch64": 220}
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 15, 36, 38
_CAPABILITY_VERSION_3 = 0x20080522

# PyDLL keeps the interpreter's lock through the call, as a fork must.
_libc = ctypes.PyDLL(None, use_errno=True)
# In a new user namespace we have no ids until they are mapped; these are mapped to themselves.
_OUTER_IDS = (os.getuid(), os.getgid())
# Loaded before the first fork, so that a program that imports them pays nothing.
_WARM_MODULES = (
    "function_driver", "syscall_filter", "bisect", "collections", "copy", "functools", "heapq", "itertools",
    "operator", "random", "re", "string", "typing",
)  # fmt: skip


class Limits:
    """Bounds of one run, in bytes, counts and seconds; read from the JSON that the host passes."""

    def __init__(self, text: str) -> None:
        values = json.loads(text)
        self.memory_bytes: int = values["memory_bytes"]
        self.max_processes: int = values["max_processes"]
        self.max_output_bytes: int = values["max_output_bytes"]
        self.max_file_bytes: int = values["max_file_bytes"]
        self.max_disk_bytes: int = values["max_disk_bytes"]
        self.max_open_files: int = values["max_open_files"]


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


# --- the nursery ----------------------------------------------------------------------------------


def serve_nursery(control: socket.socket, limits: Limits, is_filtered: bool) -> NoReturn:
    """Start and kill sandboxes as the host says, until it closes the control socket.

    Ending is enough: this is pid 1, so the kernel kills every sandbox with it.
    """
    pids: dict[int, int] = {}
    watched: dict[int, int] = {}
    poller = select.poll()
    poller.register(control, select.POLLIN)
    control.send(NOTICE.pack(READY, 0))
    while True:
        for fd, _ in poller.poll():
            if fd == control.fileno():
                number = _obey(control, pids, limits, is_filtered)
                if number is not None:
                    watch = os.pidfd_open(pids[number])
                    watched[watch] = number
                    poller.register(watch, select.POLLIN)
            else:
                # The exit of pid 1 of a namespace is seen only when all others in it are gone.
                number = watched.pop(fd)
                poller.unregister(fd)
                os.close(fd)
                os.waitpid(pids.pop(number), 0)
                control.send(NOTICE.pack(GONE, number))


def _obey(control: socket.socket, pids: dict[int, int], limits: Limits, is_filtered: bool) -> int | None:
    """Carry out one notice; the number of the sandbox that it started, if it did."""
    message, fds, _, _ = socket.recv_fds(control, NOTICE.size, 1)
    if len(message) < NOTICE.size:
        os._exit(0)
    operation: bytes
    number: int
    operation, number = NOTICE.unpack(message)
    if operation == KILL:
        if number in pids:
            os.kill(pids[number], signal.SIGKILL)
        return None
    pid = _clone_into_new_namespaces(is_filtered)
    if pid == 0:
        control.close()
        _become_supervisor(socket.socket(fileno=fds[0]), limits)
    for fd in fds:
        os.close(fd)
    if pid < 0:
        # The socket is closed unanswered, which tells the host; there is no process to watch.
        control.send(NOTICE.pack(GONE, number))
        return None
    pids[number] = pid
    return number


def _clone_into_new_namespaces(is_filtered: bool) -> int:
    """Like ``fork``, but the child is pid 1 of new namespaces; one fork less than ``unshare`` would need.

    Where no program can make a socket, all share the nursery's network namespace, which has no devices: making
    and unmaking one each would cost as much as all the rest.
    """
    flags = _CLONE_NEW if is_filtered else _CLONE_NEW | _CLONE_NEWNET
    number = _CLONE_NUMBERS[os.uname().machine]
    ctypes.pythonapi.PyOS_BeforeFork()
    pid: int = _libc.syscall(number, flags | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return pid


def _become_supervisor(requests: socket.socket, limits: Limits) -> NoReturn:
    status = 1
    try:
        _set_up_namespaces(limits)
        serve_sandbox(requests, limits)
    except OSError as error:
        requests.sendall(_pack_reply(REFUSED, 0, 0.0, b"", str(error).encode()))
    finally:
        os._exit(status)


def _set_up_namespaces(limits: Limits) -> None:
    """The parts that bubblewrap does where there is no nursery: ids, own disk, nothing of others in sight."""
    uid, gid = _OUTER_IDS
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        _write(f"/proc/self/{name}", text)
    # No namespace below this one: a program must not become root in one of its own.
    _write("/proc/sys/user/max_user_namespaces", "0")
    num_inodes = max(64, limits.max_disk_bytes // 4096)
    options = f"size={limits.max_disk_bytes},nr_inodes={num_inodes},mode=0700,uid={uid},gid={gid}"
    _mount_tmpfs(WORK_DIRECTORY, _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, options)
    _mount_tmpfs("/proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC | _MS_RDONLY, "size=4k,nr_inodes=1")
    os.chdir(WORK_DIRECTORY)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, text.encode())
    os.close(fd)


def _mount_tmpfs(path: str, flags: int, options: str) -> None:
    _check(_libc.mount(b"none", path.encode(), b"tmpfs", flags, options.encode()), f"mount a tmpfs at {path}")


# --- the supervisor of one sandbox ----------------------------------------------------------------


def serve_sandbox(requests: socket.socket, limits: Limits) -> NoReturn:
    """Answer requests until the host closes the socket; then end, and everything in the sandbox with us."""
    _give_up_privileges()
    requests.sendall(_pack_reply(OK, 0, 0.0, b"", b""))
    while True:
        head = _receive(requests, REQUEST.size)
        operation, deadline_s, num_first, num_second = REQUEST.unpack(head)
        first = _receive(requests, num_first)
        second = _receive(requests, num_second)
        requests.sendall(_answer(requests, (operation, deadline_s, first, second), limits))


def _give_up_privileges() -> None:
    # Not dumpable: nobody may trace us or open our memory, though the program has our uid.
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, bytes(24)), "drop all capabilities")
    # Pid 1 gets only signals that it handles; Python's handler of this one would raise.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _receive(requests: socket.socket, num_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < num_bytes:
        try:
            part = requests.recv(min(num_bytes - len(parts), 1 << 20))
        except ConnectionResetError:
            part = b""
        if not part:
            os._exit(0)
        parts += part
    return bytes(parts)


def _pack_reply(status: int, returncode: int, duration_s: float, first: bytes, second: bytes) -> bytes:
    return REPLY.pack(status, returncode, duration_s, len(first), len(second)) + first + second


def _answer(requests: socket.socket, request: tuple[bytes, float, bytes, bytes], limits: Limits) -> bytes:
    operation, deadline_s, first, second = request
    if operation == RUN:
        return _pack_reply(*_Run(requests, second, limits).run(first, deadline_s))
    try:
        if operation == PUT:
            _put(first.decode(), second, limits)
            return _pack_reply(OK, 0, 0.0, b"", b"")
        if operation == GET:
            return _pack_reply(OK, 0, 0.0, _get(first.decode(), limits), b"")
    except (OSError, ValueError) as error:
        return _pack_reply(REFUSED, 0, 0.0, b"", str(error).encode())
    _libc.prctl(_PR_SET_NAME, first, 0, 0, 0)
    return _pack_reply(OK, 0, 0.0, b"", b"")


def _put(name: str, data: bytes, limits: Limits) -> None:
    if len(data) > limits.max_file_bytes:
        raise ValueError(f"a file must be <= {limits.max_file_bytes} bytes, got {len(data)} for {name!r}")
    # A new file each time: what the program may have put there (a link, a pipe) is replaced, not followed.
    temporary = f".new-{time.monotonic_ns()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)
    os.replace(temporary, name)  # noqa: PTH105


def _get(name: str, limits: Limits) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError(f"{name!r} must be a regular file")
        parts = bytearray()
        while part := os.read(fd, _CHUNK_BYTES):
            parts += part
            if len(parts) > limits.max_file_bytes:
                raise ValueError(f"a file must be <= {limits.max_file_bytes} bytes to be read, got more in {name!r}")
        return bytes(parts)
    finally:
        os.close(fd)


class _Run:
    """One run of one program."""

    def __init__(self, requests: socket.socket, stdin: bytes, limits: Limits) -> None:
        self._requests = requests
        self._limits = limits
        self._to_write = memoryview(stdin)
        self._stdin, self._stdout, self._stderr = -1, -1, -1
        self._output: dict[int, bytearray] = {}
        self._num_output_bytes = 0
        self._has_too_much_output = False

    def run(self, program: bytes, deadline_s: float) -> tuple[int, int, float, bytes, bytes]:
        """Fork, watch, kill all that is left; status, return code, seconds, stdout, stderr."""
        started = time.monotonic()
        (stdin, self._stdin), (self._stdout, stdout), (self._stderr, stderr) = os.pipe(), os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            _be_the_child(program, (stdin, stdout, stderr), deadline_s, self._limits)
        for fd in (stdin, stdout, stderr):
            os.close(fd)
        self._output = {self._stdout: bytearray(), self._stderr: bytearray()}
        for fd in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(fd, False)
        is_in_time = self._watch(pid, started + deadline_s)
        returncode = os.waitstatus_to_exitcode(end_all_children(pid))
        duration_s = time.monotonic() - started
        self._drain()
        status = _status_of(returncode) if is_in_time else TIMED_OUT
        if self._has_too_much_output:
            status = OUTPUT_LIMIT
        stdout_bytes, stderr_bytes = (bytes(part) for part in self._output.values())
        return status, returncode, duration_s, stdout_bytes, stderr_bytes

    def _watch(self, pid: int, deadline: float) -> bool:
        """Move data until the child ends or writes too much; False where the deadline came first."""
        ended = os.pidfd_open(pid)
        poller = select.poll()
        for fd in (self._requests.fileno(), ended, self._stdout, self._stderr):
            poller.register(fd, select.POLLIN)
        poller.register(self._stdin, select.POLLOUT)
        try:
            while (left_s := deadline - time.monotonic()) > 0:
                for fd, _ in poller.poll(math.ceil(left_s * 1000)):
                    if fd == ended:
                        return True
                    if fd == self._requests.fileno():
                        # Closed, or a second request: the host has given this sandbox up.
                        end_all_children(pid)
                        os._exit(0)
                    if not (self._feed() if fd == self._stdin else self._take(fd)):
                        poller.unregister(fd)
                    if self._has_too_much_output:
                        return True
            return False
        finally:
            os.close(ended)

    def _feed(self) -> bool:
        """Write what the pipe takes; whether there is more to write. The program then sees the end of its input."""
        try:
            self._to_write = self._to_write[os.write(self._stdin, self._to_write[:_CHUNK_BYTES]) :]
        except BrokenPipeError:
            self._to_write = self._to_write[:0]
        if not self._to_write:
            os.close(self._stdin)
            self._stdin = -1
        return bool(self._to_write)

    def _take(self, fd: int) -> bool:
        """Read what is there, up to the limit; whether there can be more."""
        room = self._limits.max_output_bytes - self._num_output_bytes
        part = os.read(fd, min(_CHUNK_BYTES, room + 1))
        self._has_too_much_output = len(part) > room
        self._output[fd] += part[:room]
        self._num_output_bytes += len(part[:room])
        return bool(part) and not self._has_too_much_output

    def _drain(self) -> None:
        for fd in (self._stdout, self._stderr):
            # All writers are dead, so this ends.
            while not self._has_too_much_output and self._take(fd):
                pass
            os.close(fd)
        if self._stdin >= 0:
            os.close(self._stdin)


def _status_of(returncode: int) -> int:
    if returncode == 0:
        return OK
    if returncode == _MEMORY_EXIT:
        return MEMORY_LIMIT
    if returncode == -signal.SIGXCPU:
        return TIMED_OUT
    return KILLED if returncode == -signal.SIGKILL else CRASHED


def end_all_children(pid: int) -> int:
    """Kill and reap everything that the run left; the wait status of child ``pid``.

    As pid 1 one signal reaches all, atomically against forks: a process with a pending SIGKILL cannot
    add a child. Elsewhere (``sandbox.kind: process``) it is done child by child, and orphans come to us.
    """
    wait_status = 0
    while True:
        for target in [-1] if os.getpid() == 1 else _children():
            try:
                os.kill(target, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            ended, its_status = os.waitpid(-1, 0)
        except ChildProcessError:
            return wait_status
        if ended == pid:
            wait_status = its_status


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:  # noqa: PTH123  pathlib costs memory in each child
        return [int(word) for word in file.read().split()]


# --- the child: from here on nothing can be trusted -----------------------------------------------


def _be_the_child(program: bytes, standard: tuple[int, int, int], deadline_s: float, limits: Limits) -> NoReturn:
    status = 1
    try:
        # Needless in a pid namespace; elsewhere the supervisor may be killed alone.
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setsid()
        for number, fd in enumerate(standard):
            os.dup2(fd, number)
        os.closerange(3, 1 << 20)
        _limit_self(deadline_s, limits)
        status = _execute(program)
    except MemoryError:
        status = _MEMORY_EXIT
    finally:
        os._exit(status)


def _limit_self(deadline_s: float, limits: Limits) -> None:
    bounds = {
        resource.RLIMIT_AS: limits.memory_bytes,
        resource.RLIMIT_CPU: math.ceil(deadline_s) + 1,
        resource.RLIMIT_FSIZE: limits.max_file_bytes,
        resource.RLIMIT_NOFILE: limits.max_open_files,
        resource.RLIMIT_CORE: 0,
    }
    if os.getppid() == 1:
        # Counted per user namespace; the supervisor is one. Outside a namespace it would count the user's own.
        bounds[resource.RLIMIT_NPROC] = limits.max_processes + 1
    for what, bound in bounds.items():
        resource.setrlimit(what, (bound, bound))


def _execute(program: bytes) -> int:
    """Run the program as ``__main__``; its exit code. Threads and exit handlers do not outlive its last line."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = ["program"]
    try:
        exec(compile(program, "<program>", "exec"), main.__dict__)
        status = 0
    except SystemExit as request:
        status = _exit_code(request)
    except BaseException as error:  # noqa: BLE001  anything that a program can raise is its result
        # Without our own frame, which the program's author does not know.
        traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        status = _MEMORY_EXIT if isinstance(error, MemoryError) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _exit_code(request: SystemExit) -> int:
    if request.code is None:
        return 0
    if isinstance(request.code, int):
        return request.code & 0xFF
    sys.stderr.write(f"{request.code}\n")
    return 1


def main() -> NoReturn:
    """``inside.py nursery|sandbox CONTROL_FD LIMITS_JSON``"""
    role, control_fd, text = sys.argv[1:]
    limits = Limits(text)
    control = socket.socket(fileno=int(control_fd))
    sys.path.append(os.path.dirname(__file__))  # noqa: PTH120  pathlib costs memory in each child
    for name in _WARM_MODULES:
        importlib.import_module(name)
    is_filtered = os.getpid() == 1 and bool(importlib.import_module("syscall_filter").install())
    # What is loaded now is shared by all that fork from here; the collector must not touch those pages.
    gc.collect()
    gc.freeze()
    if role == "nursery":
        serve_nursery(control, limits, is_filtered)
    serve_sandbox(control, limits)


if __name__ == "__main__":
    main()
