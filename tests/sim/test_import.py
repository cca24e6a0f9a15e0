"""``crux sim import``: what other tools write becomes jobs with bursts, or a clear error."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from profiled import moved

from crux_torch.cli.sim import sim
from crux_torch.measure import chrome_trace, traffic
from crux_torch.network.builders import crux_testbed, two_layer_clos
from crux_torch.sim.importers import FORMATS, format_of, scenario_of
from crux_torch.sim.importers.chakra import objects_in, read_chakra
from crux_torch.sim.importers.chrome import read_chrome
from crux_torch.sim.importers.goal import read_goal
from crux_torch.sim.importers.simai import read_simai
from crux_torch.sim.importers.workload import ImportedJob, ImportFailed, in_bursts
from crux_torch.sim.play import run_scenario
from crux_torch.sim.scenario import Scenario, parse_scenario

# The first layers of a file that SimAI's AICB wrote, for fewer GPUs and with a pipeline.
SIMAI = """\
HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 2 ep: 2 pp: 2 vpp: 1 ga: 2 all_gpus: 16 \
checkpoints: 0 checkpoint_initiates: 0 pp_comm: 8388608.0
4
grad_gather\t-1\t1\tNONE\t0\t1\tNONE\t0\t1\tALLGATHER\t1000\t100
embedding_layer\t-1\t622731\tALLREDUCE\t50331648\t1\tNONE\t0\t15091072\tNONE\t0\t100
mlp_moelayer\t-1\t1\tALLTOALL_EP\t100663296\t1\tALLTOALL_EP\t100663296\t1\tNONE\t0\t100
moe_grad_norm1\t-1\t1\tNONE\t0\t1\tNONE\t0\t1\tREDUCESCATTER_DP_EP\t4000\t100
"""
# Of LogGOPSim's dissemination_16.goal, for two ranks and with computation.
GOAL = """\
num_ranks 2

rank 0 {
l1: calc 1000 // ns
l2: send 500b to 1 tag 0
l2 requires l1
l3: calc 3000 cpu 1
}

