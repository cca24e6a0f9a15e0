"""``crux check``: what it finds of hosts that do not fit each other, and that it never hangs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from findings import by_part
from loopback import free_port
from store_server import ServerThread, secret_file
from torch.distributed import HashStore
from training_job import BOUND_S, environment

from crux_torch.agreement.problems import Place
from crux_torch.cli import main as cli
from crux_torch.cli.doctor import meeting
from crux_torch.cli.doctor.agreement import CLOCK_S, Facts, compare, facts
from crux_torch.cli.doctor.finding import Check

SALT = b"salt"
REPLACE = msgspec.structs.replace


def fact(host: str, **changes: Any) -> Facts:
    return REPLACE(
        Facts(
            place=Place(host, True, f"boot of {host}", "1", (f"10.0.0.{len(host)}",)),
            releases={"crux_torch": "0.1.0", "torch": "2.15.0", "Python": "3.11.7"},
            settings={"CRUX_STORE": "tcp://h0:29410", "CRUX_LEVELS": "8", "CRUX_POLICY": "crux"},
            secret="s",
            topology="t",
            privileges={"CAP_NET_RAW": True, "the transport library": True},
        ),
        **changes,
    )


def found(told: dict[int, Facts], **others: Any) -> dict[str, Check]:
    return by_part(compare(told, others.get("ahead_s", {}), others.get("silent", {}), 30))


def test_hosts_that_fit_are_ok() -> None:
    told = {0: fact("h0"), 1: fact("h0"), 2: fact("h1")}
    checks = found(told, ahead_s={1: 0.0, 2: -0.9})
    assert {check.state for check in checks.values()} == {"ok"}
    assert checks["ranks"].finding == "3 of 3 answered, on h0 (ranks 0, 1), h1 (rank 2)"


@pytest.mark.parametrize(
    ("changes", "part", "says"),
    [
        ({"secret": "other"}, "secret", "secret s on h0 (rank 0) and secret other on h1 (rank 1)"),
        ({"secret": ""}, "secret", "secret s on h0 (rank 0) and no secret on h1 (rank 1)"),
        ({"secret_problem": "must be its user's alone"}, "secret", "h1 (rank 1): must be"),
        (
            {"settings": {"CRUX_STORE": "none", "CRUX_LEVELS": "4", "CRUX_POLICY": "crux"}},
            "settings",
            "CRUX_LEVELS=8 on h0 (rank 0) and CRUX_LEVELS=4 on h1 (rank 1)",
        ),
        ({"settings": None, "settings_problem": "CRUX_LEVELS='x'"}, "settings", "h1 (rank 1): CR"),
        ({"misspelt": "CRUX_POLCIY (...)"}, "settings", "h1 (rank 1): CRUX_POLCIY"),
        ({"topology": "u"}, "topology", "file t on h0 (rank 0) and file u on h1 (rank 1)"),
        ({"topology": ""}, "topology", "file t on h0 (rank 0) and no file on h1 (rank 1)"),
        ({"topology_problem": "it has no host"}, "topology", "h1 (rank 1): it has no host"),
        ({"store_problem": "refused"}, "store", "h1 (rank 1): refused"),
        (
            {"releases": {"crux_torch": "0.1.0", "torch": "2.14.1", "Python": "3.11.7"}},
            "releases",
            "torch 2.15.0 on h0 (rank 0) and torch 2.14.1 on h1 (rank 1)",
        ),
        (
            {"privileges": {"CAP_NET_RAW": False, "the transport library": True}},
            "privileges",
            "h1 (rank 1): without CAP_NET_RAW",
        ),
        (
            {"place": Place("h0", True, "another boot", "1", ())},
            "host names",
            "2 machines are called 'h0'",
        ),
    ],
)
def test_one_host_that_differs_is_named_with_both_values(
    changes: dict[str, Any], part: str, says: str
) -> None:
    checks = found({0: fact("h0"), 1: fact("h1", **changes)})
    assert checks[part].state == "broken"
    assert says in checks[part].finding
    assert {name for name, check in checks.items() if check.state == "broken"} == {part}


def test_clocks_silent_ranks_and_what_the_store_has() -> None:
    told = {0: fact("h0"), 1: fact("h1"), 2: fact("h2")}
    late = found(told, ahead_s={1: CLOCK_S + 0.5, 2: -3600.0})["clocks"]
    assert late.finding == "h1 (rank 1), h2 (rank 2): 3600.0 s behind h0"
    ahead = found(told, ahead_s={1: CLOCK_S + 0.5, 2: CLOCK_S})["clocks"]
    assert ahead.finding == "h1 (rank 1): 1.5 s ahead of h0"
    silent = found(told, silent={3: "h3", 4: ""})["ranks"]
    assert silent.finding == "2 of 5 did not answer in 30 s: 3 (on h3), 4"
    kept = {rank: REPLACE(f, stored_topology="old") for rank, f in told.items()}
    assert "the store has another one, old" in found(kept)["topology"].finding
    planned = {rank: REPLACE(f, stored_policy="varys") for rank, f in told.items()}
    assert "CRUX_POLICY=varys" in found(planned)["settings"].finding
    first = {rank: REPLACE(f, stored_policy="crux-first") for rank, f in told.items()}
    assert found(first)["settings"].state == "ok"
    bare = {rank: REPLACE(f, topology="") for rank, f in told.items()}
    assert found(bare)["topology"].state == "missing"
    many = {rank: fact(f"n{rank}") for rank in range(100)}
    assert found(many)["ranks"].finding.endswith("n2 (rank 2) and 97 more")


def test_facts_tell_whether_secrets_are_equal_and_nothing_else(tmp_path: Path) -> None:
    env = {"CRUX_STORE": "none", "CRUX_STORE_SECRET": secret_file(tmp_path, "a" * 32)}
    one, same, salted = facts(env, SALT), facts(env, SALT), facts(env, b"another")
    assert one.secret == same.secret != salted.secret
    assert "a" * 32 not in msgspec.json.encode(one).decode()
    assert str(tmp_path) not in json.dumps(one.settings)
    assert one.settings is not None
    assert one.settings["CRUX_LEVELS"] == "8"
    assert "CRUX_HOST" not in one.settings
    bad = facts({"CRUX_STORE": "none", "CRUX_LEVELS": "x"}, SALT)
    assert (bad.settings, "CRUX_LEVELS='x'" in bad.settings_problem) == (None, True)
    wide = Path(secret_file(tmp_path))
    wide.chmod(0o644)
    open_ = facts({"CRUX_STORE": "none", "CRUX_STORE_SECRET": str(wide)}, SALT)
    assert "chmod 600" in open_.secret_problem


def test_alone_it_checks_this_host_against_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "CRUX_TOPOLOGY"):
        monkeypatch.delenv(name, raising=False)
    secret = secret_file(tmp_path)
    with ServerThread(Path(secret).read_bytes().strip()) as server:
        store = {"CRUX_STORE": f"tcp://127.0.0.1:{server.port}"}
        right = CliRunner(env={**store, "CRUX_STORE_SECRET": secret}).invoke(cli.main, ["check"])
        assert right.exit_code == 0, right.output
        assert "this host alone" in right.output
        assert re.search(r"^ok +store .* lets every host in$", right.output, re.M)
        other = secret_file(tmp_path, "another secret, 32 bytes long ...")
        wrong = CliRunner(env={**store, "CRUX_STORE_SECRET": other}).invoke(cli.main, ["check"])
    assert wrong.exit_code == 1
    assert re.search(r"^broken +store .*CRUX_STORE_SECRET", wrong.output, re.M)


@pytest.fixture
def ranks() -> Any:
    """Starts ``crux check`` as ranks of one job; each with variables of its own."""
    running: list[subprocess.Popen[str]] = []

    def start(size: int, wait_s: float, *each: dict[str, str]) -> list[subprocess.Popen[str]]:
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for rank, own in enumerate(each):
            told = {**meet, "WORLD_SIZE": str(size), "RANK": str(rank), **own}
            command = [sys.executable, "-m", "crux_torch.cli", "check", "--wait", str(wait_s)]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            env = {**environment(), **told}
            running.append(subprocess.Popen(command, env=env, **pipes))  # type: ignore[call-overload]
        return running

    yield start
    for process in running:
        process.kill()
        process.wait()


def test_ranks_that_say_nothing_nonsense_or_another_time_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=60))
    monkeypatch.setattr(meeting, "job_store", lambda *_: store)
    env = {**dict.fromkeys(meeting.VARIABLES, "5"), "CRUX_STORE": "none"}

    def clock_of_the_future() -> None:
        store.wait(["salt"])
        store.set("facts/2", msgspec.json.encode(fact("h2")))  # type: ignore[arg-type]
        store.wait(["go"])
        store.set("time/2", repr(time.time() + 3600))

    store.set("hello/1", "h1")
    store.set("facts/1", "{}")
    other = threading.Thread(target=clock_of_the_future)
    other.start()
    met = meeting.meet({**env, "RANK": "0", "WORLD_SIZE": "4"}, 2.0)
    other.join()
    assert met is not None
    assert met.told.keys() == {0, 2}
    assert met.silent == {1: "h1", 3: ""}
    assert 3590 < met.ahead_s[2] < 3601
    with pytest.raises(meeting.MeetingError, match="rank 1 can't meet the others at 5:5"):
        meeting.meet({**env, "RANK": "1", "WORLD_SIZE": "two"}, 1.0)


@pytest.mark.slow
def test_two_ranks_with_another_secret_and_another_setting(
    ranks: Callable[..., list[subprocess.Popen[str]]], tmp_path: Path
) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    right, wrong = secret_file(tmp_path / "a"), secret_file(tmp_path / "b", "x" * 20)
    with ServerThread(Path(right).read_bytes().strip()) as server:
        common = {"CRUX_STORE": f"tcp://127.0.0.1:{server.port}"}
        first = {"CRUX_HOST": "h0", "CRUX_STORE_SECRET": right}
        second = {"CRUX_HOST": "h1", "CRUX_STORE_SECRET": wrong, "CRUX_LEVELS": "4"}
        leader, other = ranks(2, 200, {**common, **first}, {**common, **second})
        said = leader.communicate(timeout=BOUND_S)[0]
        rest = other.communicate(timeout=BOUND_S)[0]
    assert (leader.returncode, other.returncode) == (1, 0), said + rest
    assert rest == ""
    rows = dict(re.findall(r"^(?:ok|missing|broken) +(\w+(?: names)?) {2,}(.*)$", said, re.M))
    assert rows["ranks"] == "2 of 2 answered, on h0 (rank 0), h1 (rank 1)"
    assert re.fullmatch(
        r"secret (\w+) on h0 \(rank 0\) and secret (?!\1)\w+ on h1 \(rank 1\)", rows["secret"]
    )
    assert rows["settings"] == "CRUX_LEVELS=8 on h0 (rank 0) and CRUX_LEVELS=4 on h1 (rank 1)"
    assert rows["store"].startswith("h1 (rank 1): ")
    assert "1 s of each other" in rows["clocks"]
    assert "what to do: copy one file to all hosts" in said


@pytest.mark.slow
# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_under_cruxrun_all_is_well_and_a_rank_that_meets_nobody_ends(
    ranks: Callable[..., list[subprocess.Popen[str]]], tmp_path: Path
) -> None:
    launch = ["-m", "cruxrun", "--standalone", "--nproc-per-node=2", "--no-python"]
    check = [sys.executable, "-m", "crux_torch.cli", "check"]
    command = [sys.executable, *launch, *check]
    store = f"tcp://127.0.0.1:{free_port()}"
    (alone,) = ranks(2, 1, {"RANK": "1", "CRUX_STORE": "none"})
    done = subprocess.run(
        command,
        env={**environment(), "CRUX_STORE": store},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 answered" in done.stdout
    assert "broken" not in done.stdout
    said = alone.communicate(timeout=BOUND_S)[0]
    assert alone.returncode == 1
    assert re.fullmatch(r"Error: rank 1 can't meet the others at 127.0.0.1:\d+: .*refused\n", said)
