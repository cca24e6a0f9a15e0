import json
import re
import sys
import types

import click
import msgspec
import pytest
from click.testing import CliRunner
from control_fakes import hosted_store
from dscp_maps import MARKS
from findings import sound
from loopback import free_port
from networks import LEAF_SPINE
from seen_fabric import Host, fragment, ring
from store_server import ServerThread

import crux_torch
from crux_torch.agreement.records import (
    Grid,
    JobRecord,
    OnTrial,
    PathCounts,
    Plan,
    PlanEntry,
    StepTimes,
    TriedPlan,
)
from crux_torch.agreement.registry import Registry, StoredEntry, StoredPlan
from crux_torch.cli import doctor
from crux_torch.cli import main as cli
from crux_torch.measure.profile import JobProfile, ProfileBurst
from crux_torch.network.discover.fragment import Fragment, SeenPair, SeenPath
from crux_torch.report import cluster_status
from crux_torch.settings import Settings
from crux_torch.store.endpoint import open_store
from crux_torch.words import si


@pytest.fixture
def crux(monkeypatch):
    """Runs ``crux`` in this process with an environment of its own."""
    for name in ("CRUX_STORE", "CRUX_LEVELS", "CRUX_TOPOLOGY", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        monkeypatch.delenv(name, raising=False)

    def run(*argv, **env):
        return CliRunner(env=env).invoke(cli.main, argv, prog_name="crux")

    return run


def test_help_lists_every_command_and_imports_none(crux, monkeypatch):
    monkeypatch.setattr(cli, "import_module", lambda name: pytest.fail(f"imported {name}"))
    result = crux("--help")
    assert result.exit_code == 0
    for name, (_, summary) in cli.SUBCOMMANDS.items():
        assert re.search(rf"^ +{name} +{re.escape(summary)}$", result.output, re.M)


def test_one_line_adds_a_command(crux, monkeypatch):
    module = types.ModuleType("crux_extra")
    module.hello = click.Command("hello", callback=lambda: click.echo("hello"))
    monkeypatch.setitem(sys.modules, "crux_extra", module)
    monkeypatch.setitem(cli.SUBCOMMANDS, "hi", ("crux_extra:hello", "Greets."))
    assert "Greets." in crux("--help").output
    assert crux("hi").output == "hello\n"


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("crux_torch.absent:x", "not part of this installation"),
        ("absent_package.cli:x", "pip install the package that provides 'absent_package'"),
    ],
)
def test_a_missing_part_costs_only_its_command(target, says, crux, monkeypatch):
    monkeypatch.setitem(cli.SUBCOMMANDS, "gone", (target, "Not there."))
    assert crux("--help").exit_code == 0
    result = crux("gone")
    assert result.exit_code == 1
    assert says in result.output
    assert "crux gone needs" in result.output


def states(result):
    return {check["part"]: check["state"] for check in json.loads(result.output)}