rank 1 {
/* waits
for rank 0 */
l1: recv 500b from 0 tag 0
l2: calc 4000
l2 requires l1
l3: send 8b to 0 tag 7 cpu 0 nic 0
l3 requires l2
}
"""


def goal() -> str:
    return GOAL.replace("l3: calc 3000 cpu 1\n", "l3: calc 3000 cpu 1\nl4: recv 8b from 1 tag 7\n")


# SimAI


def test_simai_layers_run_forward_then_backward_in_the_groups_of_their_names() -> None:
    job = read_simai(SIMAI)
    total_ns = 622731 + 15091072 + 10
    assert job.ranks == 16
    assert job.compute_s == pytest.approx(total_ns * 1e-9 * 1.5)  # a bubble of 1 of 2 microbatches
    tensor = next(one for one in job.collectives if one.op == "allreduce")
    assert tensor.groups == tuple((r, r + 1) for r in range(0, 16, 2))
    assert tensor.at == pytest.approx((1 + 622731) / total_ns)
    experts = [one for one in job.collectives if one.op == "alltoall"]
    assert experts[0].groups[:2] == ((0, 2), (1, 3))
    assert [one.bytes for one in experts] == [100663296] * 2
    # Half of a reduce-scatter's bytes go as far round a ring as an all-reduce's.
    replicas = next(one for one in job.collectives if one.bytes == 2000)
    assert replicas.groups[:2] == ((0, 4), (1, 5))
    gathered = next(one for one in job.collectives if one.bytes == 500)
    assert gathered.groups[0] == (0, 2, 4, 6)
    assert gathered.at == 1.0
    stages = [one for one in job.collectives if one.op == "send"]
    assert [(one.bytes, one.groups[0]) for one in stages] == [
        (8388608.0, (0, 8)),
        (8388608.0, (8, 0)),
    ] * 2


# One rank's microbenchmark, as SimAI's examples have it, with spaces.
def test_simai_reads_files_with_spaces_and_without_a_pipeline() -> None:
    job = read_simai(
        "HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 8 ep: 1 pp: 1 ga: 1 all_gpus: 8 "
        "checkpoints: 0 checkpoint_initiates: 0\n1\n"
        "embedding_layer     -1 556000  ALLREDUCE   536870912      1       NONE 0        1      "
        "NONE   0      1 "
    )
    assert job.compute_s == pytest.approx(556002e-9)
    assert moved(job) == {"allreduce": 536870912}


# GOAL


def test_goal_sends_start_when_what_they_require_is_computed() -> None:
    job = read_goal(goal())
    assert job.ranks == 2
    assert job.compute_s == pytest.approx(5e-6)
    first, second = job.collectives
    assert (first.groups, first.bytes, first.at) == (((0, 1),), 500.0, pytest.approx(0.2))
    assert (second.groups, second.bytes, second.at) == (((1, 0),), 8.0, pytest.approx(1.0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOAL, "rank 1 sends 1 messages of tag 7 to rank 0, which receives 0"),
        ("", "expected num_ranks"),
        ("num_ranks 1\nrank 0 {\nl1: calc 5\n", "closing bracket"),
        ("num_ranks 1\nrank 0 {\nl1: calc 5\nl1 requires l2\n}", "line 4: no operation 'l2'"),
        ("num_ranks 1\nrank 0 {\nl1: calc 5\nl1 requires l1\n}", "circle"),
        ("num_ranks 1\nrank 0 {\nl1: calc 0\n}", "nothing is computed"),
        ("num_ranks 1\nrank 1 {\n}", "line 2: .* below 1"),
        ("num_ranks 1\nrank 0 {\nl1: put 5\n}", "line 3: .*expected calc"),
        (
            "num_ranks 2\nrank 0 {\n" + "".join(f"send 5b to 1 tag {t}\n" for t in range(9)) + "}",
            "tag 0 to rank 1",  # the same in every run
        ),
        ("num_ranks 1\nrank 0 {\nl1: recv 5b from -1\n}", "line 3: .*one rank and one tag"),
    ],
)
def test_a_schedule_that_cannot_be_played_is_refused(text: str, message: str) -> None:
    with pytest.raises(ImportFailed, match=message):
        read_goal(text)


def test_a_schedule_of_whole_hosts_says_so() -> None:
    one = "num_ranks 2\nrank 0 {\ncalc 5 cpu 0\nsend 8b to 1 nic 0\n}\nrank 1 {\nrecv 8b from 0\n}"
    assert read_goal(one).notes == ()
    for kind, more in (("CPUs", "calc 5 cpu 0\ncalc 5 cpu 1"), ("NICs", "calc 5")):
        several = one.replace("calc 5 cpu 0", more)
        if kind == "NICs":
            several = several.replace("nic 0", "nic 0\nsend 9b to 1 nic 1") + "\n"
            several = several.replace("recv 8b from 0", "recv 8b from 0\nrecv 9b from 0")
        (note,) = read_goal(several).notes
        assert f"a rank uses 2 {kind}, so it seems to be a host" in note


def test_comments_that_are_not_closed_go_on_to_the_end() -> None:
    assert read_goal(goal() + "/* " * 20_000) == read_goal(goal())


# Chakra


def varint(value: int) -> bytes:
    found = b""
    while value > 0x7F:
        found, value = found + bytes([value & 0x7F | 0x80]), value >> 7
    return found + bytes([value])


def message(*fields: tuple[int, int | bytes]) -> bytes:
    return b"".join(
        varint(number << 3) + varint(value)
        if isinstance(value, int)
        else varint(number << 3 | 2) + varint(len(value)) + value
        for number, value in fields
    )


def attribute(name: str, kind: int, value: int | bytes) -> tuple[int, bytes]:
    return 10, message((1, name.encode()), (kind, value))


def chakra(*nodes: bytes) -> bytes:
    return b"".join(varint(len(m)) + m for m in (message((1, b"0.0.4")), *nodes))


def chakra_rank(compute_us: int, group: bytes = b"") -> bytes:
    """Computes, then reduces 1,000 bytes, as ASTRA-sim's generator writes it."""
    return chakra(
        message((1, 1), (2, b"COMP"), (3, 4), (7, compute_us)),
        message(
            (1, 2),
            (3, 7),
            (5, varint(1)),  # packed
            attribute("comm_type", 9, 0),
            attribute("comm_size", 13, 1000),
            *([attribute("pg_name", 29, group)] if group else []),
        ),
        message((1, 3), (3, 4), (7, 30), (4, varint(2))),
    )


