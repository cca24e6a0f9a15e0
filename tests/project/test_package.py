"""What is distributed: sources, extras, extensions, and what is said where a part is missing."""

import email
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from places import ROOT

import crux_torch
from crux_torch.cli.main import EXTRAS

PACKED = ["csrc", "crux_torch", "launcher", "constraints", "tools", "examples", ":(glob)*"]
SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
WHEEL = SDIST.replace("build_sdist", "build_wheel")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the files that git knows or would add, and their names."""
    listing = ["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard", "--", *PACKED]
    try:
        names = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not in a git checkout")
    folder = tmp_path_factory.mktemp("checkout")
    files = {name for name in names if (ROOT / name).is_file()}
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder, files


@pytest.fixture
def python(tmp_path):
    """Runs Python in a process that has no part of Crux's environment and lacks some modules."""

    def run(*command, without=(), cwd=ROOT, **env):
        for module in without:
            absent = f"raise ModuleNotFoundError('No module named {module}', name={module!r})"
            (tmp_path / f"{module}.py").write_text(absent)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("CRUX_")}
        return subprocess.run(
            [sys.executable, *command],
            env={**inherited, "PYTHONPATH": str(tmp_path), **env},
            cwd=cwd,
            capture_output=True,
            text=True,
        )

    return run


@pytest.mark.slow
def test_the_sdist_holds_every_source_and_needs_no_torch(checkout, python, tmp_path):
    folder, files = checkout
    done = python("-c", SDIST, tmp_path, without=["torch", "pybind11"], cwd=folder)
    assert done.returncode == 0, done.stderr
    name = f"crux_torch-{crux_torch.__version__}"
    with tarfile.open(tmp_path / f"{name}.tar.gz") as sdist:
        packed = {Path(member).relative_to(name).as_posix() for member in sdist.getnames()}
        metadata = email.message_from_binary_file(sdist.extractfile(f"{name}/PKG-INFO"))
    assert files - packed <= {".clang-format", ".gitignore", ".pre-commit-config.yaml"}
    assert not [file for file in packed if file.endswith((".so", ".o", ".pyc"))]

    required = metadata.get_all("Requires-Dist")
    always = {line.split(">")[0] for line in required if "extra" not in line}
    assert always == {"click", "msgspec", "numpy", "PyYAML", "rich"}
    for module, extra in EXTRAS.items():
        package = module.replace("_", "-")
        assert any(r.startswith(f"{package}>") and f'extra == "{extra}"' in r for r in required)
    assert f"## {crux_torch.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    ("torch_module", "build", "says"),
    [
        ("raise ModuleNotFoundError('No module named torch')", "all", "torch can't be imported"),
        ("import torch.utils.cpp_extension; __version__ = '2.10.1'", "", "torch is 2.10.1"),
        ("", "most", "CRUX_BUILD='most': expected all or sim"),
    ],
)
def test_a_build_that_lacks_torch_says_in_one_line_what_to_do(
    torch_module, build, says, python, tmp_path
):
    (tmp_path / "torch" / "utils").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text(torch_module)
    (tmp_path / "torch" / "utils" / "cpp_extension.py").write_text("")
    done = python("setup.py", "dist_info", "--output-dir", tmp_path, CRUX_BUILD=build)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert says in done.stderr
    if build != "most":
        assert "pip install --no-build-isolation '.[live]'" in done.stderr
        assert "CRUX_BUILD=sim pip install ." in done.stderr


