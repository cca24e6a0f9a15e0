"""Unmodified programs of verbs over two Soft-RoCE devices, without and with the shim.

Judged by what crossed the wire, and by what the programs said and returned.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from scenarios.nccl_net import ECN
from scenarios.nccl_net import MESSAGE_BYTES as NCCL_BYTES
from scenarios.pair import (
    GROUP,
    GROUP_DSCP,
    MESSAGE_BYTES,
    MESSAGES,
    PLANNED_DSCP,
    PLANNED_PORTS,
    QUEUE_PAIRS,
    VARIABLE_CLASS,
    VARIABLE_LEVEL,
)

from lab.rdma.capture_file import PSNS, Packet
from lab.rdma.network import PAIR_ADDRESSES
from lab.rdma.play import Outcome
from lab.rdma.step import Step

CASES = ("plain", "shim")
PYVERBS = Path("/usr/lib/python3/dist-packages/pyverbs")
#: Programs with reliable connections, as collective libraries use them.
CONNECTED = (
    "write_bw",
    "rc_pingpong",
    "rc_pingpong new_send",
    "rc_pingpong events",
    "srq_pingpong",
    "read_lat",
    "atomic_lat",
    "nccl",
)
#: Programs whose output describes the devices and nothing else.
TELLING = ("devices", "devinfo", "no such device")
PACKETS_PER_MESSAGE = MESSAGE_BYTES // 4096

Flow = tuple[str, int]


def done(pair: Outcome, name: str) -> Step:
    if name not in pair.steps and name.startswith("nccl"):
        pytest.skip("torch brought no libnccl with symbols")
    return pair.steps[name]


def by_queue_pair(packets: list[Packet]) -> dict[Flow, list[Packet]]:
    """The packets for each queue pair: by the address it is at, and its number."""
    flows: dict[Flow, list[Packet]] = defaultdict(list)
    for packet in packets:
        flows[packet.destination, packet.qpn].append(packet)
    return flows


def missing_psns(packets: list[Packet]) -> int:
    """How many sequence numbers are not there between the first and the last."""
    first = packets[0].psn
    # Packets that were sent again may come after later ones, never before the first.
    seen = {(packet.psn - first) % PSNS for packet in packets}
    return max(seen) + 1 - len(seen)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("program", [*CONNECTED, "nccl group", "ud_pingpong", "ucx"])
def test_a_program_succeeds(pair: Outcome, program: str, case: str) -> None:
    for process in done(pair, f"{program} {case}").processes:
        assert process.status == 0, process


@pytest.mark.parametrize("case", CASES)
def test_every_message_of_write_bw_crosses_the_wire(pair: Outcome, case: str) -> None:
    packets = pair.capture("pair", pair.steps[f"write_bw {case}"])
    flows = by_queue_pair([packet for packet in packets if packet.is_request])
    assert len(flows) == QUEUE_PAIRS
    for flow in flows.values():
        assert len({packet.psn for packet in flow}) == MESSAGES * PACKETS_PER_MESSAGE
        assert missing_psns(flow) == 0


@pytest.mark.parametrize("program", CONNECTED)
def test_without_the_shim_nothing_is_marked(pair: Outcome, program: str) -> None:
    packets = pair.capture("pair", done(pair, f"{program} plain"))
    assert packets
    assert {packet.tos for packet in packets} == {0}
    planned = {port for ports in PLANNED_PORTS.values() for port in ports}
    assert planned.isdisjoint(packet.source_port for packet in packets)


@pytest.mark.parametrize("program", CONNECTED)
def test_every_packet_leaves_with_the_planned_port_and_class(pair: Outcome, program: str) -> None:
    packets = pair.capture("pair", done(pair, f"{program} shim"))
    assert {packet.is_request for packet in packets} == {True, False}, "requests and answers"
    for packet in packets:
        assert packet.tos == PLANNED_DSCP[packet.destination] << 2, packet
        assert packet.source_port in PLANNED_PORTS[packet.destination], packet
    for flow, of_queue_pair in by_queue_pair(packets).items():
        assert len({packet.source_port for packet in of_queue_pair}) == 1, flow


def test_queue_pairs_spread_over_the_planned_ports(pair: Outcome) -> None:
    packets = pair.capture("pair", pair.steps["write_bw shim"])
    for address, ports in PLANNED_PORTS.items():
        used = {packet.source_port for packet in packets if packet.destination == address}
        assert used == set(ports)


def test_datagrams_which_have_no_address_vector_of_the_queue_pair_stay_as_they_are(
    pair: Outcome,
) -> None:
    packets = pair.capture("pair", pair.steps["ud_pingpong shim"])
    assert packets
    assert {packet.tos for packet in packets} == {0}


@pytest.mark.parametrize("program", TELLING)
def test_what_devices_say_of_themselves_stays_the_same(pair: Outcome, program: str) -> None:
    (plain,), (shim,) = (pair.steps[f"{program} {case}"].processes for case in CASES)
    assert plain.stdout + plain.stderr
    assert plain == shim


@pytest.mark.parametrize("program", [p for p in (*CONNECTED, "ud_pingpong", "ucx") if p != "nccl"])
def test_output_has_the_same_form(pair: Outcome, program: str) -> None:
    def form(text: str) -> str:
        # perftest gauges the processor's clock, and says so where a busy machine makes it fail.
        text = re.sub(r"^ ?Correlation coefficient.*\n", "", text, flags=re.MULTILINE)
        # Queue pairs' numbers, keys, times and rates differ from run to run.
        return re.sub(r"\s+", " ", re.sub(r"\b0x[0-9a-f]+\b|[\d.]+", "N", text))

    for plain, shim in zip(
        pair.steps[f"{program} plain"].processes,
        pair.steps[f"{program} shim"].processes,
        strict=True,
    ):
        assert form(plain.stdout) == form(shim.stdout)
        assert form(plain.stderr) == form(shim.stderr)


def nccls(pair: Outcome, name: str) -> dict[str, Any]:
    """What NCCL's network code did in this step."""
    told: dict[str, Any] = json.loads(done(pair, name).processes[0].stdout)
    return told


