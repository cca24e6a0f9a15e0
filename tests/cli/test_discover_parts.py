"""Parts of ``crux topology discover``: messages that are none, insides of hosts, and progress."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import msgspec
import pytest
from survey_world import SurveyWorld

from crux_torch.cli.discover.channel import Channel, Superior
from crux_torch.cli.discover.output import furnish, read_insides, result
from crux_torch.cli.discover.session import Progress
from crux_torch.host.machine import Inside
from crux_torch.network.discover.fragment import SeenHost
from crux_torch.network.discover.plan import Plan, PlanRules
from crux_torch.network.discover.tasks import Done, Hello, Leave
from crux_torch.network.loaders import parse_yaml
from crux_torch.network.topology import Link, Node, Topology, TopologyBuilder


def spawned(program: str) -> list[object]:
    """The messages of a process that runs ``program``, to its end."""
    heard: list[object] = []
    with Channel() as channel:
        channel.spawn([sys.executable, "-c", program], "h0")
        while not heard or heard[-1] is not None:
            heard += [report for _, report in channel.receive(10.0)]
    return heard


def test_a_greeting_before_the_first_message_is_passed_over() -> None:
    done = msgspec.json.encode(Done()).decode()
    assert spawned(f"print('Welcome!'); print({done!r})") == [Done(), None]
    assert spawned(f"print({done!r}); print('Bye!'); print({done!r})") == [Done(), None]


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.stdout.write('x' * 3_000_000)",
        "import sys; sys.stdout.write('[' * 100_000 + chr(10))",
        "import sys; sys.stdout.buffer.write(bytes(range(256)) * 100)",
        "",
    ],
)
def test_what_is_no_message_ends_the_connection(program: str) -> None:
    assert spawned(program) == [None]


def test_orders_that_are_none_end_the_worker() -> None:
    for said in (b"", b"{}\n", b"\xff\n", b'{"type":"leave"}'):
        reads, writes = os.pipe()
        os.write(writes, said)
        os.close(writes)
        assert Superior(reads, 1).next_order() is None
        os.close(reads)
    reads, writes = os.pipe()
    os.write(writes, msgspec.json.encode(Leave("why")) + b"\n")
    assert Superior(reads, 1).next_order() == Leave("why")
    os.close(reads)
    os.close(writes)


def network(nics: bool) -> Topology:
    builder = TopologyBuilder(addresses={"h0/eth0": ["10.0.0.1"]} if nics else {"h0": ["10.0.0.1"]})
    ends = []
    for host in ("h0", "h1"):
        builder.node(host, "host")
        ends.append(builder.node(f"{host}/eth0", "nic", host) if nics else host)
        if nics:
            builder.cable(host, ends[-1], Link(1e9))
    builder.node("leaf", "tor")
    for end in ends:
        builder.arrow(end, "leaf", Link(1e9))
    for end in ends:
        builder.arrow("leaf", end, Link(1e9))
    return builder.build()


def inside(nic: str = "h0/eth0") -> Inside:
    nodes = {nic: Node("nic", "h0"), "h0/gpu0": Node("gpu", "h0")}
    cables = [(nic, "h0", Link(16e9, cost=2)), ("h0/gpu0", "h0", Link(16e9, cost=2))]
    return Inside("h0", nodes, cables)


@pytest.mark.parametrize("nics", [False, True])
def test_the_inside_of_a_host_takes_its_place(nics: bool) -> None:
    made, notes = furnish(network(nics), {"h0": inside()}, {"10.0.0.1": "h0/eth0"})
    assert notes == []
    assert made.addresses["h0/eth0"] == ("10.0.0.1",)
    (path,) = made.candidate_paths("h0/gpu0", "h1")
    assert path[:3] == ("h0/gpu0->h0", "h0->h0/eth0", "h0/eth0->leaf")
    assert made.capacity_Bps["h0->h0/eth0"] == 16e9
    # The two directions of a cable follow each other, so that the file has one line for both.
    first = made.edges[0]
    assert (made.edges[1].src, made.edges[1].dst) == (first.dst, first.src)


def test_an_inside_without_the_nic_is_left_out_and_noted() -> None:
    made, notes = furnish(network(False), {"h0": inside("h0/ib0")}, {"10.0.0.1": "h0/eth0"})
    assert made.inside("h0") == ("h0",)
    assert notes == ["the inside of host h0 is left out: h0/eth0 is no NIC on its PCI bus"]


def test_insides_that_are_another_hosts_or_none_are_refused() -> None:
    def told(raw: bytes) -> Hello:
        return Hello(0, SeenHost("h0", ()), "m", "1", inside=msgspec.Raw(raw))

    good = msgspec.json.encode(inside())
    assert read_insides([told(good)]) == ({"h0": inside()}, [])
    foreign = replace(inside(), cables=[("h1", "h0", Link(1e9))])
    strange = replace(inside(), nodes={"leaf": Node("nic", "h0")})
    for raw in (b"null", *map(msgspec.json.encode, (foreign, strange, Inside("h1")))):
        assert read_insides([told(raw)])[0] == {}
    assert read_insides([told(b"[1]")]) == ({}, ["the inside of host h0 can't be read"])


def test_what_hosts_tell_stays_in_a_comment() -> None:
    world = SurveyWorld([0, 1])
    plan = Plan(world.hosts, PlanRules(), world.clock)
    world.play(plan)
    notes = ("a\nlinks: []\r\x85hosts: \u2028version: 2\x1b[2J",)
    told = [Hello(i, host, f"m{i}", "1", notes=notes) for i, host in enumerate(world.hosts)]
    text = result(plan, told, 1.0).to_yaml()
    assert parse_yaml(text).hosts == ("h0", "h1")
    assert "\x1b" not in text
    assert {line[0] for line in text.split("version: 1")[0].splitlines()} == {"#"}


def test_progress_tells_the_time_left() -> None:
    now = 0.0
    lines: list[str] = []
    progress = Progress(lines.append, 0.0, lambda: now)
    world = SurveyWorld([0, 1, 2, 3])
    plan = Plan(world.hosts, PlanRules(), world.clock)

    def watch(world: SurveyWorld) -> bool:
        nonlocal now
        now = world.now
        progress.watch(plan)
        return False

    world.play(plan, watch)
    assert lines[0].startswith("leaves: ")
    assert any("hosts placed: " in line for line in lines)
    left = [line for line in lines if line.endswith(" s left")]
    assert [float(line.split()[-3]) for line in left][-1] == 0
    assert all(0 <= float(line.split()[-3]) <= world.now for line in left)
    progress.meeting(4, 4)
    assert lines[-1] == "hosts: 4 of 4 are there"
