"""``crux exec``: what it allows, what it starts, and what real programs then send."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from control_fakes import until
from store_server import ServerThread

from crux_torch.agreement.registry import Registry
from crux_torch.cli.exec import LEFT_PORTS, route_lines, routes_through, start_of
from crux_torch.cli.main import main
from crux_torch.errors import CruxError, SettingsError
from crux_torch.network.loaders import parse_yaml
from crux_torch.network.topology import TopologyError
from lab import netns
from lab.fabric import MARKS, Fabric, FabricSpec

CRUX = [sys.executable, "-m", "crux_torch.cli", "exec"]
ALLOWED = {**MARKS, "CRUX_PROGRAMS": "kv:5,web:3"}
BOUND_S = 120
SIZE = 300_000
_OK, _REASON = netns.available()
in_fabric = pytest.mark.skipif(not _OK, reason=_REASON)


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("CRUX_", "LD_"))}
    return {**kept, **ALLOWED, **more}


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CRUX, *arguments],
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )


def topology(programs: str) -> str:
    links = ", ".join(f"{{between: [{h}, s], capacity_Bps: 1.0e9}}" for h in ("h0", "h1"))
    return (
        f"version: 1\nhosts: {{h0: {{}}, h1: {{}}}}\nswitches: {{s: tor}}\nlinks: [{links}]\n"
        f"qos: {{tcp: [{{dscp: 0}}, {{dscp: 10}}, {{dscp: 18}}], programs: {programs}}}\n"
    )


@pytest.mark.parametrize(
    ("level", "dscp"), [(None, 40), (0, 0), (2, 16), (5, 40)], ids=["highest", "0", "2", "5"]
)
def test_a_name_may_have_the_levels_up_to_its_own(level: int | None, dscp: int) -> None:
    added, said, _, row = start_of(environment(), "kv", level, None, LEFT_PORTS)
    assert row is not None
    assert (row.name, row.level, row.dscp, row.qp_dscp) == ("kv", dscp // 8, dscp, None)
    assert added["CRUX_TRANSPORT_ROUTE_LINES"] == f"* dscp {dscp}\n"
    assert added["CRUX_TRANSPORT_SKIP_PORTS"] == "22,53"
    assert f"TCP DSCP {dscp}; left alone: loopback" in said


@pytest.mark.parametrize(
    ("name", "level", "env", "reason"),
    [
        ("kv", 6, {}, "level 6 is not allowed: CRUX_PROGRAMS gives 'kv' up to 5"),
        ("db", None, {}, "CRUX_PROGRAMS allows kv, web, not 'db': the operator can add 'db:LEVEL'"),
        ("kv", None, {"CRUX_PROGRAMS": ""}, "CRUX_PROGRAMS allows nobody, not 'kv'"),
        ("kv", None, {"CRUX_PROGRAMS": "kv:7"}, "expected a level that plans may use"),
        ("kv", 1, {"CRUX_RESERVED_LEVELS": "1"}, "expected a level that plans may use"),
        ("kv", None, {"CRUX_PROGRAMS": "kv"}, "expected NAME:LEVEL"),
        ("kv", None, {"CRUX_DSCP_MAP": ""}, "no DSCP values are set: give CRUX_DSCP_MAP"),
        ("kv", None, {"CRUX_TRANSPORT": "0"}, "CRUX_TRANSPORT=0"),
    ],
)
def test_what_the_operator_does_not_allow_is_refused(
    name: str, level: int | None, env: dict[str, str], reason: str
) -> None:
    with pytest.raises(SettingsError, match=reason):
        start_of(environment(**env), name, level, None, ())


def test_a_topology_says_who_may(tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    env = {**environment(), "CRUX_TOPOLOGY": str(file), "CRUX_DSCP_MAP": ""}
    file.write_text(topology("{kv: 1}"))
    assert "level 1: TCP DSCP 10" in start_of(env, "kv", None, None, ()).said
    with pytest.raises(SettingsError, match=r"qos\.programs gives 'kv' up to 1"):
        start_of(env, "kv", 2, None, ())
    with pytest.raises(SettingsError, match="allows kv, not 'web'"):
        start_of(env, "web", None, None, ())
    file.write_text(topology("{kv: 2}"))
    with pytest.raises(CruxError, match=r"qos\.programs\.kv: .*\(0, 1\), got 2"):
        start_of(env, "kv", None, None, ())


def test_queue_pairs_get_their_map_and_a_route_for_each_address() -> None:
    fabric = parse_yaml(Fabric(FabricSpec(spines=2, hosts_per_leaf=1)).topology_yaml())
    routes = routes_through(fabric, "h0-0", "spine1")
    assert route_lines(None, 26, True, routes).splitlines() == [
        "* qp_dscp 26 overrides 1",
        "10.1.0.2 via 2:10.100.1.2,10.100.17.2 qp_dscp 26 overrides 1",
    ]
    for switch in ("h1-0", "spine9", "leaf0"):
        with pytest.raises(TopologyError, match=f"--through {switch}: "):
            routes_through(fabric, "h0-0", switch)


def test_the_program_takes_the_place_of_crux() -> None:
    done = run("--name", "kv", "--", "sh", "-c", "echo $PPID; exit 7")
    assert (done.returncode, done.stdout) == (7, f"{os.getpid()}\n")
    assert "kv at level 5: TCP DSCP 40" in done.stderr
    ended = run("--name", "kv", "--quiet", "--", "sh", "-c", "kill -PIPE $$")
    assert (ended.returncode, ended.stderr) == (-signal.SIGPIPE, "")
    dry = run("--name", "kv", "--", "sh", "-c", "echo $LD_PRELOAD", CRUX_DRY_RUN="1")
    assert (dry.stdout, "nothing is marked: CRUX_DRY_RUN" in dry.stderr) == ("\n", True)
    absent = run("--name", "kv", "--", "/no/such/program")
    assert (absent.returncode, "not found" in absent.stderr) == (127, True)
    refused = run("--name", "db", "--", "true")
    assert (refused.returncode, "allows kv, web" in refused.stderr) == (1, True)


def test_status_lists_the_program_while_it_runs() -> None:
    with ServerThread() as server:
        client = server.client()
        registry = Registry(client, "default")
        store = f"tcp://127.0.0.1:{server.port}"
        # It ends when it has no child left, so whoever keeps the row must be none.
        waits = (
            "import os, sys; sys.stdin.read()\ntry: os.wait()\nexcept ChildProcessError: exit(5)"
        )
        program = subprocess.Popen(
            [*CRUX, "--name", "kv", "--level", "2", "--", sys.executable, "-c", waits],
            env=environment(CRUX_STORE=store, CRUX_HOST="node7"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        until(registry.programs, BOUND_S, "a row")
        (row,) = registry.programs()
        user = pwd.getpwuid(os.getuid()).pw_name
        shown = CliRunner().invoke(main, ["status", "--store", store]).output
        cells = [re.split(r" *│ *", line.strip("│ ")) for line in shown.splitlines()]
        told = json.loads(CliRunner().invoke(main, ["status", "--store", store, "--json"]).output)
        # Its pipes end with it, though the process that keeps the row lives on for a moment.
        assert b"level 2" in program.communicate(timeout=BOUND_S)[1]
        until(lambda: not registry.programs(), BOUND_S, "no row")
        client.close()
    assert program.returncode == 5
    assert ["kv", "node7", "2", "TCP 16", user, str(program.pid)] in cells
    assert told["programs"] == [json.loads(msgspec.json.encode(row))]


def test_without_a_usable_store_the_program_runs_and_one_line_says_so() -> None:
    done = run("--name", "kv", "--quiet", "--", "true", CRUX_STORE="tcp://127.0.0.1:1")
    assert (done.returncode, done.stderr) == (0, "")
    absent = run("--name", "kv", "--", "true", CRUX_STORE_SECRET="/no/such/file")
    assert absent.returncode == 0
    assert "`crux status` does not list kv: " in absent.stderr


def test_what_can_not_be_marked_is_not_started(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = tmp_path / "main.c"
    source.write_text("int main(void) { return 0; }\n")
    program = tmp_path / "program"
    subprocess.run([compiler, "-static", "-o", program, source], check=True)
    done = run("--name", "kv", "--", str(program))
    assert (done.returncode, "statically linked" in done.stderr) == (126, True)


@pytest.mark.slow
@in_fabric
def test_both_ends_of_http_are_marked_and_take_the_path(tmp_path: Path) -> None:
    """``curl`` and Python's web server, judged by the queues of the switches that carried them."""
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    (tmp_path / "file").write_bytes(os.urandom(SIZE))
    file = tmp_path / "fabric.yaml"
    with Fabric(FabricSpec(spines=2, hosts_per_leaf=1, rate_mbit=1000)) as fabric:
        file.write_text(fabric.topology_yaml())
        client, server = fabric.host(0, 0), fabric.host(1, 0)

        def carried(link: str) -> dict[int, int]:
            return next(c.bytes for c in fabric.counters() if c.link == link)

        for port in (8000, 8022):
            web = [sys.executable, "-u", "-m", "http.server", str(port), "-d", str(tmp_path)]
            started = fabric.popen(
                server,
                [*CRUX, "--name", "web", "--leave-ports", "8022", "--quiet", "--", *web],
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            assert started.stdout is not None
            assert b"Serving HTTP" in started.stdout.readline()

        for spine in (0, 1):
            before = carried(f"spine{spine}->leaf0"), carried(f"leaf0->spine{spine}")
            done = subprocess.run(
                [
                    *("ip", "netns", "exec", client.namespace, *CRUX, "--name", "kv"),
                    *("--through", f"spine{spine}", "--", "curl", "-sS", "-o", "/dev/null"),
                    f"http://{server.address}:8000/file",
                ],
                env=environment(CRUX_TOPOLOGY=str(file), CRUX_HOST=client.name),
                capture_output=True,
                text=True,
                timeout=BOUND_S,
            )
            assert done.returncode == 0, done.stderr
            after = carried(f"spine{spine}->leaf0"), carried(f"leaf0->spine{spine}")
            assert after[0][3] - before[0][3] >= SIZE, "the server's class on the planned spine"
            assert after[1][5] - before[1][5] > 0, "the client's acknowledgements"
            assert f"through spine{spine} to 1 hosts" in done.stderr

        down = [f"spine{spine}->leaf0" for spine in (0, 1)]
        before_all = [carried(link) for link in down]
        fabric.run(client, ["curl", "-sS", "-o", "/dev/null", f"http://{server.address}:8022/file"])
        told = [carried(link) for link in down]
        grown = [
            sum(now[level] - then[level] for now, then in zip(told, before_all, strict=True))
            for level in (0, 3)
        ]
        assert grown[0] >= SIZE > 10 * grown[1], "a port that was to be left alone"


@pytest.mark.slow
@in_fabric
def test_ucx_over_tcp_is_marked_on_both_ends() -> None:
    program = shutil.which("ucx_perftest")
    if program is None:
        pytest.skip("no ucx_perftest (ucx-utils)")
    with Fabric(FabricSpec(hosts_per_leaf=1, rate_mbit=1000)) as fabric:
        client, server = fabric.host(0, 0), fabric.host(1, 0)
        argv = [*CRUX, "--name", "kv", "--quiet", "--", program]
        argv += ["-t", "ucp_put_bw", "-n", "20", "-w", "1", "-s", str(1 << 16)]
        env = environment(UCX_TLS="tcp", UCX_NET_DEVICES="eth0", UCX_WARN_UNUSED_ENV_VARS="n")
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        serving = fabric.popen(server, argv, env=env, **quiet)
        wait_for_listener(fabric, server.namespace, 13337)
        going = fabric.popen(client, [*argv, server.address], env=env, **quiet)
        assert going.wait(BOUND_S) == 0
        assert serving.wait(BOUND_S) == 0
        links = {c.link: c.bytes for c in fabric.counters()}
        up, down = links["leaf0->spine0"], links["leaf1->spine0"]
        assert up[5] >= 20 * (1 << 16)
        assert sum(up.values()) - up[5] < 5000, "what was sent before accept() returned"
        assert down[5] > 0


def wait_for_listener(fabric: Fabric, namespace: str, port: int) -> None:
    watch = (
        "import time\n"
        f"wanted = ':{port:04X} '\n"
        "while not any(wanted in line and ' 0A ' in line for name in ('tcp', 'tcp6')\n"
        "              for line in open('/proc/net/' + name)): time.sleep(0.05)\n"
    )
    argv = ["ip", "netns", "exec", namespace, sys.executable, "-c", watch]
    subprocess.run(argv, check=True, timeout=BOUND_S)
