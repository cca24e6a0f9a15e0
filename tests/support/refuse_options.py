"""Starts a program whose kernel refuses what Crux sets on sockets, as a container's may.

    python refuse_options.py ERRNO PROGRAM [ARGUMENT ...]

A seccomp filter answers ERRNO to setsockopt() with IP_TOS, IPV6_TCLASS, SO_MAX_PACING_RATE,
IP_RECVERR and IPV6_RECVERR, in the program and all that it starts; seccomp(2).
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import struct
import sys

#: AUDIT_ARCH_* of linux/audit.h and the number of setsockopt().
ARCHITECTURES = {"x86_64": (0xC000003E, 54), "aarch64": (0xC00000B7, 208)}
SO_MAX_PACING_RATE, IP_RECVERR, IPV6_RECVERR = 47, 11, 25
REFUSED = (
    (socket.IPPROTO_IP, socket.IP_TOS),
    (socket.IPPROTO_IPV6, socket.IPV6_TCLASS),
    (socket.SOL_SOCKET, SO_MAX_PACING_RATE),
    (socket.IPPROTO_IP, IP_RECVERR),
    (socket.IPPROTO_IPV6, IPV6_RECVERR),
)
#: linux/bpf_common.h: load a word of struct seccomp_data; jump if equal; return.
LOAD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06
NUMBER_AT, ARCHITECTURE_AT, LEVEL_AT, OPTION_AT = 0, 4, 24, 32
SECCOMP_ALLOW, SECCOMP_ERRNO = 0x7FFF0000, 0x00050000
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def instructions(refusal: int) -> list[tuple[int, int, int, int]]:
    """The filter: operation, jump if true, jump if false, operand."""
    architecture, number = ARCHITECTURES[platform.machine()]
    allow = (RETURN, 0, 0, SECCOMP_ALLOW)
    program = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (JUMP_EQUAL, 1, 0, architecture),
        allow,
        (LOAD, 0, 0, NUMBER_AT),
        (JUMP_EQUAL, 1, 0, number),
        allow,
    ]
    for level, option in REFUSED:
        program += [
            (LOAD, 0, 0, LEVEL_AT),
            (JUMP_EQUAL, 0, 3, level),
            (LOAD, 0, 0, OPTION_AT),
            (JUMP_EQUAL, 0, 1, option),
            (RETURN, 0, 0, SECCOMP_ERRNO | refusal),
        ]
    return [*program, allow]


def install(refusal: int) -> None:
    """Filter this process and its children.

    Raises:
        OSError: the kernel has no seccomp filters.
        KeyError: the processor is none of ``ARCHITECTURES``.
    """
    packed = b"".join(struct.pack("=HBBI", *each) for each in instructions(refusal))
    held = ctypes.create_string_buffer(packed, len(packed))
    program = Program(len(packed) // 8, ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    install(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
