"""The verbs shim: over the installed one, and over one of another release."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from verbs_fakes import Fakes, build

from crux_torch.apply import verbs_shim
from crux_torch.apply.transport import LIBRARY
from crux_torch.apply.verbs_shim import ElfError, SharedObject

pytestmark = pytest.mark.slow

#: As NCCL does: by name, then each function by its version.
DLOPEN = """
import ctypes, sys
find = ctypes.CDLL(None).dlvsym
find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
text, pointer = ctypes.c_char_p, ctypes.c_void_p
class Info(ctypes.Structure):
    _fields_ = [("name", text), ("base", pointer), ("symbol", text), ("at", pointer)]
library = ctypes.CDLL(sys.argv[1])
for name in sys.argv[2:]:
    function, version = name.split("@")
    address = find(library._handle, function.encode(), version.encode())
    info = Info()
    if address:
        ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(info))
    print(name, info.name.decode() if address else "absent")
"""


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Fakes:
    return build(tmp_path_factory.mktemp("fakes"))


@pytest.fixture
def installed() -> Path:
    """The libibverbs of this machine."""
    if not verbs_shim.TEMPLATE.exists():
        pytest.skip(f"{verbs_shim.TEMPLATE.name} was not built (libibverbs-dev)")
    real = verbs_shim.find_real(os.environ)
    if real is None:
        pytest.skip("no libibverbs is installed")
    return real


@pytest.fixture
def clean(tmp_path: Path) -> dict[str, str]:
    """An environment whose caches are empty."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LD_", "CRUX_", "NCCL_"))}
    return {**kept, "XDG_CACHE_HOME": str(tmp_path)}


def library(path: Path) -> SharedObject:
    return SharedObject(path.read_bytes(), str(path))


def dynamic(path: Path, kind: str) -> list[str]:
    """The entries of one kind (NEEDED, SONAME) that the loader reads, in their order."""
    if shutil.which("readelf") is None:
        pytest.skip("no readelf")
    shown = run("readelf", "-d", str(path), env=dict(os.environ))
    return re.findall(rf"\({kind}\).*\[(.*)\]", shown)


def run(*command: str, env: dict[str, str]) -> str:
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def test_it_has_the_names_and_versions_of_the_installed_library(
    installed: Path, clean: dict[str, str]
) -> None:
    for name in (verbs_shim.PROGRAM_NAME, verbs_shim.NCCL_NAME):
        path = verbs_shim.prepare(installed, name, clean)
        made = library(path)
        assert set(made.versions()) == set(library(installed).versions())
        assert len(set(made.versions().values())) == len(made.versions())
        assert dynamic(path, "SONAME") == [name]
        assert dynamic(path, "NEEDED")[-2:] == [str(LIBRARY), str(installed)]


def test_functions_come_from_it_or_from_the_real_library(
    installed: Path, clean: dict[str, str]
) -> None:
    env = {**clean, **verbs_shim.environment(clean)}
    ours = ("ibv_close_device", "ibv_create_qp", "ibv_modify_qp", "ibv_destroy_qp")
    others = ("ibv_open_device", "ibv_get_device_list", "ibv_reg_mr", "ibv_query_gid")
    names = [f"{name}@IBVERBS_1.1" for name in (*ours, *others)]
    private = [v for v in library(installed).versions() if "PRIVATE" in v]
    for loaded in (verbs_shim.NCCL_NAME, verbs_shim.PROGRAM_NAME, env[verbs_shim.NCCL_VARIABLE]):
        asked = [*names, f"verbs_set_ops@{private[0]}", "ibv_none@IBVERBS_1.1"]
        told = run(sys.executable, "-c", DLOPEN, loaded, *asked, env=env)
        found = dict(line.split() for line in told.splitlines())
        for name in names:
            where = Path(found[name])
            assert (where.parent.name.startswith("verbs-")) == (name.split("@")[0] in ours), name
        assert Path(found[f"verbs_set_ops@{private[0]}"]).resolve() == installed
        assert found["ibv_none@IBVERBS_1.1"] == "absent"


def test_it_fits_a_release_that_nobody_has_seen(
    fakes: Fakes, tmp_path: Path, clean: dict[str, str]
) -> None:
    made = library(verbs_shim.prepare(fakes.ibverbs, verbs_shim.PROGRAM_NAME, clean))
    names = {"IBVERBS_1.0", "IBVERBS_1.1", "IBVERBS_1.23", "IBVERBS_PRIVATE_77"}
    assert set(made.versions()) == names
    # A client that is linked to that release, with its version nodes.
    fakes.run("assert client.client_pair(0)\n", tmp_path)


