"""System calls that lead out of a sandbox past its namespaces, closed by a filter in the kernel.

Invariant: the only sockets are of families that a network namespace contains (AF_VSOCK, for one, reaches the hypervisor
from every namespace), and no key is left in the kernel's keyring, which outlives a reset and is shared by all of one
user. io_uring would be a way around the first, and programs of another architecture around both.
"""

import platform
import struct

_FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK

# Of each machine: its audit architecture, and the numbers of socket, add_key, request_key, keyctl, io_uring_setup.
_MACHINES = {
    "x86_64": (0xC000003E, 41, (248, 249, 250, 425)),
    "aarch64": (0xC00000B7, 198, (217, 218, 219, 425)),
}
_X32 = 0x40000000  # calls of x86_64's third interface have this bit, under the same architecture

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # BPF
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # where in struct seccomp_data
_ALLOW, _NO_SUCH_CALL, _NO_SUCH_FAMILY = 0x7FFF0000, 0x00050000 | 38, 0x00050000 | 97  # ERRNO: ENOSYS, EAFNOSUPPORT


def program() -> bytes | None:
    """For bubblewrap's --seccomp; None on a machine whose numbers are not known here."""
    if platform.machine() not in _MACHINES:
        return None
    architecture, socket, closed = _MACHINES[platform.machine()]
    refused = [(_EQUAL, number, _NO_SUCH_CALL) for number in closed]
    return b"".join(
        [
            _step(_LOAD, _ARCHITECTURE),
            _step(_EQUAL, architecture, skip=1),
            _step(_RETURN, _NO_SUCH_CALL),
            _step(_LOAD, _NUMBER),
            *(_unless(*rule) for rule in [(_AT_LEAST, _X32, _NO_SUCH_CALL), *refused]),
            _step(_EQUAL, socket, skip=1),
            _step(_RETURN, _ALLOW),
            _step(_LOAD, _FIRST_ARGUMENT),
            *(_unless(_EQUAL, family, _ALLOW) for family in _FAMILIES),
            _step(_RETURN, _NO_SUCH_FAMILY),
        ]
    )


def _unless(compare: int, value: int, answer: int) -> bytes:
    """Go on unless it compares; then that is the answer."""
    return _step(compare, value, otherwise=1) + _step(_RETURN, answer)


def _step(code: int, value: int, skip: int = 0, otherwise: int = 0) -> bytes:
    """One struct sock_filter: how many steps to skip if the comparison holds, and if not."""
    return struct.pack("=HBBI", code, skip, otherwise, value)