def test_chakra_collectives_wait_for_all_their_ranks() -> None:
    job = read_chakra({"t.0.et": chakra_rank(10), "t.1.et": chakra_rank(70)})
    assert job.ranks == 2
    assert job.compute_s == pytest.approx(1e-4)
    (only,) = job.collectives
    assert (only.op, only.bytes, only.groups) == ("allreduce", 1000, ((0, 1),))
    assert only.at == pytest.approx(0.7)


def test_chakra_groups_have_the_ranks_that_name_them() -> None:
    files = {f"t.{r}.et": chakra_rank(10, b"even" if r % 2 == 0 else b"odd") for r in range(4)}
    groups = {one.groups for one in read_chakra(files).collectives}
    assert groups == {((0, 2),), ((1, 3),)}


def test_chakra_json_says_the_same_as_protobuf() -> None:
    nodes = [
        {"id": "1", "name": "COMP", "type": "COMP_NODE", "durationMicros": "10"},
        {
            "id": "2",
            "type": "COMM_COLL_NODE",
            "dataDeps": ["1"],
            "attr": [
                {"name": "comm_type", "int64Val": "0"},
                {"name": "comm_size", "uint64Val": "1000"},
            ],
        },
        {"id": "3", "type": "COMP_NODE", "durationMicros": "30", "ctrlDeps": ["2"]},
    ]
    text = json.dumps({"version": "0.0.4"}) + "".join(json.dumps(n, indent=2) for n in nodes)
    files = {"t.0.json": text.encode(), "t.1.json": text.encode()}
    assert format_of(files) == "chakra"
    assert read_chakra(files) == read_chakra({f"t.{r}.et": chakra_rank(10) for r in range(2)})


# As Chakra's converter describes a call on the CPU that launches a kernel and an all-reduce.
@pytest.mark.parametrize("packed", [True, False])
def test_chakras_converter_orders_launches_but_not_kernels(packed: bool) -> None:
    protobuf = (
        message((2, message((1, b"schema"), (29, b"1.0.1")))),
        message((1, 1), (3, 7), (7, 10), (4, 1), (4, 99), attribute("is_cpu_op", 27, 1)),
        message((1, 2), (3, 4), (7, 20), (4, 1), (5, 1)),
        message(
            (1, 3), (3, 7), (5, 1), attribute("comm_type", 9, 0), attribute("comm_size", 9, 1000)
        ),
        message((1, 4), (3, 4), (7, 30), (5, 3)),
    )
    about = {"attr": [{"name": "schema", "stringVal": "1.0.1"}]}
    on_cpu = [{"name": "is_cpu_op", "boolVal": True}]
    size = [{"name": "comm_type", "int64Val": "0"}, {"name": "comm_size", "int64Val": "1000"}]
    launch = {"id": 1, "type": "COMM_COLL_NODE", "durationMicros": 10, "attr": on_cpu}
    objects = (
        about,
        launch | {"ctrlDeps": [1, 99]},
        {"id": 2, "type": "COMP_NODE", "durationMicros": 20, "ctrlDeps": [1], "dataDeps": [1]},
        {"id": 3, "type": "COMM_COLL_NODE", "dataDeps": [1], "attr": size},
        {"id": 4, "type": "COMP_NODE", "durationMicros": 30, "dataDeps": [3]},
    )
    held, ending = (
        (b"".join(varint(len(m)) + m for m in protobuf), "et")
        if packed
        else ("".join(map(json.dumps, objects)).encode(), "json")
    )
    job = read_chakra({f"t.{r}.{ending}": held for r in range(2)})
    assert job.compute_s == pytest.approx(60e-6)
    (only,) = job.collectives
    assert (only.op, only.bytes, only.at) == ("allreduce", 1000, pytest.approx(0.5))


