"""The network as jobs saw it, where nobody gave a topology: from fragments in the store to bytes.

The bytes stand in for those of a topology file: they are hashed, parsed and planned with alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from crux_torch.agreement.bounds import holdings
from crux_torch.agreement.records import JobRecord
from crux_torch.network.discover.evidence import canonical
from crux_torch.network.discover.fragment import FRAGMENT_VERSION, Fragment, SeenHost, SeenPair
from crux_torch.network.discover.seen_paths import contradictions, links_in
from crux_torch.network.discover.seen_topology import SeenTopology
from crux_torch.network.topology import Topology

#: Begins the bytes of a network that was seen; no YAML file does.
MAGIC = b"\0crux-seen\0"
#: Bytes of all fragments together that count, those of the smallest first: of 5,000 jobs on 1,024
#: hosts and three layers, with room. One job has ``MAX_RECORD_BYTES`` at most.
MAX_BYTES = 64 << 20
#: Pairs of one job that are remembered while its fragment lacks them.
MAX_MISSING = 1024

_fragment = msgspec.json.Decoder(Fragment)
_fragments = msgspec.json.Decoder(tuple[tuple[str, Fragment], ...])


class SeenNetwork:
    """Makes the bytes of the network that the jobs' fragments describe.

    What has not changed is not computed again.

    Args:
        own: job that wants to hear what others see no longer; empty: nobody does.

    Attributes:
        left_out: jobs whose fragments do not fit beside the smaller ones of the others.
        lost: links in the fragment of ``own``, as :func:`links_in` gives them, that another job saw
            on the way between two addresses and sees there no longer.
    """

    def __init__(self, own: str = "") -> None:
        self.left_out: tuple[str, ...] = ()
        self.lost: frozenset[tuple[str, ...]] = frozenset()
        self._own = own
        #: Pairs that a job saw, and that its fragment does not have now.
        self._missing: dict[str, tuple[SeenPair, ...]] = {}
        self._known: dict[str, tuple[bytes, Fragment | None]] = {}
        self._of: object = None
        self._bytes: bytes | None = None

    def bytes_of(
        self, fragments: Mapping[str, bytes], records: Sequence[JobRecord]
    ) -> bytes | None:
        """Return the bytes; None if no fragment counts.

        A fragment counts for what its job's record claims: the hosts that it is on, and paths
        between two of them. One of no live job counts for nothing, nor does a malformed one.

        Args:
            fragments: as they lie in the store, by job.
            records: live, no two of one name.
        """
        if not fragments:
            self.left_out = ()
            return None
        claims = [(r.job, r.hosts, r.gpus, r.profile is None) for r in records]
        if (fragments, claims) == self._of:
            return self._bytes
        self._of = fragments, claims
        known, self._known = self._known, {}
        for job, raw in fragments.items():
            before = known.get(job)
            same = before is not None and before[0] == raw
            self._known[job] = before if before is not None and same else (raw, decoded(raw))
        self.lost = self._lost_since(known)
        found = {job: one for job, (_, one) in self._known.items() if one is not None}
        count = counted(found, records)
        kept = fitting(count)
        self.left_out = tuple(job for job in count if job not in kept)
        self._bytes = _joined(kept)
        return self._bytes

    def _lost_since(
        self, known: Mapping[str, tuple[bytes, Fragment | None]]
    ) -> frozenset[tuple[str, ...]]:
        own = self._known.get(self._own, (b"", None))[1]
        if own is None:
            return frozenset()
        lost = set(self.lost)
        for job, (_, now) in self._known.items():
            before = known.get(job, (b"", None))[1]
            if job == self._own or before is now or before is None or now is None:
                continue
            there = {(pair.src_address, pair.dst_address) for pair in now.pairs}
            # A search that failed leaves its pair out for a while.
            every = [*before.pairs, *self._missing.get(job, ())]
            again = [p for p in every if (p.src_address, p.dst_address) in there]
            missing = tuple(p for p in every if (p.src_address, p.dst_address) not in there)
            self._missing[job] = missing[:MAX_MISSING]
            lost = (lost | _links(again)) - _links(now.pairs)
        self._missing = {job: pairs for job, pairs in self._missing.items() if job in self._known}
        return _links(own.pairs) & lost


def _links(pairs: Iterable[SeenPair]) -> frozenset[tuple[str, ...]]:
    return frozenset().union(*map(links_in, pairs))


def decoded(raw: bytes) -> Fragment | None:
    """Return the fragment in ``raw``; None if it is none, or of another version."""
    try:
        fragment = _fragment.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return fragment if fragment.version == FRAGMENT_VERSION else None


def counted(fragments: Mapping[str, Fragment], records: Sequence[JobRecord]) -> dict[str, Fragment]:
    """Return the parts of fragments that their jobs may speak of, by job, in their order.

    Of a host that records claim beyond its devices, a job speaks only if some of its devices
    count as its own.
    """
    nothing = {
        (host.host, job)
        for host in holdings(records, None).contested
        for job, devices in host.counted.items()
        if not devices
    }
    found = {}
    for record in sorted(records, key=lambda r: r.job):
        fragment = fragments.get(record.job)
        if fragment is None or record.profile is None:
            continue
        own = {host for host in record.hosts if (host, record.job) not in nothing}
        hosts: dict[str, SeenHost] = {}
        for host in fragment.hosts:
            if host.name in own:
                hosts.setdefault(host.name, host)
        host_at = {
            canonical(address): host.name
            for host in hosts.values()
            for nic in host.nics
            for address in nic.addresses
        }
        at = [host_at.get(canonical(address)) for address in fragment.addresses]
        seen = tuple(p for p in fragment.seen if len({at[p.src], at[p.dst]} - {None}) == 2)
        if seen:
            found[record.job] = msgspec.structs.replace(
                fragment, hosts=tuple(hosts.values()), seen=seen
            )
    return found


def encoded(fragments: Mapping[str, Fragment]) -> bytes | None:
    """Return the bytes of ``fragments``, as :func:`network_in` reads them; None without any."""
    return _joined(fitting(fragments))


def fitting(fragments: Mapping[str, Fragment]) -> dict[str, bytes]:
    """Return the fragments that fit into ``MAX_BYTES``, encoded, in their order.

    The smallest come first. So a job with a large one leaves out itself, and nobody else.
    """
    each = {item[0]: msgspec.json.encode(item) for item in fragments.items()}
    sizes = sorted((len(raw), job) for job, raw in each.items())
    totals = itertools.accumulate(size for size, _ in sizes)
    kept = {job for (_, job), total in zip(sizes, totals, strict=True) if total <= MAX_BYTES}
    return {job: raw for job, raw in each.items() if job in kept}


def _joined(each: Mapping[str, bytes]) -> bytes | None:
    return MAGIC + b"[" + b",".join(each.values()) + b"]" if each else None


def is_seen(raw: bytes | None) -> bool:
    """Return True if ``raw`` is of a network that was seen, not of a topology file."""
    return raw is not None and raw.startswith(MAGIC)


def network_in(raw: bytes) -> SeenTopology:
    """Return the network in the bytes of one that was seen.

    Raises:
        ValueError: they are not what :func:`encoded` made, or the fragments are of no network.
    """
    try:
        fragments = dict(_fragments.decode(raw.removeprefix(MAGIC)))
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
    return SeenTopology(fragments)


def contradicted(records: Sequence[JobRecord], topology: Topology | None) -> dict[str, str]:
    """Return paths that jobs' connections were seen to take and that a given topology lacks.

    Returns:
        sentences, each with the job that saw it.
    """
    if topology is None or not topology.is_given:
        return {}
    return {
        f"the topology does not fit: {sentence}": record.job
        for record in records
        if record.seen
        for sentence in contradictions(record.seen, topology)
    }