def test_nccl_gets_the_shim_for_what_it_changes_and_the_real_library_for_the_rest(
    pair: Outcome,
) -> None:
    plain, shim = (nccls(pair, f"nccl {case}")["origins"] for case in CASES)
    assert plain.keys() == shim.keys()
    (real,) = {Path(library).resolve() for library in plain.values()}
    differ = {name for name in plain if Path(shim[name]).resolve() != real}
    assert {"ibv_create_qp", "ibv_modify_qp", "ibv_destroy_qp"} <= differ
    assert differ.isdisjoint({"ibv_get_device_list", "ibv_reg_mr", "ibv_query_gid"})
    assert {Path(shim[name]).name for name in differ} == {"libibverbs.so"}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("program", ["nccl", "nccl group"])
def test_every_queue_pair_of_nccl_sends_as_its_address_vector_says(
    pair: Outcome, program: str, case: str
) -> None:
    told = nccls(pair, f"{program} {case}")
    assert told["arrived"] == [True, True]
    # Both ends of a connection for each direction.
    assert len(told["connected"]) == 2 * 2 * QUEUE_PAIRS
    packets = pair.capture("pair", done(pair, f"{program} {case}"))
    of_nccl = told["traffic_class"] or 0
    peers = {one["peer"] for one in told["connected"]}
    assert peers == {packet.qpn for packet in packets}
    for one in told["connected"]:
        assert one["asked"] == {"traffic_class": of_nccl, "service_level": of_nccl, "flow_label": 0}
    wire = {(p.qpn, p.tos, p.source_port) for p in packets}
    if case == "plain":
        assert all(one["given"] == one["asked"] for one in told["connected"])
        assert {tos for _, tos, _ in wire} == {of_nccl}
    else:
        # Both ends' numbers may be the same: rxe counts for each device.
        given = [(one["peer"], one["given"]) for one in told["connected"]]
        asked = {(peer, v["traffic_class"], port_of(v["flow_label"])) for peer, v in given}
        assert wire == asked
        for one in told["connected"]:
            # NCCL takes the level from the class, and the shim lets it follow.
            level = one["given"]["traffic_class"] if of_nccl else 0
            assert one["given"]["service_level"] == level
        if program == "nccl group":
            assert {tos for _, tos, _ in wire} == {GROUP_DSCP << 2 | ECN}
            assert set(told["owners"]) == {GROUP}