def test_chakra_skips_the_other_files_of_a_folder() -> None:
    files = {f"t.{r}.et": chakra_rank(10) for r in range(2)}
    assert read_chakra({**files, "t.xml": b"<algo/>"}) == read_chakra(files)


def test_chakra_messages_wait_for_their_sender() -> None:
    def end(kind: int, *deps: int, **attributes: int) -> bytes:
        given = [attribute(name, 9, value) for name, value in attributes.items()]
        return message((1, 2), (3, kind), *((4, dep) for dep in deps), *given)

    compute = message((1, 1), (3, 4), (7, 50))
    files = {
        "t.0.et": chakra(compute, end(5, 1, comm_dst=1, comm_size=700, comm_tag=3)),
        "t.1.et": chakra(end(6, comm_src=0, comm_tag=3), message((1, 1), (3, 4), (7, 50), (4, 2))),
    }
    job = read_chakra(files)
    assert job.compute_s == pytest.approx(1e-4)
    assert [(one.op, one.bytes, one.groups, one.at) for one in job.collectives] == [
        ("send", 700, ((0, 1),), 0.5)
    ]


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"t.et": b""}, r"t.et: expected a name that ends in .RANK.et"),
        ({"t.1.et": chakra_rank(1)}, "expected those of all ranks"),
        ({"t.0.et": b"\xff"}, "t.0.et: a number is cut off"),
        ({"t.0.et": chakra(message((1, 1), (3, 4), (4, 9)))}, "node 1: depends on 9"),
        ({"t.0.et": chakra(message((1, 1), (3, 7)))}, "node 1: comm_type is missing"),
        ({"t.0.et": chakra(message((1, 1), (3, 4)))}, "nothing is computed"),
        # Chakra's converter does not say whom a message goes to.
        (
            {"t.0.et": chakra(message((1, 1), (3, 5), attribute("comm_size", 9, 5)))},
            "node 1: comm_dst is missing, which says the receiver; .* profiler's own traces",
        ),
        # What Chakra's feeder reads in JSON.
        ({"t.0.json": b'{"workload_graph": [{"Id": 1, "NodeType": 7}]}'}, "Chakra's feeder reads"),
        ({"t.0.json": b'{"version": "1"}'}, "no object has a type"),
    ],
)
def test_a_chakra_trace_that_cannot_be_read_is_refused(files: dict, text: str) -> None:
    with pytest.raises(ImportFailed, match=text):
        read_chakra(files)


def coll(number: int, comm_type: int, size: int, *more: tuple[int, bytes]) -> bytes:
    """A collective after the node 1."""
    given = (attribute("comm_type", 9, comm_type), attribute("comm_size", 13, size))
    return message((1, number), (3, 7), (5, 1), *given, *more)


COMPUTE = message((1, 1), (3, 4), (7, 50))


@pytest.mark.parametrize("kind", ["gather", "scatter"])
def test_chakra_gathers_and_scatters_count_as_they_do_live(kind: str) -> None:
    # What a rank puts in: its part, or at the root all of them and elsewhere nothing.
    files = {
        f"t.{r}.et": chakra(
            COMPUTE, coll(2, 3, 1000) if kind == "gather" else coll(2, 4, 0 if r else 4000)
        )
        for r in range(4)
    }
    job = read_chakra(files)
    sends = {group: one.bytes for one in job.collectives for group in one.groups}
    expected = traffic.flows(kind, 4000, range(4), [str(r) for r in range(4)], peer=0)
    assert {(str(a), str(b)): size for (a, b), size in sends.items()} == expected
    assert {one.op for one in job.collectives} == {"send"}


def test_what_chakras_converter_leaves_out_is_said() -> None:
    named = attribute("pg_name", 29, b"1")
    both = chakra(COMPUTE, coll(2, 0, 0), coll(3, 0, 500, named))
    notes = read_chakra({f"t.{r}.et": both for r in range(2)}).notes
    assert [note[:40] for note in notes] == [
        "comm_size is 0 for 1 of 2 collectives, a",
        "pg_name is missing for 1 of 2 collective",
    ]


