"""Whether workers of ``cruxrun`` start with the transport library, and what keeps them from it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from crux_torch.apply import preload, transport, verbs_shim
from crux_torch.apply.transport import LIBRARY, TransportError
from crux_torch.host.interfaces import RdmaDevice
from crux_torch.settings import Settings

pytestmark = pytest.mark.slow

WORKER = """
import ctypes, json, os
seen = getattr(ctypes.CDLL(None), "crux_transport_sees_sockets", lambda: None)()
print(json.dumps([os.environ.get("LD_PRELOAD"), seen]), flush=True)
"""


@pytest.fixture(autouse=True)
def _no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a host without RDMA devices, whatever this one has."""
    monkeypatch.setattr(preload, "read_devices", tuple)


@pytest.mark.parametrize(
    ("preloaded", "expected"),
    [
        ("", "{}"),
        ("/opt/libjemalloc.so", "{}:/opt/libjemalloc.so"),
        ("a.so b.so:c.so", "{}:a.so:b.so:c.so"),
        ("x.so:{}:y.so", "{}:x.so:y.so"),
        ("libc.so.6:/usr/lib/libasan.so.8", "/usr/lib/libasan.so.8:{}:libc.so.6"),
    ],
)
def test_comes_first_and_keeps_what_is_there(preloaded: str, expected: str) -> None:
    env = {"LD_PRELOAD": preloaded.format(LIBRARY)}
    assert preload.environment(Settings(), env) == {"LD_PRELOAD": expected.format(LIBRARY)}


def test_a_library_that_does_not_load_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise TransportError("libcrux_transport.so: not found: build it")

    monkeypatch.setattr(transport.Transport, "load", fails)
    monkeypatch.setattr(preload.logger, "propagate", True)
    with caplog.at_level(logging.INFO, "cruxrun"):
        assert preload.environment(Settings(), {"LD_PRELOAD": "a.so"}) == {}
    # A test that launched in this process may have left this handler at both loggers.
    [record] = {id(record): record for record in caplog.records}.values()
    assert "not found: build it" in record.getMessage()


def test_a_path_that_the_loader_cannot_name_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    copy = folder / LIBRARY.name
    copy.write_bytes(LIBRARY.read_bytes())
    monkeypatch.setattr(transport, "LIBRARY", copy)
    assert preload.environment(Settings(), {}) == {}
    assert "space" in (preload.obstacle() or "")


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[RdmaDevice]:
    present: list[RdmaDevice] = []
    monkeypatch.setattr(preload, "read_devices", lambda: tuple(present))
    return present


def test_with_rdma_devices_programs_and_nccl_get_the_shim(
    devices: list[RdmaDevice], tmp_path: Path
) -> None:
    env = {"LD_PRELOAD": "/lib/a.so", "HOME": str(tmp_path)}
    try:
        real = verbs_shim.find_real(env)
        if real is None:
            pytest.skip("no libibverbs (apt-get install libibverbs1)")
        verbs_shim.prepare(real, existing=env)
    except verbs_shim.VerbsShimError as error:
        pytest.skip(str(error))
    assert preload.environment(Settings(), env) == {"LD_PRELOAD": f"{LIBRARY}:/lib/a.so"}
    devices.append(RdmaDevice("mlx5_0"))
    variables = preload.environment(Settings(), env)
    loaded = variables["LD_PRELOAD"].split(":")
    assert sorted(Path(entry).name for entry in loaded) == [
        *("a.so", LIBRARY.name, verbs_shim.NCCL_NAME, verbs_shim.PROGRAM_NAME)
    ]
    assert variables[verbs_shim.NCCL_VARIABLE] in loaded


def test_without_a_shim_the_library_is_loaded_all_the_same(
    devices: list[RdmaDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices.append(RdmaDevice("mlx5_0"))
    monkeypatch.setattr(verbs_shim, "find_real", lambda env: None)
    assert preload.environment(Settings(), {}) == {"LD_PRELOAD": str(LIBRARY)}


@pytest.mark.parametrize(
    ("inherited", "then"), [("", ""), ("/a.so {}:/b.so", "/a.so:/b.so"), ("{}", "")]
)
def test_what_an_interpreter_starts_gets_back_what_was_there(inherited: str, then: str) -> None:
    env = {"LD_PRELOAD": inherited.format(LIBRARY)}
    variables = preload.environment(Settings(), env, for_interpreter=True)
    assert variables["CRUX_LD_PRELOAD_THEN"] == then
    told = 'import os, json; print(json.dumps([os.environ.get("LD_PRELOAD"), dict(os.environ)]))'
    variables["LD_PRELOAD"] = str(LIBRARY)  # /a.so is not there
    shell = ["sh", "-c", 'exec "$@"', "-", sys.executable, "-c", told]
    done = subprocess.run(shell, env=variables, capture_output=True, text=True, check=True)
    left, whole = json.loads(done.stdout)
    assert left == (then or None)
    assert "CRUX_LD_PRELOAD_THEN" not in whole
    del variables["CRUX_LD_PRELOAD_THEN"]
    done = subprocess.run(shell, env=variables, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)[0] == str(LIBRARY)


def test_workers_of_a_job_have_it_unless_switched_off(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CRUX_", "PET_", "LD_"))}
    launcher = [sys.executable, "-m", "cruxrun", "--standalone", "--nproc-per-node=1"]
    without = [*launcher, "--no-python", sys.executable]
    runs = {
        name: subprocess.Popen(
            [*command, str(worker)],
            env={**clean, "CRUX_STORE": "none", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, command, env in (
            ("default", launcher, {}),
            ("without an interpreter", without, {}),
            ("off", launcher, {"CRUX_TRANSPORT": "0"}),
            ("disabled", [*launcher, "--crux-disable"], {}),
        )
    }
    told = {}
    for name, run in runs.items():
        out, err = run.communicate(timeout=300)
        assert run.returncode == 0, err
        told[name] = json.loads(out.splitlines()[-1])
    assert told == {
        "default": [None, 1],
        "without an interpreter": [str(LIBRARY), 1],
        "off": [None, None],
        "disabled": [None, None],
    }


#: What torch_memory_saver 0.0.9 does with the variable, and the line of docs/start/frameworks.md.
ONLY_ONE = """
import ctypes, os, sys
if sys.argv[1] == "line":
    os.environ["LD_PRELOAD"] = os.environ["LD_PRELOAD"].split(":")[-1]
path = os.environ.get("LD_PRELOAD", "")
assert "hook" in path
print(ctypes.CDLL(path).hook_is_here(), "libcrux_transport" in open("/proc/self/maps").read())
"""


def test_ways_out_for_a_library_that_wants_to_be_the_only_one(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, hook, script = (tmp_path / name for name in ("hook.c", "hook.so", "only_one.py"))
    source.write_text("int hook_is_here(void) { return 7; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", hook, source], check=True)
    script.write_text(ONLY_ONE)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CRUX_", "PET_", "LD_"))}
    env = {**clean, "CRUX_STORE": "none", "LD_PRELOAD": str(hook)}
    launcher = [sys.executable, "-m", "cruxrun", "--standalone", "--nproc-per-node=1"]
    program = ["--no-python", sys.executable, str(script)]
    runs = [
        subprocess.Popen(
            [*launcher, *flags, *program, way],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for flags, way in (([], "as it is"), ([], "line"), (["--crux-no-transport"], "flag"))
    ]
    said = [run.communicate(timeout=300)[0].strip() for run in runs]
    assert [run.returncode for run in runs] == [1, 0, 0]
    # Both ways load the hook; the line keeps Crux's library, too.
    assert said == ["", "7 True", "7 False"]
