"""Which libibverbs NCCL has found, and which address vectors it asks for and gets."""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass
from typing import Any

from lab.nccl.library import Detour, Library

_MODIFY = "ibv_modify_qp"
_Modify = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
#: Where struct ibv_qp_attr, which begins with the state, has them.
_PEER_AT, _FLOW_LABEL_AT, _CLASS_AT, _LEVEL_AT = 28, 72, 78, 82
_READY_TO_RECEIVE = 2


@dataclass(frozen=True)
class AddressVector:
    """What of it says how packets are sent.

    Attributes:
        traffic_class: the byte of DSCP and ECN.
        service_level: of the queue in the device.
        flow_label: decides the UDP source port; 0: the device does.
    """

    traffic_class: int
    service_level: int
    flow_label: int

    @classmethod
    def of(cls, attributes: int) -> AddressVector:
        """That of the struct ibv_qp_attr at ``attributes``."""
        of_class = ctypes.c_uint8.from_address(attributes + _CLASS_AT).value
        level = ctypes.c_uint8.from_address(attributes + _LEVEL_AT).value
        return cls(of_class, level, _word(attributes + _FLOW_LABEL_AT))


class Verbs:
    """NCCL's table of libibverbs' functions, once a ``Net`` of ``ncclNetIb`` has filled it.

    Attributes:
        origins: the file that each function was found in.
        connected: for each queue pair that NCCL has connected since: the number of its peer, what
            NCCL asked for, and what the installed libibverbs was given. (A device need not tell:
            rxe keeps no service level.)
    """

    def __init__(self, library: Library) -> None:
        slots = library.words("ibvSymbols")
        found = {i: _symbol(address) for i, address in enumerate(slots) if address}
        self.origins = dict(found.values())
        self.connected: list[dict[str, Any]] = []
        (slot,) = (i for i, (name, _) in found.items() if name == _MODIFY)
        self._nccls = _Modify(slots[slot])
        self._asking = _Modify(self._ask)
        slots[slot] = ctypes.cast(self._asking, ctypes.c_void_p).value or 0
        # No shim defines this one: it is in the installed library.
        real = getattr(ctypes.CDLL(self.origins["ibv_query_qp"]), _MODIFY)
        address = ctypes.cast(real, ctypes.c_void_p).value or 0
        self._real = _Modify(address)
        self._detour = Detour(address, _Modify(self._give))

    def _ask(self, pair: int, attributes: int, mask: int) -> int:
        self._asked = AddressVector.of(attributes)
        error: int = self._nccls(pair, attributes, mask)
        return error

    def _give(self, pair: int, attributes: int, mask: int) -> int:
        given = AddressVector.of(attributes)
        self._detour.lift()
        error: int = self._real(pair, attributes, mask)
        self._detour.put()
        if not error and _word(attributes) == _READY_TO_RECEIVE:
            told = {"asked": asdict(self._asked), "given": asdict(given)}
            self.connected.append({"peer": _word(attributes + _PEER_AT), **told})
        return error


def _word(address: int) -> int:
    return ctypes.c_uint32.from_address(address).value


class _Found(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _symbol(address: int) -> tuple[str, str]:
    found = _Found()
    if not ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(found)):
        raise RuntimeError(f"{address:#x} is in no library")
    return (found.name or b"").decode(), (found.file or b"").decode()
