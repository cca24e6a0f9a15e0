"""Discovered networks of namespaces against their true links, and flows against the routers'."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from control_fakes import until
from lldp_daemons import BOUND_S, LLDPCLI, ask, daemons, needs_lldpd
from routed_network import Flow, RoutedNetwork, clos, three_tiers

from crux_torch.network.discover.evidence import Nic
from crux_torch.network.discover.fragment import Fragment, SeenHost, SeenPair
from crux_torch.network.discover.join import Discovered, join
from crux_torch.network.loaders import load_topology
from crux_torch.network.topology import Topology
from lab import netns

_OK, _REASON = netns.available()
pytestmark = [pytest.mark.full, pytest.mark.skipif(not _OK, reason=_REASON)]
ROOT = Path(__file__).parents[2]
CRUX = [sys.executable, "-m", "crux_torch.cli"]


@dataclass
class Run:
    """One discovery.

    Attributes:
        pairs: with the ports of their paths, which a fragment does not have.
        printed: what the command wrote with ``--json``.
        seconds: from its start to its end.
    """

    network: RoutedNetwork
    topology: Topology
    found: Discovered
    fragment: Fragment
    pairs: tuple[SeenPair, ...]
    printed: dict[str, Any]
    seconds: float

    def links(self) -> set[tuple[str, str]]:
        """The true links that the discovered ones are, where these are one router's each."""
        node_at, addresses = self.network.node_at, self.found.topology.addresses
        owners = {node: {node_at[a] for a in given} for node, given in addresses.items()}
        known = {node: next(iter(own)) for node, own in owners.items() if len(own) == 1}
        edges = self.found.topology.edges
        return {(known[e.src], known[e.dst]) for e in edges if {e.src, e.dst} <= known.keys()}

    def flows(self) -> dict[Flow, tuple[str, ...]]:
        """Every port that was probed, with the links of its path in the discovered network."""
        nic_at = {
            address: Nic(host.name, nic.name)
            for host in self.fragment.hosts
            for nic in host.nics
            for address in nic.addresses
        }
        flows = {}
        for pair in self.pairs:
            for path in pair.paths:
                nics = nic_at[pair.src_address], nic_at[pair.dst_address]
                links = self.found.path_between(*nics, path.hops)
                assert links is not None
                for port in path.ports:
                    ends = (pair.src, pair.src_address, pair.dst, pair.dst_address)
                    flows[Flow(*ends, port)] = links
        return flows

    def sharing(self) -> tuple[float, float, int]:
        """Precision and recall of "these two flows share a link", and the pairs that share one."""
        claimed = self.flows()
        true = self.network.paths(claimed)
        right = said = shared = 0
        for a, b in itertools.combinations(claimed, 2):
            if (a.src, a.dst) == (b.src, b.dst):
                continue
            claim = not set(claimed[a]).isdisjoint(claimed[b])
            truth = not set(true[a]).isdisjoint(true[b])
            said += claim
            shared += truth
            right += claim and truth
        return right / max(1, said), right / max(1, shared), shared


def discover(network: RoutedNetwork, folder: Path, *more: str, **env: str) -> Run:
    out, report = folder / "cluster.yaml", folder / "report.json"
    argv = [*CRUX, "topology", "discover", "--hosts", ",".join(network.hosts)]
    argv += ["--ssh", f"ip netns exec {network.prefix}{{}}", "--remote", " ".join(CRUX)]
    argv += ["--out", str(out), "--json", str(report), "--no-inside", *more]
    began = time.monotonic()
    inherited = {key: v for key, v in os.environ.items() if not key.startswith("CRUX_")}
    done = subprocess.run(
        argv, cwd=ROOT, env=inherited | env, capture_output=True, text=True, check=False
    )
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    printed = json.loads(report.read_text())
    seen = printed["fragment"]
    hosts = msgspec.convert(seen["hosts"], tuple[SeenHost, ...])
    pairs = msgspec.convert(seen["pairs"], tuple[SeenPair, ...])
    fragment = Fragment.of(hosts, pairs)
    topology = load_topology(out)
    return Run(network, topology, join({"d": fragment}), fragment, pairs, printed, seconds)


def said(name: str, run: Run) -> tuple[float, float]:
    precision, recall, shared = run.sharing()
    print(
        f"{name}: {len(run.network.hosts)} hosts, precision {precision:.4f} and recall "
        f"{recall:.4f} over {shared} pairs of flows that share a link, {run.printed['probes']} "
        f"probes, {run.seconds:.1f} s, {run.printed['seconds']:.1f} s of them of discovery"
    )
    return precision, recall


TWO, THREE = clos(4, 2, 3), three_tiers(2, 2, 2, 2, 3)
INBOUND = {"inbound": True}


@pytest.mark.parametrize(
    ("name", "cables", "options"),
    [
        ("/31", TWO, INBOUND),
        ("/24", clos(4, 3, 3), {"numbering": "24"} | INBOUND),
        ("loopback", TWO, {"numbering": "loopback"}),
        ("three tiers", THREE, INBOUND),
        ("unequal spines", [c for c in clos(4, 3, 3) if c != ("leaf2", "spine1")], INBOUND),
        ("limits of Linux", TWO, {"limited": True} | INBOUND),
    ],
)
def test_links_and_sharing_of_twelve_hosts(
    tmp_path: Path, name: str, cables: Sequence[tuple[str, str]], options: dict[str, Any]
) -> None:
    with RoutedNetwork(cables, **options) as network:
        run = discover(network, tmp_path)
        precision, recall = said(name, run)
        assert len(run.flows()) > 100
        assert precision >= 0.99
        assert recall >= 0.99
        assert run.links() == network.links
        assert run.topology.addresses


