"""What ``import torch`` does with the entry point, in fresh interpreters."""

import os
import subprocess
import sys

import pytest
from fake_install import install_entry_point
from places import ROOT

pytestmark = pytest.mark.slow

LAUNCHER = ROOT / "launcher"
FAKE = f"""
import sys
__path__.append({str(ROOT / "crux_torch")!r})
calls = []
def attach():
    import torch.distributed as dist
    assert dist.is_available() and callable(dist.init_process_group)
    calls.append(len(calls))
    {{then}}
"""

ATTACHES = FAKE.format(then="pass")


def new_python(code, *args, path=None, cwd=None, **env):
    """Its output and errors; it knows nothing of Crux but what ``env`` says."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("CRUX_")}
    if path:
        inherited["PYTHONPATH"] = os.pathsep.join(map(str, path))
    done = subprocess.run(
        [sys.executable, *args, "-c", code],
        env={**inherited, **env},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), done.stderr


@pytest.fixture
def interpreter(tmp_path):
    """Runs code in a new python that finds the entry point and a stand-in for crux_torch."""
    install_entry_point(tmp_path)

    def run(code, package=ATTACHES, args=(), **env):
        (tmp_path / "crux_torch").mkdir(exist_ok=True)
        (tmp_path / "crux_torch" / "__init__.py").write_text(package)
        return new_python(code, *args, path=[tmp_path, LAUNCHER], cwd=tmp_path, **env)

    return run


CALLS = "import sys, torch; print(getattr(sys.modules.get('crux_torch'), 'calls', None))"


@pytest.mark.parametrize(
    ("env", "printed"),
    [
        ({}, "None"),
        ({"CRUX_ATTACH": "off"}, "[]"),
        ({"CRUX_ATTACH": "1"}, "[0]"),
        ({"CRUX_ATTACH": "Yes"}, "[0]"),
    ],
)
def test_attaches_only_when_launched(env, printed, interpreter):
    out, err = interpreter(CALLS, **env)
    assert out == [printed]
    assert err == ""


def test_a_word_that_is_no_boolean_is_named_and_does_not_attach(interpreter):
    out, err = interpreter(CALLS, CRUX_ATTACH="maybe")
    assert out == ["[]"]
    assert "CRUX_ATTACH='maybe': expected one of 1, 0, true, false, yes, no, on, off" in err


@pytest.mark.parametrize(
    "package",
    [FAKE.format(then="raise RuntimeError('broken inside')"), "raise ImportError('broken inside')"],
)
def test_a_failure_is_one_warning_and_torch_works(package, interpreter):
    code = "import torch; print(int(torch.ones(2).sum()), torch.distributed.is_initialized())"
    out, err = interpreter(code, package, args=["-W", "error"], CRUX_ATTACH="1")
    assert out == ["2", "False"]
    assert len(err.splitlines()) == 1
    assert "stock backends" in err
    assert "broken inside" in err


def test_a_script_that_imports_crux_torch_first_is_attached_once(interpreter):
    code = "import crux_torch, torch; print(crux_torch.calls)"
    out, err = interpreter(code, ATTACHES, CRUX_ATTACH="1")
    assert out == ["[0]"]
    assert err == ""


def test_a_package_that_is_imported_before_torch_registers_its_backend():
    code = "import crux_torch, torch; print('crux' in torch.distributed.Backend.backend_list)"
    assert new_python(code) == (["True"], "")


@pytest.mark.parametrize(
    "first",
    [
        "crux_torch",
        "crux_torch.backend.register",
        "crux_torch.backend.handover",
        "crux_torch.agent",
    ],
)
def test_a_script_may_import_any_part_before_torch(first):
    code = f"import {first}; from crux_torch.backend import register; print(register.is_attached())"
    assert new_python(code, CRUX_ATTACH="1") == (["True"], "")


def test_a_disabled_process_keeps_the_stock_backends():
    code = "import torch; from crux_torch.backend import register; print(register.is_attached())"
    assert new_python(code, CRUX_ATTACH="1", CRUX_DISABLE="1") == (["False"], "")


def test_without_the_launcher_nothing_but_os_is_imported():
    code = (
        "import sys; before = set(sys.modules); import cruxrun.autoload as a; "
        "a.attach_if_launched(); print(*sorted(set(sys.modules) - before))"
    )
    imported, _ = new_python(code, path=[LAUNCHER])
    assert imported == ["cruxrun", "cruxrun.autoload"]
