"""The launcher's parser and what it hands to torchrun, without starting a job."""

import argparse
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from store_server import secret_file
from torch.distributed import run as torchrun

from crux_torch.agent.summary import Summary
from crux_torch.settings import SETTINGS, Settings
from cruxrun import main as cruxrun
from cruxrun.flags import name_of_job

pytestmark = pytest.mark.filterwarnings("ignore:Unable to enable fault handler")

GOOD = {
    "programs": "kv-cache:1",
    "switch_groups": "none",
    "roce_ecn": "2",
    "store": "tcp://10.0.0.1:29410",
    "cluster": "prod",
    "job": "gpt-7",
    "levels": "4",
    "reserved_levels": "0,3",
    "servers": "2,3",
    "dscp_map": "0,8,16,24,32,40,48,46",
    "rdma_dscp_map": "10,12,14,18,20,22,28,30",
    "policy": "crux",
    "log_level": "info",
    "trace": "/tmp/traces",
    "metrics": "29481",
    "device_flops": "1e12",
    "ports": "30000-30999",
    "dispatch": "",
}


def stock_options():
    return [a for a in torchrun.get_args_parser()._actions if a.option_strings]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("CRUX_", "PET_")):
            monkeypatch.delenv(name)


@pytest.fixture
def launched(monkeypatch):
    """Calls main and returns what torchrun was given: its arguments and its environment."""

    def launch(*argv):
        seen = []
        monkeypatch.setattr(torchrun, "run", lambda args: seen.append((args, dict(os.environ))))
        cruxrun.main([*argv, "train.py"])
        assert len(seen) == 1
        return seen[0]

    monkeypatch.setenv("CRUX_STORE", "none")
    return launch


@pytest.fixture
def topology(tmp_path):
    """A file with this host, which it knows by its name, and with another by an address."""
    return topology_of(tmp_path, [socket.gethostname(), "h0-1"])


def topology_of(folder, hosts, addresses="{}"):
    links = ", ".join(f"{{between: [{h}, tor], capacity_Bps: 1e9}}" for h in hosts)
    named = ", ".join(f"{h}: " for h in hosts)
    file = folder / "cluster.yaml"
    file.write_text(
        f"version: 1\nhosts: {{{named}}}\nswitches: {{tor: tor}}\n"
        f"links: [{links}]\naddresses: {addresses}\n"
    )
    return str(file)


def value_for(action):
    if action.nargs == 0:
        return []
    if action.choices:
        return [next(iter(action.choices))]
    return ["7"]


def parsed_as_by_torchrun(*argv):
    stock = vars(torchrun.get_args_parser().parse_args(argv))
    ours = vars(cruxrun.get_args_parser().parse_args(argv))
    assert {k: v for k, v in ours.items() if not k.startswith("crux_")} == stock
    assert all(v is None for k, v in ours.items() if k.startswith("crux_"))
    return stock


def test_every_torchrun_flag_and_abbreviation_parses_to_the_same_value():
    for action in stock_options():
        for name in action.option_strings:
            if action.dest not in ("help", "print_completion"):
                argv = [name, *value_for(action), "train.py", "--crux-levels", "x", "-m"]
                parsed_as_by_torchrun(*argv)
    assert parsed_as_by_torchrun("--nn", "2", "--stand", "train.py")["nnodes"] == "2"


@pytest.mark.parametrize("action", stock_options(), ids=lambda a: a.dest)
def test_pet_variables_reach_every_flag_that_torchrun_reads_them_for(action, monkeypatch):
    text = "1" if action.nargs == 0 else value_for(action)[0]
    monkeypatch.setenv(f"PET_{action.dest.upper()}", text)
    parsed_as_by_torchrun("train.py")