def test_chakra_files_of_one_host_are_not_taken_for_all() -> None:
    said = b'["[{\\\\"pg_name\\\\": \\\\"0\\\\", \\\\"group_size\\\\": 16}]"]'
    init = message((1, 9), (2, b"## process_group:init ##"), (3, 1), (8, message((1, said))))
    files = {f"t.{r}.et": chakra(COMPUTE, coll(2, 0, 100), init) for r in range(8)}
    with pytest.raises(ImportFailed, match="files of 8 ranks, but they name a group of 16"):
        read_chakra(files)
    assert read_chakra({f"t.{r}.et": files["t.0.et"] for r in range(16)}).ranks == 16


class Counted(str):
    """A text that counts the characters that are copied out of it."""

    copied = 0

    def __getitem__(self, key: Any) -> str:
        found = super().__getitem__(key)
        Counted.copied += len(found)
        return found


def test_the_work_on_chakras_json_grows_with_its_size() -> None:
    text = Counted(
        "\n".join(json.dumps({"id": i, "type": "COMP_NODE"}, indent=2) for i in range(300))
    )
    assert len(list(objects_in(text))) == 300
    assert Counted.copied <= len(text)


@pytest.mark.parametrize("name", [b"a\xff\xf0(", b"a\x01\x02", rb"C:\Users\q"])
@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_names_in_chakras_json_are_not_needed(name: bytes, mark: bytes) -> None:
    nodes = [
        {"id": 1, "name": "NAME", "type": 4, "durationMicros": 10},
        {"id": 2, "type": "COMM_COLL_NODE", "dataDeps": [1]},
    ]
    size = [{"name": "comm_type", "int64Val": 0}, {"name": "comm_size", "int64Val": 1000}]
    nodes[1]["attr"] = size  # type: ignore[assignment]
    text = json.dumps({"version": "1"}) + "".join(map(json.dumps, nodes))
    files = {f"t.{r}.json": mark + text.encode().replace(b"NAME", name) for r in range(2)}
    assert format_of(files) == "chakra"
    assert moved(read_chakra(files)) == {"allreduce": 1000}


# Chrome


def event(name: str, cat: str, ts: float, dur: float, **args: object) -> dict:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 0, "args": args}


def kineto(rank: int, world: int, *events: dict) -> bytes:
    about = {"backend": "nccl", "rank": rank, "world_size": world}
    return json.dumps(
        {"schemaVersion": 1, "distributedInfo": about, "traceEvents": list(events)}
    ).encode()


def steps(*starts: float) -> list[dict]:
    return [event(f"ProfilerStep#{i}", "user_annotation", t, 90) for i, t in enumerate(starts)]


def reduced(ts: float, dur: float, ranks: str = "[0, 1]") -> dict:
    """As torch's profiler describes a kernel of NCCL."""
    about = {
        "External id": 7,
        "Collective name": "allreduce",
        "dtype": "BFloat16",
        "In msg nelems": 500,
        "Out msg nelems": 500,
        "Group size": 2,
        "Process Group Name": "1",
        "Process Group Ranks": ranks,
    }
    name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    return event(name, "kernel", ts, dur, **about)


def test_kineto_time_that_no_kernel_covers_is_communication() -> None:
    held = kineto(
        0,
        2,
        *steps(0, 100, 200),
        *(e for t in (0, 100, 200) for e in (reduced(t + 40, 30), event("gemm", "kernel", t, 50))),
    )
    job = read_chrome({"a": held})
    # Of 100 us each, 20 are communication that no computation covers.
    assert job.compute_s == pytest.approx(80e-6)
    (only,) = job.collectives
    assert (only.op, only.bytes, only.groups) == ("allreduce", 1000, ((0, 1),))
    assert only.at == pytest.approx(0.5)


def test_one_kineto_trace_stands_for_all_ranks() -> None:
    job = read_chrome({"a": kineto(1, 8, *steps(0, 100), reduced(10, 20, "[1, 3]"))})
    assert job.ranks == 8
    assert job.collectives[0].groups == ((0, 2), (1, 3), (4, 6), (5, 7))