def test_what_is_preloaded_stays(installed: Path, clean: dict[str, str]) -> None:
    first = verbs_shim.environment({**clean, "LD_PRELOAD": f"/a.so {LIBRARY}:/b.so"})
    entries = first["LD_PRELOAD"].split(":")
    assert entries[:3] == ["/a.so", str(LIBRARY), "/b.so"]
    assert [Path(entry).name for entry in entries[3:]] == [
        verbs_shim.PROGRAM_NAME,
        verbs_shim.NCCL_NAME,
    ]
    assert first[verbs_shim.NCCL_VARIABLE] == entries[4]
    # A launcher inside a launcher.
    assert verbs_shim.environment({**clean, **first}) == first


def test_a_library_that_the_user_names_for_nccl_is_gone_on_to(
    installed: Path, clean: dict[str, str], fakes: Fakes
) -> None:
    made = verbs_shim.environment({**clean, verbs_shim.NCCL_VARIABLE: str(fakes.ibverbs)})
    assert dynamic(Path(made[verbs_shim.NCCL_VARIABLE]), "NEEDED")[-1] == str(fakes.ibverbs)
    programs = Path(made["LD_PRELOAD"].split(":")[-2])
    assert dynamic(programs, "NEEDED")[-1] == str(installed)


def test_it_is_made_once_and_again_when_the_library_changes(
    fakes: Fakes, tmp_path: Path, clean: dict[str, str]
) -> None:
    real = tmp_path / "libibverbs.so.1.5"
    shutil.copy(fakes.ibverbs, real)
    first = verbs_shim.prepare(real, verbs_shim.PROGRAM_NAME, clean)
    before = first.stat()
    assert verbs_shim.prepare(real, verbs_shim.PROGRAM_NAME, clean) == first
    assert first.stat().st_ino == before.st_ino
    first.write_bytes(b"damaged")
    assert verbs_shim.prepare(real, verbs_shim.PROGRAM_NAME, clean).stat().st_size == before.st_size
    os.utime(real, (1, 1))
    assert verbs_shim.prepare(real, verbs_shim.PROGRAM_NAME, clean) != first


def test_the_folder_is_the_users_own(fakes: Fakes, tmp_path: Path, clean: dict[str, str]) -> None:
    made = verbs_shim.prepare(fakes.ibverbs, verbs_shim.PROGRAM_NAME, clean)
    for path in (made, made.parent, made.parent.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert [path.name for path in made.parent.iterdir()] == [verbs_shim.PROGRAM_NAME]
    os.chmod(made.parent.parent, 0o777)
    elsewhere = verbs_shim.prepare(fakes.ibverbs, verbs_shim.NCCL_NAME, clean)
    assert tmp_path not in elsewhere.parents
    shutil.rmtree(elsewhere.parent)


def test_without_a_libibverbs_there_is_nothing_to_export(
    monkeypatch: pytest.MonkeyPatch, clean: dict[str, str]
) -> None:
    monkeypatch.setattr(verbs_shim, "PROGRAM_NAME", "libibverbs-that-is-not-there.so.1")
    assert verbs_shim.find_real(clean, "libibverbs-that-is-not-there.so.1") is None
    monkeypatch.setattr(verbs_shim, "find_real", lambda *_: None)
    assert verbs_shim.environment(clean) == {}


def test_a_template_that_was_not_built_is_said(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    clean: dict[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(verbs_shim, "TEMPLATE", tmp_path / "none.so")
    monkeypatch.setattr(verbs_shim, "find_real", lambda *_: Path("/lib/real.so"))
    assert verbs_shim.environment(clean) == {}
    assert "install libibverbs-dev" in caplog.text


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"\x7fELF\x02\x01" + bytes(58), b"x" * 500])
def test_what_is_no_library_is_refused(content: bytes) -> None:
    with pytest.raises(ElfError):
        SharedObject(content)


def test_too_little_room_is_refused(fakes: Fakes) -> None:
    with pytest.raises(ElfError, match="room"):
        library(fakes.ibverbs).rename("other.so", [], [], (0, 10))


def test_a_program_runs_with_it(installed: Path, clean: dict[str, str]) -> None:
    module = [sys.executable, "-m", "crux_torch.apply.verbs_shim"]
    shown = run(*module, "--print-env", env=clean)
    assert shown.startswith("export LD_PRELOAD=")
    assert verbs_shim.NCCL_VARIABLE in shown
    program = "import os; print(os.environ['LD_PRELOAD'])"
    assert "/verbs-" in run(*module, "--", sys.executable, "-c", program, env=clean)
    assert "can't be run" in run(*module, "no-such-program", env=clean)
