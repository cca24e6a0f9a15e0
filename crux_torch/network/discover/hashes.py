"""The hash by which a switch chooses among equal-cost paths, learned from choices that were seen.

docs/understand/paths.md says how, and what the result proves.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from crux_torch.network.discover.fragment import SeenPair
from crux_torch.network.discover.hash_families import Flow, Sample
from crux_torch.network.discover.hash_models import Model, fit, tail
from crux_torch.network.probe.packets import Transport
from crux_torch.network.probe.prober import PathMap
from crux_torch.network.routes import routers
from crux_torch.network.topology import Topology

#: Accepted: a fit that is right about this share of the held-out choices, if chance would reach
#: that with at most this probability.
ACCURACY, CHANCE = 0.9, 1e-4
#: Source ports of each path that tell a hash: enough for groups of two next hops and of three.
HASH_PORTS = 32
#: Choices that are asked about; more add nothing.
_MOST_CHOICES = 512
_FOLDS = 3
#: A next hop that was seen once counts as a wrong answer if the others were seen this often.
_OFTEN = 12

Verdict = Literal["explained", "none fits", "too few"]


class Choice(NamedTuple):
    """The next hop that a switch gave to a flow: an address, or a node."""

    flow: Flow
    next_hop: str


@dataclass(frozen=True)
class HashFit:
    """The result of trying all hashes on one switch's choices.

    Attributes:
        verdict: ``explained``, ``none fits``, or ``too few`` choices to tell.
        reason: of a verdict that is not ``explained``.
        families: hashes that give the same choices, the likeliest first. Empty if the choices are
            linear in the flow's bits, but by no hash that is known here.
        selection: from hash to next hop, such as ``modulo 6``.
        coincidence: probability that a linear hash that is not in ``families`` looks like one.
        next_hops: addresses or nodes that were chosen, sorted.
        choices: number of choices that were seen.
        accuracy: share of the choices that was predicted right from the others.
        chance: probability that choices without any hash would be predicted as well.
    """

    verdict: Verdict
    next_hops: tuple[str, ...]
    choices: int
    reason: str = ""
    families: tuple[str, ...] = ()
    selection: str = ""
    coincidence: float = 1.0
    accuracy: float = 0.0
    chance: float = 1.0
    _model: Model | None = None

    def predict(self, flow: Flow) -> str | None:
        """Returns the next hop of ``flow``; None if the choices seen do not tell."""
        return None if self._model is None else self._model.predict(flow)

    def ports_via(
        self, next_hop: str, flow: Flow, ports: Iterable[int], limit: int | None = None
    ) -> tuple[int, ...]:
        """Returns source ports that lead ``flow`` over ``next_hop``, computed instead of probed.

        Args:
            ports: to choose from.
            limit: ports to return at most.
        """
        found: list[int] = []
        for port in ports:
            if limit is not None and len(found) >= limit:
                break
            if self.predict(flow._replace(src_port=port)) == next_hop:
                found.append(port)
        return tuple(found)


def explain(choices: Iterable[Choice], seed: int = 0) -> HashFit:
    """Finds the hash that explains one switch's choices among one group of next hops.

    Args:
        choices: of flows of one IP version, each seen once.
        seed: of the division into folds.

    Returns:
        A fit whose accuracy was measured on choices that it was not made of.

    Raises:
        ValueError: IPv4 and IPv6 are mixed.
    """
    seen = _tidy(choices, seed)
    next_hops = tuple(sorted({choice.next_hop for choice in seen}, key=_order))
    if len(next_hops) < 2:
        return HashFit("too few", next_hops, len(seen), "one next hop: there is nothing to choose")
    sample = Sample.of([c.flow for c in seen], [next_hops.index(c.next_hop) for c in seen])
    accuracy, chance = _cross_validate(sample, next_hops)
    if accuracy < ACCURACY or chance > CHANCE:
        lacking = _lacks(sample, len(next_hops))
        reason = lacking or "no hash that was tried predicts choices that it was not fitted to"
        verdict: Verdict = "too few" if lacking else "none fits"
        return HashFit(
            verdict, next_hops, len(seen), reason, accuracy=accuracy, chance=min(1.0, chance)
        )
    model = fit(sample, next_hops)
    assert model is not None  # it fits two thirds of the sample
    return HashFit(
        "explained",
        next_hops,
        len(seen),
        families=model.families,
        selection=model.selection,
        coincidence=model.coincidence,
        accuracy=accuracy,
        chance=chance,
        _model=model,
    )


def _tidy(choices: Iterable[Choice], seed: int) -> list[Choice]:
    """Each flow once, without addresses that answered once, in an order that ``seed`` gives."""
    unique = dict(choices)
    versions = {":" in flow.src or ":" in flow.dst for flow in unique}
    if len(versions) > 1:
        raise ValueError("choices of IPv4 and IPv6 flows are mixed: ask about them one by one")
    counts = Counter(unique.values())
    real = {hop for hop, count in counts.items() if count > 1 or len(unique) < _OFTEN * len(counts)}
    seen = sorted(Choice(flow, hop) for flow, hop in unique.items() if hop in real)
    random.Random(seed).shuffle(seen)
    return seen[:_MOST_CHOICES]


def _order(next_hop: str) -> tuple[int, str]:
    """Addresses in numerical order."""
    parts = next_hop.split(".")
    if len(parts) == 4 and all(part.isdecimal() and len(part) <= 3 for part in parts):
        return sum(int(part) << 8 * (3 - i) for i, part in enumerate(parts)), next_hop
    return 0, next_hop


def _cross_validate(sample: Sample, next_hops: Sequence[str]) -> tuple[float, float]:
    """The share of held-out choices predicted right, and the probability that chance does it.

    A model knows nothing of the choices held out. Without a hash, each is right with at most the
    share of the commonest next hop. The worst of the folds counts, which needs no correction for
    their number.
    """
    right = asked = 0
    chance = 0.0
    by_hop = sorted(range(len(sample)), key=lambda j: sample.hops[j])
    for fold in range(_FOLDS):
        held_out = by_hop[fold::_FOLDS]  # of each next hop a third
        model = fit(sample.without(held_out), next_hops)
        hits = (
            0 if model is None else sum(model.index(sample, j) == sample.hops[j] for j in held_out)
        )
        chance = max(chance, tail(hits, len(held_out), _common(sample.hops)))
        right, asked = right + hits, asked + len(held_out)
        if chance > CHANCE:
            break
    return right / max(1, asked), chance


def _common(hops: Sequence[int]) -> float:
    return max(Counter(hops).values()) / len(hops)


def _lacks(sample: Sample, count: int) -> str:
    """The reason why not even a hash that is tried could be told; empty if it could."""
    held_out = len(sample) // _FOLDS
    fitted = len(sample) - held_out - 1
    odd = count & -count != count
    unknown = 33 + 6 if odd else sample.dimension + count + 2
    by_chance = math.ceil(math.log(CHANCE) / math.log(min(0.99, _common(sample.hops))))
    needed = max(math.ceil((unknown + 1) * 1.5), by_chance * _FOLDS)
    if fitted < unknown or held_out < by_chance:
        return f"{len(sample)} choices among {count} next hops; about {needed} are needed"
    return ""


#: A flow, and the routers that answered at TTL 1, 2, ...; None where nobody did.
Trace = tuple[Flow, Sequence["str | None"]]
_NUMBERS: Mapping[Transport, int] = {"tcp": 6, "udp": 17}


def traces_of(found: PathMap) -> list[Trace]:
    """Returns the path of every source port that was probed."""
    protocol = _NUMBERS[found.protocol]
    traces: list[Trace] = []
    for port, answers in found.hops.items():
        by_ttl = dict(answers)
        hops = [by_ttl.get(ttl) for ttl in range(1, max(by_ttl, default=0) + 1)]
        traces.append((Flow(found.source, found.destination, port, found.port, protocol), hops))
    return traces


def traces_of_pair(pair: SeenPair, port: int, protocol: Transport) -> list[Trace]:
    """Returns the path of every source port that a fragment names.

    Args:
        port: destination port of the probes.
    """
    ends = pair.src_address, pair.dst_address
    return [
        (Flow(*ends, source, port, _NUMBERS[protocol]), path.hops)
        for path in pair.paths
        for source in path.ports
    ]


def _choices(
    traces: Iterable[Trace], node_of: Callable[[str], str]
) -> Iterator[tuple[str, Choice]]:
    for flow, hops in traces:
        for at, after in pairwise(hops):
            if at is not None and after is not None:
                yield node_of(at), Choice(flow, node_of(after))


def choices_at(
    traces: Iterable[Trace], node_of: Callable[[str], str] = str
) -> dict[tuple[str, tuple[str, ...]], list[Choice]]:
    """Returns the choices of each switch, for each group of next hops that it chooses among.

    Destinations whose next hops overlap belong to one group.

    Args:
        node_of: the node of an address, where it is known; an unknown address counts as a node.

    Returns:
        Groups of at least two next hops, by (switch, next hops).
    """
    seen: dict[str, dict[str, list[Choice]]] = defaultdict(lambda: defaultdict(list))
    for switch, choice in _choices(traces, node_of):
        seen[switch][choice.flow.dst].append(choice)
    found = {}
    for switch, by_destination in sorted(seen.items()):
        for group in _joined(by_destination.values()):
            next_hops = tuple(sorted({choice.next_hop for choice in group}, key=_order))
            if len(next_hops) > 1:
                found[switch, next_hops] = group
    return found


def _joined(parts: Iterable[list[Choice]]) -> list[list[Choice]]:
    """Joins lists that share a next hop."""
    groups: list[tuple[set[str], list[Choice]]] = []
    for part in parts:
        hops, choices = {choice.next_hop for choice in part}, list(part)
        apart = []
        for other_hops, others in groups:
            if hops & other_hops:
                hops, choices = hops | other_hops, others + choices
            else:
                apart.append((other_hops, others))
        groups = [*apart, (hops, choices)]
    return [choices for _, choices in groups]


class SwitchHash(NamedTuple):
    """A switch, and the hash by which it chooses among one group of next hops."""

    switch: str
    fit: HashFit


def explain_switches(
    traces: Iterable[Trace], node_of: Callable[[str], str] = str
) -> tuple[SwitchHash, ...]:
    """Finds the hash of every switch that ``choices_at`` finds. Arguments are those of it."""
    return tuple(
        SwitchHash(switch, explain(choices))
        for (switch, _), choices in choices_at(traces, node_of).items()
    )


def ports_to_check(
    found: Iterable[SwitchHash], flow: Flow, ports: Sequence[int]
) -> tuple[int, ...]:
    """Returns two source ports for every next hop that a hash was found for.

    Args:
        ports: to choose from; best such as no hash was fitted to.
    """
    chosen = [
        port
        for _, hashed in found
        for next_hop in hashed.next_hops
        for port in hashed.ports_via(next_hop, flow, ports, 2)
    ]
    return tuple(dict.fromkeys(chosen))


class Checked(NamedTuple):
    """Choices of a switch that were predicted and then probed, and those predicted right."""

    switch: str
    asked: int
    right: int


def check(
    found: Iterable[SwitchHash], traces: Iterable[Trace], node_of: Callable[[str], str] = str
) -> tuple[Checked, ...]:
    """Compares predictions with ``traces`` that no hash was fitted to."""
    seen: dict[str, list[Choice]] = defaultdict(list)
    for switch, choice in _choices(traces, node_of):
        seen[switch].append(choice)
    results = []
    for switch, hashed in found:
        asked = [choice for choice in seen[switch] if hashed.predict(choice.flow) is not None]
        right = sum(hashed.predict(choice.flow) == choice.next_hop for choice in asked)
        if asked:
            results.append(Checked(switch, len(asked), right))
    return tuple(results)


class Polarised(NamedTuple):
    """A switch whose choice follows from the choice of the switch before it.

    Attributes:
        before, switch: the two switches.
        used, known: next hops of ``switch`` that flows from ``before`` take to one destination, at
            most, and those that it has for others.
        chance: probability that independent hashes use so few.
    """

    before: str
    switch: str
    used: int
    known: int
    chance: float


def polarisation(
    traces: Iterable[Trace],
    node_of: Callable[[str], str] = str,
    known: Mapping[str, int] | None = None,
) -> Iterator[Polarised]:
    """Finds switches that spread the flows of a switch before them over a part of their next hops.

    If two tiers use one hash, all flows that the first sends to a switch of the second look alike
    to that switch, and links idle.

    Args:
        known: next hops of a switch towards what lies behind it, from a topology. The number that
            traces of the same destinations show counts if it is larger.
    """
    traces = list(traces)
    groups: dict[str, list[set[str]]] = defaultdict(list)
    for switch, next_hops in choices_at(traces, node_of):
        groups[switch].append(set(next_hops))
    flows: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for flow, hops in traces:
        for before, at, after in zip(hops, hops[1:], hops[2:], strict=False):
            if before is not None and at is not None and after is not None:
                flows[node_of(before), node_of(at), flow.dst][node_of(after)] += 1
    for (before, switch, _), used in sorted(flows.items()):
        shown = (len(group) for group in groups[switch] if group >= used.keys())
        total = max(*shown, (known or {}).get(switch, 0), 0)
        if len(used) < total:
            chance = math.comb(total, len(used)) * (len(used) / total) ** used.total()
            if chance <= CHANCE:
                yield Polarised(before, switch, len(used), total, chance)


def next_hops_in(topology: Topology, src_address: str, dst_address: str) -> dict[str, int]:
    """Returns the number of next hops that each switch has from one host to another.

    It is empty if the topology does not know the addresses.
    """
    src, dst = (topology.node_at.get(address) for address in (src_address, dst_address))
    if src is None or dst is None:
        return {}
    following: dict[str, set[str]] = defaultdict(set)
    for path in topology.candidate_paths(src, dst):
        for at, after in pairwise(routers(path, topology)):
            following[at].add(after)
    return {switch: len(each) for switch, each in following.items()}