def test_help_keeps_torchruns_and_documents_every_setting(monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    text = cruxrun.get_args_parser().format_help()
    for action in stock_options():
        for name in action.option_strings:
            assert name in text
    group = re.sub(r"\s+", " ", text[text.index("\ncrux:") :])
    for s in SETTINGS:
        assert s.flag in group
        assert "--" + s.flag[2:].replace("-", "_") in group
        assert s.env in group
        assert s.meaning[1:] in group
        if s.default_text and not isinstance(s.default, bool):
            assert f"[{s.env}; default {s.default_text}]" in group


def test_completion_is_for_cruxrun(monkeypatch, capsys):
    if "print_completion" not in {a.dest for a in stock_options()}:
        pytest.skip("this torch has no --print-completion")
    shtab = argparse.Namespace(
        SUPPORTED_SHELLS=["bash", "zsh"],
        complete=lambda parser, shell: f"{shell} for {parser.prog}",
    )
    monkeypatch.setitem(sys.modules, "shtab", shtab)
    with pytest.raises(SystemExit) as exit_:
        cruxrun.get_args_parser().parse_args(["--print-completion", "zsh"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == "zsh for cruxrun\n"


@pytest.mark.parametrize("underscores", [False, True])
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.field)
def test_each_flag_becomes_its_variable_and_beats_it(
    setting, underscores, launched, monkeypatch, topology
):
    flag = "--" + setting.flag[2:].replace("-", "_") if underscores else setting.flag
    if isinstance(setting.default, bool):
        _, env = launched(flag)
        assert env[setting.env] == ("0" if setting.default else "1")
        return
    monkeypatch.setenv(setting.env, setting.default_text)
    good = topology if setting.field == "topology" else GOOD.get(setting.field, "2.5")
    before = dict(os.environ)
    _, env = launched(flag, good)
    assert env[setting.env] == good
    assert dict(os.environ) == before, "the caller's environment comes back"


@pytest.mark.parametrize(
    ("argv", "env", "named"),
    [
        (["--crux-levels", "many"], {}, "--crux-levels"),
        (["--crux_levels=0"], {}, "--crux_levels"),
        (["--crux-store", "nowhere"], {}, "--crux-store"),
        (["--crux-dscp-map", "0,8"], {}, "--crux-dscp-map"),
        (["--crux-job", "a b"], {}, "--crux-job"),
        (["--crux-topology", "/nonexistent.yaml"], {}, "--crux-topology"),
        (["--crux-topology", __file__], {}, "--crux-topology"),
        ([], {"CRUX_TOPOLOGY": "/"}, "--crux-topology (CRUX_TOPOLOGY)='/': no such file"),
        ([], {"CRUX_LEVELS": "many"}, "--crux-levels (CRUX_LEVELS)"),
        ([], {"CRUX_DISABLE": "maybe"}, "--crux-disable (CRUX_DISABLE)"),
        (["--crux-reserved-levels", "0,1,2,3,4,5,6,7"], {}, "--crux-reserved-levels"),
        (["--crux-reserved-levels", "9"], {}, "--crux-reserved-levels"),
        (["--crux-dscp-map", "8,8,16,24,32,40,48,56"], {}, "--crux-dscp-map"),
        ([], {"CRUX_TUNING": "tick_s=1e-9"}, "CRUX_TUNING: tick_s='1e-9': expected a number"),
        (["--crux-dispatch", "/nonexistent.json"], {}, "--crux-dispatch"),
        (["--crux-dispatch", "auto", "--nproc-per-node", "gpu"], {}, "say how many GPUs"),
        (["--crux-dispatch", "auto"], {"CRUX_STORE": "none"}, "can't be chosen"),
    ],
)
def test_a_bad_value_stops_the_launcher_and_names_the_flag(argv, env, named, monkeypatch, capsys):
    monkeypatch.setattr(torchrun, "run", lambda args: pytest.fail("started"))
    for name, text in env.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(SystemExit) as exit_:
        cruxrun.main([*argv, "train.py"])
    assert exit_.value.code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]


def test_workers_are_told_to_attach_and_what_their_job_is_called(launched):
    _, env = launched()
    assert env["CRUX_ATTACH"] == "1"
    assert re.fullmatch(r"train-[0-9a-f]{8}", env["CRUX_JOB"])
    _, again = launched()
    assert again["CRUX_JOB"] != env["CRUX_JOB"]


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_disabled_is_torchrun(how, launched, monkeypatch):
    before = dict(os.environ)
    if how == "variable":
        monkeypatch.setenv("CRUX_DISABLE", "true")
        monkeypatch.setenv("CRUX_LEVELS", "not looked at")
        before = dict(os.environ)
    args, env = launched(*(["--crux-disable"] if how == "flag" else []))
    assert env == {**before, "CRUX_DISABLE": "1"}
    assert args.training_script == "train.py"


def parsed(*argv, script="train.py"):
    return cruxrun.get_args_parser().parse_args([*argv, script])


def test_nodes_of_one_job_agree_on_its_name_and_jobs_differ():
    def nodes(*argv):
        names = {
            name_of_job(parsed("--nnodes", "1:4", "--node-rank", str(n), *argv)) for n in (0, 1)
        }
        assert len(names) == 1
        return names.pop()

    c10d = ("--rdzv-backend", "c10d", "--rdzv-endpoint")
    names = [
        nodes(*c10d, "a:29400", "--rdzv-id", "100"),
        nodes(*c10d, "b:29400", "--rdzv-id", "100"),
        nodes(*c10d, "a:29400", "--rdzv-id", "200"),
        nodes(*c10d, "a:29400"),
        nodes("--master-addr", "a", "--master-port", "29501"),
    ]
    assert len(set(names)) == len(names)
    assert names[0].startswith("100-")
    assert names[3].startswith("train-")
    explicit = ("--master-addr", "a", "--master-port", "29500")
    assert nodes("--master-addr", "a") == nodes(*explicit)


def test_an_endpoint_on_loopback_is_told_apart_by_its_host(monkeypatch):
    args = parsed("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:29400")
    monkeypatch.setattr("socket.gethostname", lambda: "one")
    one = name_of_job(args)
    monkeypatch.setattr("socket.gethostname", lambda: "two")
    assert name_of_job(args) != one


@pytest.mark.parametrize("run_id", ["a b/c", "../../x", "ü", "x" * 500, "-"])
def test_any_run_id_makes_a_usable_name(run_id, launched):
    _, env = launched(f"--rdzv-id={run_id}")
    assert Settings.from_env({"CRUX_JOB": env["CRUX_JOB"]}).job == env["CRUX_JOB"]


@pytest.mark.parametrize(
    ("hosts", "addresses", "argv", "known_as"),
    [
        (["vm", "b"], "{}", [], "vm"),
        (["a", "b"], "{b: [10.7.0.1]}", [], "b"),
        (["a", "b"], "{b: [10.7.0.1]}", ["--crux-host", "a"], "a"),
        (["a", "b"], "{a: [127.0.0.1], b: [10.7.0.1]}", [], "b"),
    ],
)
def test_workers_get_the_name_that_their_host_has_in_the_topology(
    hosts, addresses, argv, known_as, launched, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr("crux_torch.host.machine.own_addresses", lambda: ("127.0.0.1", "10.7.0.1"))
    monkeypatch.setattr("socket.gethostname", lambda: "vm")
    file = topology_of(tmp_path, hosts, addresses)
    cruxrun.logger.handlers.clear()
    _, env = launched("--crux-topology", file, *argv)
    named = known_as != "vm"
    assert env.get("CRUX_HOST") == (known_as if named else None)
    said = f"topology {file}" + (f", this host is {known_as}, " if named else ", ")
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("hosts", "addresses", "argv", "own", "says"),
    [
        (["h0-0", "h1-0"], "{}", ["--crux-host", "h0_0"], [], "names are 'h0-0', 'h1-0'"),
        (["h0-0", "h1-0"], "{}", [], ["10.7.0.1"], "no host 'vm', as this machine is called"),
        (
            ["a", "b"],
            "{a: [10.7.0.1], b: [10.7.0.2]}",
            [],
            ["10.7.0.1", "10.7.0.2"],
            "this machine has addresses of 'a', 'b': say with",
        ),
        (
            ["vm", "b"],
            "{vm: [10.7.9.9], b: [10.7.0.1]}",
            [],
            ["10.7.0.1"],
            "'vm', as this machine is called, which has an address of 'b'",
        ),
    ],
)
def test_a_host_that_the_topology_does_not_certainly_have_stops_the_launcher(
    hosts, addresses, argv, own, says, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(torchrun, "run", lambda args: pytest.fail("started"))
    monkeypatch.setattr("crux_torch.host.machine.own_addresses", lambda: tuple(own))
    monkeypatch.setattr("socket.gethostname", lambda: "vm")
    file = topology_of(tmp_path, hosts, addresses)
    with pytest.raises(SystemExit) as exit_:
        cruxrun.main(["--crux-topology", file, *argv, "train.py"])
    assert exit_.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert says in said
    assert "--crux-host (CRUX_HOST)" in said


def test_the_start_line_is_shown_unless_only_errors_are(launched, capsys, monkeypatch):
    lines = {}
    for level in ("error", "warning", "info"):
        cruxrun.logger.handlers.clear()
        launched("--crux-job=j", "--crux-log-level", level)
        lines[level] = capsys.readouterr().err.splitlines()
    assert lines["error"] == []
    (line,) = lines["warning"]
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.match(rf"{time} \[cruxrun j\] INFO job j, store none, no topology of its own, ", line)
    assert "; nothing is prioritised, because jobs without a store have no plan" in line
    assert "; no paths are chosen, because jobs without a store have no plan" in line
    assert len(lines["info"]) >= 1


def test_a_summary_that_can_t_be_kept_or_read_costs_only_itself(monkeypatch, capsys):
    monkeypatch.setenv("CRUX_STORE", "none")
    files = []

    def run(args):
        files.append(os.environ["CRUX_SUMMARY"])
        if files[-1]:
            Path(files[-1]).write_text("{")

    monkeypatch.setattr(torchrun, "run", run)
    cruxrun.logger.handlers.clear()
    cruxrun.main(["train.py"])
    assert files[0]
    assert not Path(files[0]).parent.exists()
    cruxrun.main(["--crux-quiet", "train.py"])

    def full(prefix):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cruxrun, "TemporaryDirectory", full)
    cruxrun.main(["train.py"])
    assert files[1:] == ["", ""]
    assert "CRUX_SUMMARY" not in os.environ
    assert "INFO summary" not in capsys.readouterr().err


def test_a_summary_is_printed_unless_quiet_or_only_errors_are(monkeypatch, capsys):
    monkeypatch.setenv("CRUX_STORE", "none")

    def run(args):
        if file := os.environ["CRUX_SUMMARY"]:
            Path(file).write_bytes(msgspec.json.encode(Summary(at_s=time.time())))

    monkeypatch.setattr(torchrun, "run", run)
    printed = []
    for flags in ([], ["--crux-quiet"], ["--crux-log-level=error"]):
        cruxrun.logger.handlers.clear()
        cruxrun.main([*flags, "train.py"])
        printed.append("INFO summary of" in capsys.readouterr().err)
    assert printed == [True, False, False]


def test_a_misspelt_variable_is_named_and_the_job_starts(launched, capsys, monkeypatch):
    monkeypatch.setenv("CRUX_POLCIY", "ecmp")
    cruxrun.logger.handlers.clear()
    launched()
    said = capsys.readouterr().err
    assert "WARNING CRUX_POLCIY (did you mean CRUX_POLICY?) is no setting of Crux" in said
    cruxrun.logger.handlers.clear()
    launched("--crux-disable")
    assert capsys.readouterr().err == ""


def test_autoload_that_is_off_is_said(launched, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    cruxrun.logger.handlers.clear()
    launched()
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in capsys.readouterr().err
    launched("--crux-disable")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("broken", ["__init__", "start"])
def test_a_store_that_cannot_be_hosted_stops_nothing(broken, launched, monkeypatch, capsys):
    host = pytest.importorskip("crux_torch.store.host")
    calls = []

    def step(what):
        def do(*_):
            calls.append(what)
            if what == broken:
                raise OSError("no such luck")

        return do

    steps = {name: step(name) for name in ("__init__", "start")}
    monkeypatch.setattr(host, "StoreHost", type("Broken", (), steps))
    cruxrun.logger.handlers.clear()
    launched("--crux-store", "tcp://127.0.0.1:29410")
    assert calls[-1] == broken
    assert "no such luck" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--crux-store", "unix:"), 0),
        (("--crux-store", "tcp://127.0.0.1:29410"), 1),
        (("--crux-store", "tcp://127.0.0.1:29410", "--crux-store-secret", "FILE"), 0),
        (("--crux-store", "unix:", "--crux-store-group", "root"), 1),
    ],
)
def test_others_who_may_use_the_store_are_named_in_one_line(
    flags, said, launched, monkeypatch, caplog, tmp_path
):
    monkeypatch.setattr("crux_torch.store.host.StoreHost.start", lambda self: None)
    launched(*(secret_file(tmp_path) if each == "FILE" else each for each in flags))
    words = ("any user of the host", "all users of group root")
    assert sum(any(word in line for word in words) for line in caplog.messages) == said


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("--crux-pol", ["--crux-policy"]),
        ("--nproc-per-node 2 --standa", ["--standalone"]),
        ("--crux-policy mlc", ["mlcc"]),
        ("--start-method fork", ["fork", "forkserver"]),
        ("tr", []),
    ],
)
def test_bash_completes_flags_and_their_choices(typed, offered, monkeypatch, capsys):
    monkeypatch.setenv("_CRUXRUN_COMPLETE", "bash_source")
    cruxrun.main([])
    ask = f"COMP_WORDS=(cruxrun {typed}) COMP_CWORD={len(typed.split())}\n_cruxrun\n"
    ask += 'complete -p cruxrun\necho "${COMPREPLY[@]}"\n'
    shell = ["bash", "-c", capsys.readouterr().out + ask]
    said = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
    # Where no word fits, the shell offers names of files.
    assert said == f"complete -o default -F _cruxrun cruxrun\n{' '.join(offered)}\n"


def test_another_shell_is_refused_in_one_line(monkeypatch, capsys):
    monkeypatch.setenv("_CRUXRUN_COMPLETE", "fish_source")
    with pytest.raises(SystemExit) as exit_:
        cruxrun.main([])
    assert exit_.value.code == 2
    err = capsys.readouterr().err
    assert err == (
        "cruxrun: error: _CRUXRUN_COMPLETE=fish_source: expected bash_source or zsh_source\n"
    )
