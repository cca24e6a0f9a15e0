"""Measures how well and how fast a network is discovered: answers are simulated, the rest is real.

1. Maps: fabrics of up to 64 hosts whose routers answer in different ways. Each is discovered as
   `crux topology discover` does it, by its plan and its searches, and its map is compared with the
   true network. "Shares" is how often "these two flows share a link" is told rightly: of those that
   the map says (precision), and of those that do (recall). "Links" is how many links of the map are
   exactly one true link, and the other way round.
2. Scale: 1,024 hosts below 32 leaves with 8 spines. The time is what the hosts would take; the
   planner's CPU time and memory are measured.
3. Joining what 5,000 jobs on 1,024 hosts saw, in three layers with 16 paths between pods.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from answering import AnsweringNetwork, Limit, clos2, clos3, rails
from map_score import pairs_of, score
from played_plan import play

from crux_torch.network.discover.fragment import Fragment
from crux_torch.network.discover.join import join
from crux_torch.network.discover.plan import PlanRules

RULES = PlanRules()
PORTS = range(50000, 50040)


def networks() -> Iterator[tuple[str, AnsweringNetwork]]:
    """The fabrics, by what is special about them."""
    every: dict[str, Any] = {
        "2 layers, /31": (clos2(), {}),
        "/30": (clos2(), {"numbering": "/30"}),
        "/24, one gateway a leaf": (clos2(), {"numbering": "/24", "gateway": "leaf"}),
        "/24, .1 and .254": (clos2(), {"numbering": "/24 ends"}),
        "IPv6, /127": (clos2(), {"numbering": "/127"}),
        "loopbacks": (clos2(), {"mode": "loopback"}),
        "only spines by loopbacks": (clos2(), {"modes": _all("spine", 4, "loopback")}),
        "2 leaves lack a spine": (clos2(unequal=2), {}),
        "a silent spine": (clos2(), {"silent": ["spine1"]}),
        "a silent leaf": (clos2(), {"silent": ["leaf1"]}),
        "3 layers": (clos3(), {}),
        "3 layers, loopbacks": (clos3(), {"mode": "loopback"}),
        "3 layers, a silent core": (clos3(), {"silent": ["core0-0"]}),
        "4 rails": (rails(), {}),
        "64 hosts, 2 layers": (clos2(8, 8, 8), {}),
        "64 hosts, 3 layers": (clos3(4, 4, 4, 4, 4), {}),
        "all spines silent *": (clos2(), {"silent": list(_all("spine", 4, ""))}),
        "only leaves by loopbacks *": (clos2(), {"modes": _all("leaf", 4, "loopback")}),
        "back by another spine *": (clos2(), {"mode": "back"}),
    }
    for name, (topology, options) in every.items():
        yield name, AnsweringNetwork(topology, **options)


def _all(kind: str, count: int, mode: str) -> dict[str, str]:
    return {f"{kind}{i}": mode for i in range(count)}


def maps() -> list[dict[str, Any]]:
    click.echo("1. Maps against true networks, in percent; * can't be told from answers\n")
    columns = "shares links", "probes", "seconds"
    click.echo(f"{'':28}hosts   {columns[0]:>18}   {columns[1]:>8} {columns[2]:>8}")
    rows = []
    for name, network in networks():
        plan, seconds = play(network, RULES)
        found = join({"discovery": plan.fragment()})
        told = score(network, found, pairs_of(network), PORTS)
        shares = f"{100 * told.precision:5.1f} {100 * told.recall:5.1f}"
        links = f"{100 * told.links_precision:5.1f} {100 * told.links_recall:5.1f}"
        hosts = len(network.topology.hosts)
        click.echo(f"{name:28}{hosts:5} {shares} {links} {plan.sent:9} {seconds:8.1f}")
        rows.append({"network": name, **told._asdict(), "probes": plan.sent, "seconds": seconds})
    click.echo()
    return rows


def most_per_s(times: list[float]) -> int:
    """The most that came within one second."""
    times = sorted(times)
    return max(bisect_left(times, at + 1.0) - i for i, at in enumerate(times))


def scale(hosts_per_leaf: int) -> list[dict[str, Any]]:
    limits: dict[str, Callable[[], Limit] | None] = {
        "no limit": None,
        "Linux: 1/s to each host, 6 at once": Limit,
    }
    rows = []
    click.echo(f"2. {32 * hosts_per_leaf} hosts, 32 leaves, 8 spines\n")
    for name, limit in limits.items():
        network = AnsweringNetwork(clos2(32, 8, hosts_per_leaf), limit=limit)
        began = time.process_time()
        plan, seconds = play(network, RULES)
        middle = time.process_time()
        found = join({"discovery": plan.fragment()})
        ended = time.process_time()
        told = score(network, found, pairs_of(network), PORTS, sample=400)
        most = max(map(most_per_s, network.expired.values()))
        click.echo(
            f"{name}: {plan.sent} probes, {seconds:.0f} s, at most {most} a second at one router; "
            f"shares {100 * told.precision:.1f}% {100 * told.recall:.1f}%; "
            f"CPU of plan, searches and simulator {middle - began:.0f} s, of the join "
            f"{ended - middle:.2f} s; peak memory {_peak_MB():.0f} MB"
        )
        rows.append({"limit": name, **told._asdict(), "probes": plan.sent, "seconds": seconds})
        rows[-1] |= {"most_per_s": most, "join_s": ended - middle}
    click.echo()
    return rows


def _peak_MB() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def jobs(count: int) -> dict[str, Any]:
    clos = clos3(8, 4, 4, 4, 32)
    network = AnsweringNetwork(clos)
    chance = random.Random(1)
    addresses = list(network.address.values())
    fragments = {}
    for job in range(count):
        ring = chance.sample(addresses, chance.choice([2, 2, 4, 4, 8]))
        there = set(zip(ring, ring[1:] + ring[:1], strict=True))
        pairs = sorted(there | {(b, a) for a, b in there})
        fragments[f"job{job}"] = network.fragment(pairs, PORTS[:24])
    text = msgspec.json.encode(fragments)
    # No leader has a simulator in its memory, through which Python's collector of garbage would go.
    del fragments, network
    began = time.process_time()
    decoded = msgspec.json.decode(text, type=dict[str, Fragment])
    decode_s = time.process_time() - began
    times = []
    for _ in range(3):
        began = time.process_time()
        found = join(decoded)
        times.append(time.process_time() - began)
    network = AnsweringNetwork(clos)
    told = score(network, found, pairs_of(network), PORTS[:24])
    paths = sum(len(pair.lengths) for each in decoded.values() for pair in each.seen)
    click.echo(f"3. {count} jobs on 1,024 hosts, three layers\n")
    click.echo(
        f"{paths} paths, {len(text) / 1e6:.0f} MB of JSON, read in {decode_s:.2f} s; joined in "
        f"{times[0]:.2f} s of CPU the first time, {min(times[1:]):.2f} s again; "
        f"shares {100 * told.precision:.1f}% {100 * told.recall:.1f}%, "
        f"links {100 * told.links_precision:.1f}% {100 * told.links_recall:.1f}%"
    )
    return {
        "jobs": count,
        "paths": paths,
        "join_s": times[0],
        "again_s": min(times[1:]),
        **told._asdict(),
    }


@click.command(help=__doc__)
@click.option("--hosts-per-leaf", type=click.IntRange(2), default=32, show_default=True)
@click.option("--jobs", "count", type=click.IntRange(2), default=5000, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write this file.")
def main(hosts_per_leaf: int, count: int, json_path: Path | None) -> None:
    found = {"maps": maps(), "scale": scale(hosts_per_leaf), "jobs": jobs(count)}
    if json_path is not None:
        json_path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
