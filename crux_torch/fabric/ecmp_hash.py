"""The path of a source port by the hash that the operator says a switch uses, without probing.

A named hash is a claim, and a wrong one sends flows where nobody wants them. So it is used only
after a few probes agreed with it: :func:`check_against`.

Linux routers can't be computed from outside: their multipath hash is a SipHash under a random key
of the boot, or under ``fib_multipath_hash_seed`` which stays in the router. Probe those.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Literal, cast, get_args

import msgspec

from crux_torch.errors import CruxError
from crux_torch.fabric.ecmp import Algorithm, EcmpHash, Field, FiveTuple
from crux_torch.fabric.path_map import PathMap, draws_needed
from crux_torch.fabric.topology import Topology, TopologyError

_FIELDS: dict[str, Field] = {
    "src": "src",
    "dst": "dst",
    "protocol": "protocol",
    "sport": "src_port",
    "dport": "dst_port",
}
_PROTOCOL = {"tcp": 6, "udp": 17}
_DEFAULT_FIELDS: tuple[Field, ...] = ("src", "dst", "src_port", "dst_port", "protocol")
_RSS_FIELDS: tuple[Field, ...] = ("src", "dst", "src_port", "dst_port")

Reduction = Literal["modulo", "threshold"]


class HashError(CruxError, ValueError):
    """A hash that can't be read, or that probes contradict: what is wrong, what was expected."""


@dataclass(frozen=True, slots=True)
class SwitchHash:
    """How the switches of one layer choose among their next hops.

    Attributes:
        ttl: of packets that expire at the next hop: 2 for what the first switch chooses.
        next_hops: for each bucket the addresses of which one answers there, in the order of the
            buckets; empty: to be learned from probes, in which case ``buckets`` must be given.
        hash: of the 5-tuple.
        buckets: that digests fall into; of more buckets than next hops, each takes its turn.
        shift: bits to drop at the low end of a digest.
        reduction: ``modulo``: the rest of the division by ``buckets``; ``threshold``: equal
            regions of the hash space (RFC 2992).
    """

    ttl: int
    next_hops: tuple[frozenset[str], ...] = ()
    hash: EcmpHash = field(default_factory=EcmpHash)
    buckets: int = 0
    shift: int = 0
    reduction: Reduction = "modulo"

    def __post_init__(self) -> None:
        if not 1 <= self.ttl <= 64:
            raise HashError(f"hash ttl={self.ttl}; expected 1 to 64")
        if not 0 <= self.shift < self.hash.bits:
            raise HashError(f"hash shift={self.shift}; expected 0 to {self.hash.bits - 1}")
        if self.reduction not in get_args(Reduction):
            raise HashError(
                f"hash reduce={self.reduction}; expected one of {', '.join(get_args(Reduction))}"
            )
        if not self.buckets:
            object.__setattr__(self, "buckets", len(self.next_hops))
        if not max(1, len(self.next_hops)) <= self.buckets <= 65536:
            raise HashError(
                f"hash buckets={self.buckets} for {len(self.next_hops)} next hops; expected "
                "next=A+B+... in the order of the buckets, or buckets=N to learn it from probes"
            )

    def bucket(self, flow: FiveTuple) -> int:
        """The bucket that ``flow`` falls into."""
        digest = self.hash.digest(flow) >> self.shift
        if self.reduction == "modulo":
            return digest % self.buckets
        return digest * self.buckets >> (self.hash.bits - self.shift)

    def next_hop(self, bucket: int) -> frozenset[str]:
        """The addresses of the next hop of ``bucket``; empty where it has to be learned."""
        return self.next_hops[bucket % len(self.next_hops)] if self.next_hops else frozenset()


@dataclass(frozen=True, slots=True)
class Agreement:
    """What probes say of a hash.

    Attributes:
        checked: answers that could contradict it; of a bucket whose next hop had to be learned,
            the first answer can't.
        agreed: those that did not.
        learned: the address that answered for each bucket.
        needed: answers that have to agree before the hash is believed.
    """

    checked: int
    agreed: int
    learned: Mapping[int, str]
    needed: int

    @property
    def holds(self) -> bool:
        """Every answer agreed, and there were enough of them."""
        return self.checked == self.agreed >= self.needed