@pytest.mark.parametrize("program", ["nccl", "nccl group"])
def test_what_nccl_posts_is_what_crosses_the_wire(pair: Outcome, program: str) -> None:
    told = nccls(pair, f"{program} shim")
    packets = pair.capture("pair", done(pair, f"{program} shim"))
    # Packets that were sent again count once.
    sent = {(p.destination, p.qpn, p.psn): p.payload_bytes for p in packets if p.is_request}
    crossed: Counter[tuple[str, int]] = Counter()
    for (destination, number, _), payload_bytes in sent.items():
        crossed[destination, number] += payload_bytes
    posted = {(peer, number): count for peer, number, count in told["posted"] if count}
    assert posted == {flow: count for flow, count in crossed.items() if count}
    # A message each way, and what its receiver told its sender before.
    assert 2 * NCCL_BYTES < sum(posted.values()) < 2.1 * NCCL_BYTES


@pytest.mark.parametrize("case", CASES)
def test_nccls_variables_go_before_the_communicators_class(pair: Outcome, case: str) -> None:
    connected = nccls(pair, f"nccl variables {case}")["connected"]
    asked = {"traffic_class": VARIABLE_CLASS, "service_level": VARIABLE_LEVEL, "flow_label": 0}
    assert [one["asked"] for one in connected] == [asked] * len(connected)
    assert {one["given"]["service_level"] for one in connected} == {VARIABLE_LEVEL}
    tos = {packet.tos for packet in pair.capture("pair", done(pair, f"nccl variables {case}"))}
    assert tos == {VARIABLE_CLASS}, "a route changed it"


def test_queue_pairs_of_a_job_without_a_map_take_paths_and_keep_their_class(pair: Outcome) -> None:
    connected = nccls(pair, "nccl unmarked")["connected"]
    assert connected
    for one in connected:
        assert one["asked"]["traffic_class"] == 0
        assert {**one["given"], "flow_label": 0} == one["asked"], "nothing but the port"
        assert one["given"]["flow_label"] != 0
    packets = pair.capture("pair", done(pair, "nccl unmarked"))
    assert {packet.tos for packet in packets} == {0}
    for packet in packets:
        assert packet.source_port in PLANNED_PORTS[packet.destination]


def port_of(flow_label: int) -> int:
    """As ibv_flow_label_to_udp_sport() has it."""
    return flow_label & 0x3FFF ^ flow_label >> 14 & 0x3F | 0xC000


def test_each_device_is_listed_with_the_address_that_verbs_use(pair: Outcome) -> None:
    (process,) = pair.steps["listed"].processes
    assert process.status == 0, process
    found = json.loads(process.stdout)
    assert [device["name"] for device in found] == ["rxe0", "rxe1"]
    for device, address in zip(found, PAIR_ADDRESSES, strict=True):
        (port,) = device["ports"]
        assert (port["number"], port["active"], port["link_layer"]) == (1, True, "Ethernet")
        assert port["interface"]
        routable = {gid["address"] for gid in port["gids"] if gid["kind"] == "RoCE v2"}
        assert f"::ffff:{address}" in routable
        assert {gid["interface"] for gid in port["gids"]} == {port["interface"]}
        assert device["pci_address"] is None
        if PYVERBS.exists():
            assert device["limits"]["queue_pairs"] > 0
            assert device["limits"]["rate_limit_Bps"] is None, "rxe can't pace"