def test_groups_of_one_rank_send_nothing() -> None:
    held = kineto(1, 4, *steps(0, 100), reduced(10, 5, "[1]"), reduced(20, 20, "[0, 1]"))
    assert [one.groups for one in read_chrome({"a": held}).collectives] == [((0, 1), (2, 3))]


# Before torch 2.3.
def test_a_kernel_is_told_by_the_host_that_launched_it_in_the_iteration_before() -> None:
    kernels = [reduced(t + 10, 20) for t in (0, 100, 200)]
    launches = [event("record_param_comms", "cpu_op", t - 50, 5) for t in (0, 100, 200)]
    for i, (kernel, launch) in enumerate(zip(kernels, launches, strict=True)):
        launch["args"] = kernel["args"] | {"External id": i}
        kernel["args"] = {"External id": i}
    job = read_chrome({"a": kineto(0, 2, *steps(0, 100, 200), *launches, *kernels)})
    assert moved(job) == {"allreduce": 1000}


def test_all_kineto_traces_tell_each_collective_once() -> None:
    files = {
        f"r{r}": kineto(r, 4, *steps(0, 100), reduced(10 + 5 * r, 40 - 5 * r, group))
        for r, group in enumerate(["[0, 1]", "[0, 1]", "[2, 3]", "[2, 3]"])
    }
    job = read_chrome(files)
    assert [one.groups for one in job.collectives] == [((0, 1),), ((2, 3),)]
    assert job.compute_s == pytest.approx(75e-6)  # of the rank that waits least


def test_a_send_goes_from_its_rank_to_the_receiver() -> None:
    sent = reduced(10, 20, "[1, 3]")
    sent["args"] |= {"Collective name": "send", "Dst Rank": 3}
    files = {f"r{r}": kineto(r, 4, *steps(0, 100), *([sent] if r == 1 else [])) for r in range(4)}
    (only,) = read_chrome(files).collectives
    assert (only.op, only.groups) == ("send", ((1, 3),))


def test_cruxs_own_trace_is_read() -> None:
    args = {
        "Input Dims": [[4096]],
        "Input type": ["unsigned char"],
        "Process Group Name": "0",
        "Process Group Ranks": [0, 1],
        "Group size": 2,
        "Sequence": 1,
        "Peer": -1,
    }
    files = {
        f"host_{r}.pt.trace.json": kineto(
            r, 2, *steps(0, 100), event("gloo:all_gather", "cpu_op", 60, 30, **args)
        )
        for r in range(2)
    }
    job = read_chrome(files)
    assert job.compute_s == pytest.approx(70e-6)
    assert [(one.op, one.bytes, one.at) for one in job.collectives] == [
        ("allreduce", 2048, pytest.approx(60 / 70))
    ]


@pytest.mark.parametrize(
    ("held", "text"),
    [
        (b"{}", "expected a trace with traceEvents"),
        (b'{"traceEvents": []}', "expected rank and world_size"),
        (kineto(0, 2), "expected events"),
        (kineto(0, 1, reduced(0, 9, "[0]")), "expected a job of several ranks"),
        (kineto(0, 10**9, reduced(0, 9, "[0]")), "world_size is 1000000000, expected 1048576"),
        (kineto(0, 2, event("ncclKernel_AllReduce", "kernel", 0, 9, stream=7)), "torch 2.3"),
        (kineto(0, 2, reduced(0, 9, "[0, 5]")), "expected ranks of the job"),
        (kineto(0, 64, reduced(0, 9, "[0, 1, ..., 63]")), "nothing tells its ranks"),
        # What torch's profiler writes of gloo.
        (
            kineto(0, 2, event("gloo:all_reduce", "user_annotation", 0, 9)),
            "nothing tells its bytes",
        ),
        (kineto(0, 2, reduced(0, 9)), "no time is left for computation"),
    ],
)
def test_a_trace_that_cannot_be_read_is_refused(held: bytes, text: str) -> None:
    with pytest.raises(ImportFailed, match=text):
        read_chrome({"a": held})


# All formats

SAMPLES = {
    "simai": {"w.txt": SIMAI.encode()},
    "goal": {"s.goal": goal().encode()},
    "chakra": {f"t.{r}.et": chakra_rank(10) for r in range(2)},
    "chrome": {f"r{r}": kineto(r, 2, *steps(0, 100), reduced(10, 20)) for r in range(2)},
}