def parse_hash(text: str, topology: Topology | None = None) -> SwitchHash:
    """A hash as an operator writes it: ``NAME,ttl=N,next=A+B[,fields=...][,seed=N]...``.

    ``NAME`` is an algorithm of :class:`~crux_torch.fabric.ecmp.EcmpHash`. ``fields`` are some of
    ``src``, ``dst``, ``protocol``, ``sport``, ``dport``, joined by ``+`` in the order in which
    they are hashed; ``key`` Toeplitz's in hexadecimal; ``next`` the next hops in the order of the
    buckets, addresses or names of nodes of the topology; ``buckets``, ``shift`` and ``reduce`` as
    in :class:`SwitchHash`.

    Raises:
        HashError: which part can't be used, and what was expected.
    """
    name, *parts = (part.strip() for part in text.split(","))
    if name not in get_args(Algorithm):
        linux = "; Linux's own can't be computed from outside, so probe" if name == "linux" else ""
        raise HashError(f"hash {name!r}; expected one of {', '.join(get_args(Algorithm))}{linux}")
    pairs = [part.partition("=") for part in parts]
    given = {option: value for option, _, value in pairs}
    unknown = given.keys() - {"ttl", "next", "fields", "seed", "key", "buckets", "shift", "reduce"}
    if unknown:
        raise HashError(
            f"hash option {min(unknown)!r}; expected "
            "ttl, next, fields, seed, key, buckets, shift or reduce"
        )
    if len(given) < len(parts):
        raise HashError("a hash option is given twice")
    default = _RSS_FIELDS if name == "toeplitz" else _DEFAULT_FIELDS
    try:
        hash_ = EcmpHash(
            cast(Algorithm, name),
            _fields(given["fields"]) if "fields" in given else default,
            _number(given, "seed", 0),
            _key(given.get("key", "")),
        )
        # That the key is long enough for these fields shows at the first digest.
        hash_.digest(FiveTuple("::", "::", 1, 1, 6))
    except TopologyError as error:
        raise HashError(str(error)) from None
    if "ttl" not in given:
        raise HashError("hash without ttl=N: the hop at which the chosen next hop answers")
    return SwitchHash(
        _number(given, "ttl", 0),
        tuple(_addresses(hop, topology) for hop in given.get("next", "").split("+") if hop),
        hash_,
        _number(given, "buckets", 0),
        _number(given, "shift", 0),
        cast(Reduction, given.get("reduce", "modulo")),
    )


def check_against(hash: SwitchHash, found: PathMap, confidence: float = 0.99) -> Agreement:
    """Compare a hash with what probing found.

    Args:
        hash: the claim.
        found: probed between the ends in question.
        confidence: that agreement is no chance. A wrong hash hits one of n next hops with
            probability 1/n, so the probability that m answers agree by chance is (1/n)^m.

    Raises:
        HashError: it disagrees, or there are too few answers to tell.
    """
    learned: dict[int, str] = {}
    checked = agreed = 0
    for port, hops in found.hops.items():
        address = dict(hops).get(hash.ttl)
        if address is None:
            continue
        bucket = hash.bucket(_flow(found, port))
        expected = hash.next_hop(bucket)
        if expected or bucket in learned:
            checked += 1
            agreed += address in (expected or {learned[bucket]})
        learned.setdefault(bucket, address)
    choices = len(set(learned.values())) if not hash.next_hops else len(set(hash.next_hops))
    needed = draws_needed(1, confidence) if choices > 1 else 1
    result = Agreement(checked, agreed, learned, needed)
    if agreed < checked:
        raise HashError(
            f"the hash {hash.hash.algorithm} is not the one in use: it agrees with {agreed} of "
            f"{checked} probes at TTL {hash.ttl} to {found.destination}. Check fields, seed and "
            "the order of next hops, or leave it out and probe"
        )
    if not result.holds:
        raise HashError(
            f"{checked} answers at TTL {hash.ttl} to {found.destination} are too few to trust the "
            f"hash {hash.hash.algorithm}; {needed} have to agree"
        )
    return result


def foretell(hashes: Sequence[SwitchHash], found: PathMap, ports: Iterable[int]) -> PathMap:
    """The hops that ``ports`` take, by hashes that ``found`` agrees with.

    Args:
        hashes: one for each hop that chooses.
        found: a few probes between the ends in question.
        ports: source ports. One in a bucket whose next hop is unknown is left out.

    Returns:
        A map of these ports and of the hashes' TTLs; its counts and seconds are those of ``found``.

    Raises:
        HashError: as :func:`check_against`.
    """
    learned = [check_against(hash, found).learned for hash in hashes]
    hops: dict[int, tuple[tuple[int, str | None], ...]] = {}
    for port in ports:
        way: list[tuple[int, str | None]] = []
        for hash, seen in zip(hashes, learned, strict=True):
            bucket = hash.bucket(_flow(found, port))
            # A next hop has many addresses: take the one that it answers us from, where known.
            address = seen.get(bucket) or min(hash.next_hop(bucket), default=None)
            if address is not None:
                way.append((hash.ttl, address))
        if len(way) == len(hashes):
            hops[port] = tuple(sorted(way))
    return msgspec.structs.replace(found, hops=hops, ended="foretold")


def _flow(found: PathMap, port: int) -> FiveTuple:
    protocol = _PROTOCOL[found.protocol]
    return FiveTuple(found.source, found.destination, port, found.port, protocol)


def _fields(text: str) -> tuple[Field, ...]:
    names = text.split("+")
    for name in names:
        if name not in _FIELDS:
            raise HashError(
                f"hash field {name!r}; expected some of {', '.join(_FIELDS)}, joined by +"
            )
    return tuple(_FIELDS[name] for name in names)


def _number(given: Mapping[str, str], key: str, default: int) -> int:
    text = given.get(key, str(default))
    try:
        return int(text, 0)
    except ValueError:
        raise HashError(f"hash {key}={text}; expected a whole number") from None


def _key(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise HashError(f"hash key={text}: {error}; expected hexadecimal") from None


def _addresses(name: str, topology: Topology | None) -> frozenset[str]:
    try:
        return frozenset({str(ip_address(name))})
    except ValueError:
        pass
    addresses = topology.addresses.get(name, ()) if topology is not None else ()
    if not addresses:
        raise HashError(
            f"hash next={name}: expected an address, or a node whose addresses a topology gives"
        )
    return frozenset(addresses)