def test_doctor_says_of_each_missing_part_what_it_costs_and_how_to_get_it(crux):
    store = f"tcp://127.0.0.1:{free_port()}"
    result = crux("doctor", CRUX_STORE=store, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    checks = doctor.examine({"CRUX_STORE": store, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PATH": ""})
    missing = {check.part for check in checks if check.state == "missing"}
    assert {"store", "autoload", "topology"} <= missing
    for check in checks:
        assert check.part in result.output
        assert sound(check).cost in result.output
        assert check.remedy in result.output


def test_doctor_finds_a_store_that_answers(crux):
    with ServerThread() as server:
        store = f"tcp://127.0.0.1:{server.port}"
        assert states(crux("doctor", "--json", CRUX_STORE=store))["store"] == "ok"
    assert states(crux("doctor", "--json", CRUX_STORE=store))["store"] == "missing"
    assert states(crux("doctor", "--json", CRUX_STORE="none"))["store"] == "missing"
    told = states(crux("doctor", "--json", CRUX_STORE=store, CRUX_STORE_SECRET="/absent"))
    assert told["store"] == "broken"
    assert states(crux("doctor", "--json", CRUX_STORE="etcd://127.0.0.1:1,[::1]:1"))["store"] == (
        "missing"
    )


def test_doctor_fails_only_for_what_is_broken(crux):
    bad = crux("doctor", "--json", CRUX_LEVELS="many")
    assert bad.exit_code == 1
    assert states(bad)["settings"] == "broken"
    good = crux("doctor", "--json", CRUX_STORE="none")
    assert good.exit_code == (1 if "broken" in states(good).values() else 0)
    assert states(good)["settings"] == "ok"


def test_doctor_reads_the_topology_file(tmp_path):
    file = tmp_path / "cluster.yaml"
    for text, state, words in (
        (None, "broken", "No such file"),
        ("version: 1\nhosts: {a: \nlinks: []\n", "broken", "line 3"),
        ("version: 1\nhosts: {a: }\nlinks: []\n", "ok", "1 hosts, 0 links"),
    ):
        if text is not None:
            file.write_text(text)
        check = next(doctor.network.topology(Settings(topology=str(file), host="a")))
        assert (check.state, words in check.finding) == (state, True), check.finding


PROFILE = JobProfile(
    period_s=0.5,
    period_source="both",
    compute_s=0.4,
    flops=2.5e15,
    flops_source="counted",
    device_flops=2e16,
    gpus=8,
    bursts=(ProfileBurst(at=0.5, share=1.0),),
    t_s=0.25,
    t_source="topology",
    t_measured_s=0.26,
    overlap=0.6,
    exposed_s=0.1,
    iterations=12,
    measured_alone=True,
)
JOBS = (
    JobRecord(job="bert", incarnation="1", hosts=("h0",), gpus=4, state="starting"),
    JobRecord(
        marks=MARKS,
        job="gpt",
        incarnation="2",
        hosts=("h1", "h2", "h3"),
        gpus=8,
        state="running",
        profile=PROFILE,
        paths=PathCounts(as_planned=3, elsewhere=1, unknown=2),
        corrections_per_minute=2,
    ),
)
PLAN = Plan(
    epoch=3,
    fingerprint="f",
    valid_s=15.0,
    author="gpt",
    policy="crux",
    digest="d",
    entries=(
        PlanEntry(
            job="gpt",
            level=5,
            priority=1.5e16,
            intensity=1e16,
            correction=1.5,
            grid=Grid(shift_s=0.1, period_s=0.2575),
        ),
    ),
)


@pytest.fixture
def cluster(request):
    """A store on loopback with two jobs and a plan; its endpoint, and its registry."""
    with hosted_store() as endpoint:
        client = open_store(endpoint, timeout_s=60.0)
        registry = Registry(client, "lab")
        for job in JOBS:
            registry.publish_job(job, lease_s=getattr(request, "param", 60.0))
        assert registry.swap_plan(registry.look().plan, StoredPlan(renewal=1, plan=PLAN.head))
        for job in ("gpt", "gone"):
            entry = msgspec.structs.replace(PLAN.entries[0], job=job)
            registry.publish_follows(job, StoredEntry(digest="d", entry=entry))
        yield endpoint, registry
        client.close()


def test_status_as_json_is_the_records(crux, cluster):
    endpoint, _ = cluster
    result = crux("status", "--json", "--store", endpoint, "--cluster", "lab")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert msgspec.convert(found["jobs"], tuple[JobRecord, ...]) == JOBS
    assert msgspec.convert(found["plan"], Plan) == PLAN
    assert found["plan_renewed"] is None


def test_status_says_where_a_trial_stands_and_why_a_plan_was_taken_back(crux, cluster):
    endpoint, registry = cluster
    on_trial = OnTrial(name="t1", judge="gpt", jobs=2, on=False)
    entry = msgspec.structs.replace(PLAN.entries[0], trial=on_trial)
    registry.publish_follows("gpt", StoredEntry(digest="d", entry=entry))

    def shown(*tried):
        registry.publish_job(
            msgspec.structs.replace(JOBS[1], tried=tried or msgspec.UNSET), lease_s=60.0
        )
        result = crux("status", CRUX_STORE=endpoint, CRUX_CLUSTER="lab")
        assert result.exit_code == 0, result.output
        return result.output

    assert "measured before" in shown()
    numbers = {"change": -0.1234, "low": -0.2, "high": -0.05, "iterations": 45}
    back = TriedPlan(name="t1", jobs=("bert", "gpt"), state="worse", **numbers)
    text = shown(back)
    assert "taken back -12.3%" in text
    why = "taken back from bert, gpt: -12.3% busy GPUs (from -20.0% to -5.0%) after 45 iterations"
    assert why in text
    assert "+2.0%" in shown(msgspec.structs.replace(back, state="kept", change=0.02))
    # Of another component than the job is in now.
    assert "taken back" not in shown(msgspec.structs.replace(back, name="t0"))


def test_status_says_which_job_is_a_dry_run(crux, cluster):
    endpoint, registry = cluster
    registry.publish_job(msgspec.structs.replace(JOBS[1], dry_run=True), lease_s=60.0)
    result = crux("status", CRUX_STORE=endpoint, CRUX_CLUSTER="lab")
    assert result.exit_code == 0, result.output
    assert "dry run" in result.output


def cells_of(output):
    """The cells of each job by heading, over all blocks of the table."""
    found = {}
    for line in output.splitlines():
        cells = [cell.strip() for cell in line[1:-1].split(line[0])] if line[:1] in "┃│" else []
        if line.startswith("┃"):
            headings = cells
        elif cells:
            found.setdefault(cells[0], {}).update(zip(headings, cells, strict=True))
    return found


def test_status_shows_six_columns_and_says_what_they_are(crux, cluster):
    endpoint, registry = cluster
    steps = StepTimes(step_s=0.857, iterations=35, age_s=2.0, profile_age_s=150.0)
    registry.publish_steps("gpt", steps, 60.0)
    result = crux("status", CRUX_STORE=endpoint, CRUX_CLUSTER="lab", COLUMNS="80")
    assert result.exit_code == 0, result.output
    rows = cells_of(result.output)
    assert rows["gpt"] == {
        "job": "gpt",
        "state": "level 5",
        "step now": "857 ms",
        "alone": "500 ms",
        "slowdown": "1.71",
        "age": "2 s, 2 min",
    }
    assert rows["bert"] == {**dict.fromkeys(rows["gpt"], ""), "job": "bert", "state": "starting"}
    assert "plan 3 by gpt, policy crux" in result.output
    legend = result.output.partition("└")[2]
    for heading in list(rows["gpt"])[1:]:
        assert re.search(rf"^{heading}  ", legend, re.M)
    assert max(map(len, legend.splitlines())) <= 80
    assert "\x1b" not in result.output


def test_status_shows_a_range_where_a_step_alone_is_not_known(crux, cluster):
    endpoint, registry = cluster
    changes = {"measured_alone": False, "t_source": "measured", "compute_s": 0.35}
    profile = msgspec.structs.replace(PROFILE, **changes)
    registry.publish_job(msgspec.structs.replace(JOBS[1], profile=profile), 60.0)
    steps = StepTimes(step_s=0.6, iterations=35, age_s=2.0, fastest_s=0.4, profile_age_s=7300.0)
    registry.publish_steps("gpt", steps, 60.0)
    argv = ("status", "--store", endpoint, "--cluster", "lab")
    row = cells_of(crux(*argv).output)["gpt"]
    assert (row["alone"], row["slowdown"]) == ("350-400 ms", "1.50-1.71")
    assert row["age"] == "2 s, 2 h"
    assert "measured beside others" in crux(*argv).output
    found = json.loads(crux(*argv, "--json").output)["steps"]["gpt"]
    assert (found["least_alone_s"], found["alone_s"], found["alone_source"]) == (0.35, 0.4, "bound")


@pytest.mark.parametrize("width", [60, 80, 200])
def test_wide_status_hides_nothing(crux, cluster, width):
    endpoint, _ = cluster
    env = {"CRUX_STORE": endpoint, "CRUX_CLUSTER": "lab", "COLUMNS": f"{width}"}
    output = crux("status", "--wide", **env).output
    assert max(len(line) for line in output.splitlines() if line[:1] in "┃│") <= width
    rows = cells_of(output)
    assert rows["gpt"] == {
        "job": "gpt", "hosts": "h1,h2 +1", "GPUs": "8", "state": "running", "alone": "500 ms",
        "W FLOP": "2.5 P", "MFU": "25.0%", "t s": "0.25", "period s": "0.5", "overlap": "60%",
        "I FLOP/s": "10 P", "k": "1.5", "P": "15 P", "level": "5", "paths": "3/6, 1 astray",
        "grid s": "0.2575", "late/min": "2",
    }  # fmt: skip
    assert {k: v for k, v in rows["bert"].items() if v} == {
        "job": "bert", "hosts": "h0", "GPUs": "4", "state": "starting"
    }  # fmt: skip


def test_a_priority_without_a_bound_is_null_in_json(crux, cluster):
    endpoint, registry = cluster
    most = sys.float_info.max
    entry = msgspec.structs.replace(PLAN.entries[0], priority=most, intensity=most)
    registry.publish_follows("gpt", StoredEntry(digest="d", entry=entry))
    for command in (("status",), ("cluster", "plan")):
        argv = (*command, "--store", endpoint, "--cluster", "lab")
        output = crux(*argv, "--json").output
        assert "e+308" not in output
        found = json.loads(output)
        (told,) = (found["plan"] if command == ("status",) else found)["entries"]
        assert (told["priority"], told["intensity"], told["correction"]) == (None, None, 1.5)
    assert cells_of(crux("status", "--wide", *argv[2:]).output)["gpt"]["P"] == "inf"


def test_the_version_is_told(crux):
    assert crux("--version").output == f"crux, version {crux_torch.__version__}\n"


def test_status_names_hosts_that_are_claimed_beyond_their_devices(crux, cluster):
    endpoint, registry = cluster
    argv = ("status", "--store", endpoint, "--cluster", "lab")
    assert json.loads(crux(*argv, "--json").output)["contested"] == []
    liar = msgspec.structs.replace(JOBS[1], job="liar", gpus=1 << 20)
    for record in (liar, msgspec.structs.replace(liar, job="li\x1bar")):
        registry.publish_job(record, 60.0)
    found = json.loads(crux(*argv, "--json").output)["contested"]
    assert [host["host"] for host in found] == sorted(set(liar.hosts))
    assert found[0]["claimed"] == {"gpt": 1, "liar": 256, "li\x1bar": 256}
    assert found[0]["counted"]["liar"] + found[0]["counted"]["li\x1bar"] <= 255
    output = crux(*argv).output
    assert output.count("has 256 devices, and is claimed by gpt (at least 1, counted ") == len(
        found
    )
    assert "\x1b" not in output


def test_status_says_what_connections_contradict_in_a_topology(crux, cluster):
    endpoint, registry = cluster
    argv = ("status", "--store", endpoint, "--cluster", "lab")
    registry.publish_topology(LEAF_SPINE.encode())
    assert json.loads(crux(*argv, "--json").output)["network"] == []
    hops = (None, "10.9.9.9")
    pair = SeenPair("h0", "10.0.0.2", "h1", "10.1.0.2", (SeenPath(hops, connections=1),))
    registry.publish_job(msgspec.structs.replace(JOBS[1], seen=(pair,)), 60.0)
    (said,) = json.loads(crux(*argv, "--json").output)["network"]
    assert said == (
        "the topology does not fit: hop 2 from h0 to h1 is 10.9.9.9, where the topology has "
        "spine0, spine1 (gpt saw it)"
    )
    assert "hop 2 from h0 to h1 is 10.9.9.9" in " ".join(crux(*argv).output.split())


def test_status_says_how_much_of_a_network_that_nobody_gave_was_seen(crux, cluster):
    endpoint, registry = cluster
    argv = ("status", "--store", endpoint, "--cluster", "lab")
    hosts = [Host(0, 0), Host(1, 0)]
    registry.publish_job(ring("gpt", hosts), 60.0)
    assert json.loads(crux(*argv, "--json").output)["network"] == []
    whole = fragment(hosts)
    for seen, rest in (
        (whole.pairs[:1], ", without the paths of 1 of 2 pairs of hosts"),
        (whole.pairs, ""),
    ):
        part = Fragment.of(whole.hosts, seen)
        registry.publish_fragment("gpt", msgspec.json.encode(part))
        (said,) = json.loads(crux(*argv, "--json").output)["network"]
        assert said.startswith("nobody gives a topology: the network is as its jobs saw it, ")
        assert said.endswith(f"links{rest}")
        assert "nobody gives a topology" in crux(*argv).output


def test_status_names_jobs_whose_view_of_the_network_does_not_fit(crux, cluster, monkeypatch):
    endpoint, registry = cluster
    hosts = {"gpt": [Host(0, 0), Host(1, 0)], "vit": [Host(0, 1), Host(1, 1)]}
    for job, spines in (("gpt", (0, 1)), ("vit", range(8))):
        registry.publish_job(ring(job, hosts[job]), 60.0)
        registry.publish_fragment(job, raw := msgspec.json.encode(fragment(hosts[job], spines)))
    monkeypatch.setattr("crux_torch.agreement.seen_network.MAX_BYTES", len(raw))
    argv = ("status", "--store", endpoint, "--cluster", "lab")
    _, said = json.loads(crux(*argv, "--json").output)["network"]
    assert said.startswith("what jobs saw is over ")
    assert said.endswith(": the largest parts do not count, so these have no paths: vit")
    assert said in " ".join(crux(*argv).output.split())


def test_status_names_jobs_that_claim_too_large_a_network(crux, cluster, monkeypatch):
    endpoint, registry = cluster
    hosts = {"gpt": [Host(0, 0), Host(1, 0)], "vit": [Host(0, 1), Host(1, 1)]}
    for job, spines in (("gpt", (0, 1)), ("vit", range(8))):
        registry.publish_job(ring(job, hosts[job]), 60.0)
        registry.publish_fragment(job, msgspec.json.encode(fragment(hosts[job], spines)))
    # As much as the two spines of gpt cost, and less than eight do.
    monkeypatch.setattr("crux_torch.network.discover.shares.MAX_COST", 100)
    argv = ("status", "--store", endpoint, "--cluster", "lab")
    _, said = json.loads(crux(*argv, "--json").output)["network"]
    assert said.startswith("what jobs saw has more links than a network may have: ")
    assert said.endswith(", so these have no paths: vit")
    assert said in " ".join(crux(*argv).output.split())


def test_status_of_another_cluster_is_empty(crux, cluster):
    endpoint, _ = cluster
    result = crux("status", "--store", endpoint, "--cluster", "other")
    assert result.exit_code == 0
    assert "no jobs" in result.output
    assert "no plan" in result.output


@pytest.mark.parametrize("cluster", [0.5], indirect=True)
def test_status_that_settles_drops_the_dead_and_doubts_an_unrenewed_plan(crux, cluster):
    endpoint, _ = cluster
    argv = ("status", "--json", "--store", endpoint, "--cluster", "lab")
    assert len(json.loads(crux(*argv).output)["jobs"]) == 2
    settled = json.loads(crux(*argv, "--settle", "0.7").output)
    assert settled["jobs"] == []
    assert settled["plan_renewed"] is False


def test_status_sees_a_plan_being_renewed(cluster, monkeypatch):
    endpoint, registry = cluster

    def renew(seconds: float) -> None:
        assert registry.swap_plan(registry.look().plan, StoredPlan(renewal=2, plan=PLAN.head))

    monkeypatch.setattr(cluster_status.time, "sleep", renew)
    settings = Settings(store=endpoint, cluster="lab")
    assert cluster_status.read_status(settings, settle_s=1.0).plan_renewed is True


def test_status_prints_no_control_characters_of_a_tenant(crux, cluster):
    endpoint, registry = cluster
    evil = "\x1b[2J[red]x\u202e"
    registry.publish_job(msgspec.structs.replace(JOBS[0], job=evil, hosts=(evil,)), 60.0)
    output = crux("status", "--store", endpoint, "--cluster", "lab").output
    assert "[red]x" in output
    assert "\x1b" not in output
    assert "\u202e" not in output


def test_status_says_when_the_store_cannot_be_read(crux):
    store = f"tcp://127.0.0.1:{free_port()}"
    result = crux("status", "--store", store)
    assert result.exit_code == 1
    assert f"can't read the cluster's state: store {store}: " in result.output
    assert crux("status", "--store", "nowhere").exit_code == 2
    assert crux("status", "--store", "none").exit_code == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.5e12, "2.5 T"), (7.0, "7"), (sys.float_info.max, "inf"), (float("inf"), "inf")],
)
def test_status_shows_a_job_without_network_time_as_boundless(value: float, text: str) -> None:
    assert si(value) == text
    assert si(value, "FLOP") == (f"{text}FLOP" if " " in text else f"{text} FLOP")