@pytest.mark.parametrize("kind", FORMATS)
def test_the_format_is_told_by_how_a_file_begins(kind: str) -> None:
    assert format_of(SAMPLES[kind]) == kind


@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_with_a_reason(kind: str, data: st.DataObject) -> None:
    name, held = data.draw(st.sampled_from(sorted(SAMPLES[kind].items())))
    at = data.draw(st.integers(0, len(held)))
    cut = data.draw(st.integers(0, 12))
    other = data.draw(
        st.binary(max_size=6) | st.sampled_from([b"0", b"-1", b"9" * 30, b"\n", b'"'])
    )
    damaged = {**SAMPLES[kind], name: held[:at] + other + held[at + cut :]}
    try:
        job = FORMATS[kind](damaged)
    except ImportFailed:
        return
    assert job.compute_s > 0
    for one in job.collectives:
        assert 0.0 <= one.at <= 1.0
        assert one.bytes > 0
        assert all(0 <= rank < job.ranks for group in one.groups for rank in group)


@pytest.mark.parametrize("bursts", [1, 3, 1000])
def test_bursts_carry_all_bytes_and_start_no_earlier(bursts: int) -> None:
    job = read_simai(SIMAI)
    merged = in_bursts(job.collectives, bursts)
    assert len({one.at for one in merged}) <= bursts
    assert moved(ImportedJob(16, 1.0, merged)) == pytest.approx(moved(job))
    for one in merged:
        assert one.at >= min(
            other.at
            for other in job.collectives
            if (other.op, other.bytes, other.groups) == (one.op, one.bytes, one.groups)
        )


def test_imported_jobs_share_one_network(tmp_path: Path) -> None:
    files = {"gpt": "w.txt", "ring": "s.goal"}
    (tmp_path / "w.txt").write_text(SIMAI)
    (tmp_path / "s.goal").write_text(goal())
    out = tmp_path / "s.json"
    given_jobs = [f"{name}={tmp_path / file}" for name, file in files.items()]
    found = CliRunner().invoke(
        sim, ["import", *given_jobs, "--out", str(out), "--topology", "testbed", "--horizon", "5"]
    )
    assert found.exit_code == 0, found.output
    assert "gpt: 16 ranks" in found.output
    told = CliRunner().invoke(
        sim, ["import", *given_jobs, "--out", str(out), "--topology", "testbed", "--json"]
    )
    assert [(row["job"], row["notes"]) for row in json.loads(told.output)] == [
        ("gpt", []), ("ring", [])
    ]  # fmt: skip
    scenario = parse_scenario(out.read_text())
    report = run_scenario(scenario)
    assert set(report.jobs) == {"gpt", "ring"}
    assert all(job.completed > 0 for job in report.jobs.values())
    # The same file serves the commands that compare schedulers.
    for command in ("compare", "advise"):
        again = CliRunner().invoke(sim, [command, str(out), "--schedulers", "ecmp,crux-paper"])
        assert again.exit_code == 0, again.output


def test_gzip_and_hidden_files_make_no_difference(tmp_path: Path) -> None:
    held = chakra_rank(10)
    kinds = {"plain": (held, ".et"), "packed": (gzip.compress(held), ".et.gz")}
    scenarios = []
    for kind, (data, ending) in kinds.items():
        (tmp_path / kind).mkdir()
        for r in range(2):
            (tmp_path / kind / f"t.{r}{ending}").write_bytes(data)
        (tmp_path / kind / "._t.0.et").write_bytes(b"what macOS adds")
        out = tmp_path / f"{kind}.json"
        found = CliRunner().invoke(sim, ["import", f"a={tmp_path / kind}", "--out", str(out)])
        assert found.exit_code == 0, found.output
        assert "stays inside its hosts" in found.output
        scenarios.append(out.read_text())
    assert scenarios[0] == scenarios[1]