def test_ipv6(tmp_path: Path) -> None:
    with RoutedNetwork(TWO, "24", ipv6=True) as network:
        run = discover(network, tmp_path, "--ipv6")
        # `ip route get` does not foretell the path of IPv6 packets that a router forwards.
        assert run.links() == network.links
        print(f"IPv6: {run.printed['probes']} probes, {run.seconds:.1f} s")


def test_where_routers_answer_from_the_way_back_the_map_errs_on_shared(tmp_path: Path) -> None:
    with RoutedNetwork(TWO) as network:
        run = discover(network, tmp_path)
        assert said("answers from the way back", run)[1] >= 0.99
        assert any("answer from the way back" in note for note in run.printed["notes"])
        assert run.links() <= network.links


def test_a_silent_spine_is_one_that_many_may_share(tmp_path: Path) -> None:
    with RoutedNetwork(TWO, silent=["spine1"], **INBOUND) as network:
        run = discover(network, tmp_path)
        precision, recall = said("silent spine", run)
        assert recall >= 0.99
        assert precision >= 0.99
        assert run.links() == {link for link in network.links if "spine1" not in link}


@contextmanager
def lldp(network: RoutedNetwork, folder: Path) -> Iterator[None]:
    """An lldpd on every node that has been heard; in the folder an ``lldpcli`` that asks the one of
    the namespace that it runs in."""
    with daemons({network.namespace(node): node for node in network.nodes}) as sockets:
        program = folder / "lldpcli"
        program.write_text(f'#!/bin/sh\nexec {LLDPCLI} -u {sockets}/$(ip netns identify $$) "$@"\n')
        program.chmod(0o755)

        def of(node: str) -> Path:
            return sockets / network.namespace(node)

        def have_heard() -> bool:
            for node in network.nodes:
                ask(of(node), "update")
            return all(
                f'"{leaf}"' in (ask(of(host), "-f", "json", "show", "neighbors") or "")
                for host in network.hosts
                for leaf in network.ports[host].values()
            )

        until(have_heard, BOUND_S, "hosts to hear their leaves")
        yield


@needs_lldpd
def test_switches_have_the_names_that_lldp_tells(tmp_path: Path) -> None:
    with RoutedNetwork(clos(2, 2, 2), **INBOUND) as network, lldp(network, tmp_path):
        run = discover(network, tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
        assert run.links() == network.links
        leaves = {node for node in run.topology.nodes if node.startswith("leaf")}
        assert leaves == {"leaf0", "leaf1"}
        for host in network.hosts:
            (leaf,) = network.ports[host].values()
            assert f"{host}->{leaf}" in run.topology.links
        assert not any("lldp" in note for note in run.printed["notes"])


def test_rails_are_kept_apart(tmp_path: Path) -> None:
    hosts = [(i, f"h{i}-{k}") for i in range(2) for k in range(2)]
    cables = [(host, f"leaf{rail}{i}") for i, host in hosts for rail in range(2)]
    cables += [
        (f"leaf{rail}{i}", f"spine{rail}{j}")
        for rail in range(2)
        for i in range(2)
        for j in range(2)
    ]
    with RoutedNetwork(cables, **INBOUND) as network:
        run = discover(network, tmp_path)
        assert said("two rails", run) == (1.0, 1.0)
        assert run.links() == network.links
        for host in network.hosts:
            assert run.topology.inside(host, "nic") == (f"{host}/eth0", f"{host}/eth1")


def test_ranks_of_a_launcher_meet_and_one_of_each_host_probes(tmp_path: Path) -> None:
    with RoutedNetwork(clos(2, 2, 1), **INBOUND) as network:
        out = tmp_path / "cluster.yaml"
        inherited = {key: v for key, v in os.environ.items() if not key.startswith("CRUX_")}
        common = {"SLURM_STEP_NUM_TASKS": "4", "PYTHONPATH": str(ROOT)}
        common["SLURM_STEP_NODELIST"] = network.addresses[network.hosts[0]][0]
        ranks = []
        for rank in range(4):
            host = network.hosts[rank // 2]
            argv = ["ip", "netns", "exec", network.namespace(host), *CRUX, "topology", "discover"]
            env = inherited | common | {"SLURM_PROCID": str(rank), "CRUX_HOST": host}
            ranks.append(subprocess.Popen([*argv, "--out", str(out), "--no-inside"], env=env))
        assert [rank.wait(240) for rank in ranks] == [0, 0, 0, 0]
        topology = load_topology(out)
        assert topology.hosts == tuple(network.hosts)
        assert len(topology.candidate_paths(*network.hosts)) == 2


def test_the_bound_of_a_router_holds_for_all_hosts_together(tmp_path: Path) -> None:
    per_s = 10.0
    with RoutedNetwork(clos(2, 1, 2), **INBOUND) as network:

        def errors(node: str) -> int:
            argv = ["ip", "netns", "exec", network.namespace(node), "cat", "/proc/net/snmp"]
            told = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
            names, values = (row.split() for row in told.splitlines() if row.startswith("Icmp:"))
            return int(values[names.index("OutTimeExcds")])

        run = discover(network, tmp_path, "--router-rate", str(per_s))
        sent = {node: errors(node) for node in network.nodes if node not in network.hosts}
        print(f"errors of routers: {sent} in {run.printed['seconds']:.1f} s")
        # Each host may begin with a burst to four distances.
        assert max(sent.values()) <= per_s * run.printed["seconds"] + 4 * len(network.hosts)
        assert sum(sent.values()) > 100
