"""A seccomp filter for untrusted programs: calls that they never need, and that would open a way around a limit.

Standard library only; mounted beside ``inside.py``. The namespaces and rlimits are the walls; this closes what
they leave: memory that no rlimit counts (System V segments, memory files), sockets, the resource limits of other
processes (the supervisor has the program's uid), and parts of the kernel with a history of faults.
"""

import ctypes
import errno
import os
import struct

# Name, then the number on x86_64 and on aarch64 (Linux ``unistd.h`` of each).
_DENIED = (
    ("ptrace", 101, 117), ("process_vm_readv", 310, 270), ("process_vm_writev", 311, 271), ("kcmp", 312, 272),
    ("shmget", 29, 194), ("msgget", 68, 186), ("semget", 64, 190), ("mq_open", 240, 180),
    ("memfd_create", 319, 279), ("memfd_secret", 447, 447), ("socket", 41, 198), ("socketpair", 53, 199),
    ("io_uring_setup", 425, 425), ("unshare", 272, 97), ("setns", 308, 268), ("pivot_root", 155, 41),
    ("fsopen", 430, 430), ("open_tree", 428, 428), ("move_mount", 429, 429),
    ("add_key", 248, 217), ("request_key", 249, 218), ("keyctl", 250, 219), ("bpf", 321, 280),
    ("perf_event_open", 298, 241), ("userfaultfd", 323, 282), ("personality", 135, 92),
)  # fmt: skip
# Of others only: its first argument must be 0, which is oneself.
_PRLIMIT64 = (302, 261)
# Takes its flags in memory, where a filter cannot see them. "Not there" makes libc use the older call.
_CLONE3 = 435
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32_BIT = 0x40000000

_PR_SET_NO_NEW_PRIVS, _PR_GET_SECCOMP, _PR_SET_SECCOMP, _MODE_FILTER = 38, 21, 22, 2
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_OR_EQUAL, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _MACHINE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16


def filter_program() -> bytes:
    """The filter for this machine, as an array of ``struct sock_filter``.

    Raises:
        KeyError: the machine is not one of those whose numbers we know.
    """
    column, machine = _MACHINES[os.uname().machine]
    deny, missing = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    steps = [
        (_LOAD, 0, 0, _MACHINE_AT),
        (_JUMP_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    if machine == _MACHINES["x86_64"][1]:
        steps += [(_JUMP_GREATER_OR_EQUAL, 0, 1, _X32_BIT), (_RETURN, 0, 0, _KILL)]
    for _name, *numbers in _DENIED:
        steps += [(_JUMP_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, deny)]
    steps += [(_JUMP_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, missing)]
    steps += [
        (_JUMP_EQUAL, 0, 3, _PRLIMIT64[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_JUMP_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, deny),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def install() -> bool:
    """Filter this process and all that it starts, for good; False where this kernel or machine cannot.

    Raises:
        OSError: the kernel refuses although it can.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if os.uname().machine not in _MACHINES or libc.prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) < 0:
        return False
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    program = filter_program()
    buffer = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer)))
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, header, 0, 0) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"install the system-call filter: {os.strerror(number)}")
    return True