def test_a_network_that_sprays_carries_the_same_bytes_more_evenly() -> None:
    jobs = {"gpt": read_simai(SIMAI)}
    hashed, spread = (
        scenario_of(
            jobs, crux_testbed(), placement="none", bursts=4, seed=0, horizon_s=1.0, spray=spray
        )[0]
        for spray in (False, True)
    )

    def bytes_up(scenario: Scenario) -> list[float]:
        total: dict[str, float] = {}
        for burst in scenario.jobs["gpt"].sent:
            for part in burst.parts:
                traffic.add_flows(total, part)
        return [size for link, size in total.items() if re.match(r"tor.*->agg", link)]

    assert sum(bytes_up(spread)) == pytest.approx(sum(bytes_up(hashed)))
    assert max(bytes_up(spread)) < max(bytes_up(hashed))


def test_a_flow_has_all_paths_of_the_papers_two_layer_cluster() -> None:
    scenario, _ = scenario_of(
        {"gpt": read_simai(SIMAI)}, two_layer_clos(2, 2, 16),
        placement="none", bursts=1, seed=0, horizon_s=1.0, spray=True,
    )  # fmt: skip
    (burst,) = scenario.jobs["gpt"].sent
    total: dict[str, float] = {}
    for part in burst.parts:
        traffic.add_flows(total, part)
    up = [moved for link, moved in total.items() if re.match(r"tor0->agg", link)]
    # With fewer candidates than spines, flows leave some of them out.
    assert up == pytest.approx([sum(up) / 16] * 16)


def test_a_job_that_fits_nowhere_is_refused() -> None:
    job = ImportedJob(1000, 1.0, ())
    with pytest.raises(ImportFailed, match="a: needs 1000 GPUs, of 96"):
        scenario_of({"a": job}, crux_testbed(), placement="hived", bursts=1, seed=0, horizon_s=1.0)


@pytest.mark.parametrize(
    ("given_jobs", "message"),
    [
        (["x"], "expected NAME=PATH"),
        (["x=/nowhere"], "/nowhere: No such file"),
        (["x=EMPTY"], "holds no files"),
        (["x=BAD"], "format is not known"),
        (["x=CUT"], "expected what gzip packed"),
        (["x=PIPE"], "expected a regular file, not a pipe"),
        (["x=DEEP"], "nested too deeply"),
        (["x=DEEP_CHAKRA"], "nested too deeply"),
        (["x=ALONE"], "no rank sends anything to another"),
        (["x=PYTORCH"], "got an execution trace of PyTorch"),
    ],
)
def test_what_cannot_be_imported_ends_with_a_message(
    tmp_path: Path, given_jobs: list[str], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").write_bytes(struct.pack("<4I", *range(4)))
    (tmp_path / "cut").write_bytes(gzip.compress(SIMAI.encode())[:40])
    (tmp_path / "t.0.et").write_bytes(chakra_rank(10))
    (tmp_path / "et.json").write_text('{"schema": "1.0.1", "nodes": []}')
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "deep").write_text('{"traceEvents": [{"args": {"a": ' + "[" * 100_000)
    (tmp_path / "deep.0.json").write_text('{"version": ' + "[" * 100_000)
    places = {"PIPE": tmp_path / "pipe", "DEEP_CHAKRA": tmp_path / "deep.0.json"}
    places |= {"DEEP": tmp_path / "deep"}
    places |= {"EMPTY": tmp_path / "empty", "BAD": tmp_path / "bad", "CUT": tmp_path / "cut"}
    places |= {"ALONE": tmp_path / "t.0.et", "PYTORCH": tmp_path / "et.json"}
    for word, place in places.items():
        given_jobs = [job.replace(word, str(place)) for job in given_jobs]
    found = CliRunner().invoke(sim, ["import", *given_jobs, "--out", str(tmp_path / "s.json")])
    assert found.exit_code == 1
    assert message in found.output


def test_a_trace_of_crux_names_the_ranks_of_its_groups() -> None:
    group = chrome_trace.GroupInfo("0", (3, 1), 0)
    record = {"group": 0, "bytes": 1, "world_size": 2, "sequence": 1, "peer": -1}
    record |= {"start_ns": 0, "issue_ns": 0}
    assert chrome_trace._arguments(record, [group])["Process Group Ranks"] == [3, 1]