@pytest.mark.full
def test_the_simulator_is_built_and_runs_without_torch(checkout, python, tmp_path):
    folder, _ = checkout
    done = python("-c", WHEEL, tmp_path, without=["torch"], cwd=folder, CRUX_BUILD="sim")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    built = {f.name.split(".")[0] for f in (tmp_path / "site/crux_torch").glob("*.so")}
    assert built == {"_fluid", "_schedule"}
    run = ["-m", "crux_torch.cli", "sim", "run", ROOT / "examples/spines.json"]
    done = python(*run, cwd=tmp_path / "site", without=["torch", "networkx", "matplotlib"])
    assert (done.returncode, done.stderr) == (0, "")
    assert "gpt" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "module", "says"),
    [
        (["cruxrun", "train.py"], "torch", "cruxrun needs torch: pip install 'crux-torch[live]'"),
        (["crux_torch.cli", "sim", "run", "x"], "scipy", "pip install 'crux-torch[sim]'"),
    ],
)
def test_a_missing_extra_is_one_line_with_the_command_that_installs_it(
    command, module, says, python
):
    done = python("-m", *command, without=[module])
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert says in done.stderr


@pytest.mark.slow
def test_commands_that_need_no_extra_run_without_any(python):
    absent = ["torch", "scipy", "networkx", "matplotlib", "jinja2", "pynvml"]
    for command in (["--help"], ["host", "--json"], ["probe", "--help"], ["doctor", "--json"]):
        done = python("-m", "crux_torch.cli", *command, without=absent)
        assert "Traceback" not in done.stderr
        assert done.stdout


@pytest.fixture
def choose(monkeypatch):
    """Imports a copy of ``crux_torch/_C.py`` beside some release of torch."""

    def load(folder, release):
        monkeypatch.setattr(torch, "__version__", release)
        spec = importlib.util.spec_from_file_location("chosen", folder / "_C.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "chosen", module)
        spec.loader.exec_module(module)
        return sys.modules["chosen"]

    return load


def test_the_extension_for_the_installed_torch_is_chosen_and_a_lack_is_told(choose, tmp_path):
    ours = ROOT / "crux_torch"
    release = ".".join(torch.__version__.split(".")[:2])
    assert choose(ours, torch.__version__) is importlib.import_module("crux_torch._C")
    with pytest.raises(ImportError, match=f"torch 2.99.0 is installed, .* built for.* {release}"):
        choose(ours, "2.99.0")
    shutil.copy(ours / "_C.py", tmp_path)
    with pytest.raises(ModuleNotFoundError, match="installed without its extension"):
        choose(tmp_path, "2.99.0")


def _pins(*files: Path) -> dict[str, str]:
    pinned = {}
    for file in files:
        for line in file.read_text().splitlines():
            name, equals, version = line.partition("==")
            if equals and not line.startswith((" ", "#")):
                pinned[name.lower().replace("_", "-")] = version.split()[0].rstrip(";")
    return pinned


@pytest.mark.parametrize("lock", sorted((ROOT / "constraints").glob("lock-python-*.txt")), ids=str)
def test_a_lock_has_the_pinned_versions_and_a_hash_for_each(lock: Path) -> None:
    """A pin that changes without `make lock` fails here."""
    _, _, python, _, torch = lock.stem.split("-")
    folder = lock.parent
    pinned = _pins(folder / f"python-{python}.txt", folder / f"torch-{torch}.txt")
    locked = _pins(lock)
    assert {name: pinned[name] for name in locked} == locked
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    wanted = [Requirement(line) for line in lines if line and line[0] != "#"]
    here = {"python_version": python}
    assert {
        each.name.lower() for each in wanted if each.marker is None or each.marker.evaluate(here)
    } <= set(locked)
    for entry in lock.read_text().split("\n\n")[0].split("==")[1:]:
        assert "--hash=sha256:" in entry


def test_the_licence_of_each_pinned_package_is_listed() -> None:
    table = (ROOT / "constraints" / "LICENCES.md").read_text()
    rows = [line.split("|")[1:4] for line in table.splitlines()[2:]]
    listed = {name.strip().lower().replace("_", "-"): version.strip() for name, version, _ in rows}
    newest = max((ROOT / "constraints").glob("lock-python-3.11-*.txt"))
    assert listed == _pins(newest)
    silent = {row[0].strip() for row in rows if row[2].strip() in ("", "UNKNOWN")}
    assert silent <= {"cuda-toolkit"}, "NVIDIA's names its terms outside its metadata"
