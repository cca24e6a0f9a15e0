"""What Crux can do without: the library, privileges, verbs, the kernel's options.

Real jobs of two ranks under ``cruxrun``, each in a machine that lacks one of them, beside one that
lacks none. All train the same, bit for bit as under torchrun, and ``crux doctor`` run in the same
machine says what is missing.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from control_fakes import until
from dscp_maps import MARKED_ENV
from loopback import free_port
from places import SUPPORT
from training_job import BOUND_S, ROOT, Job, environment

from crux_torch.apply import transport

pytestmark = pytest.mark.slow

REFUSE_OPTIONS = str(SUPPORT.joinpath("refuse_options.py"))
DOCTOR_TIMEOUT_S = 60
#: More than a job gets to while the test looks.
STEPS = 2000
CRUX = {
    "CRUX_PROFILE_S": "2",
    "CRUX_TUNING": "start_s=0.1,tick_s=0.05,profile_iterations=3,warmup_iterations=2",
}


@dataclass(frozen=True)
class Machine:
    """Where a job runs, and what that leaves of Crux.

    Attributes:
        missing: parts of which the doctor says that they are missing there.
        marked: whether connections get their class all the same.
        why_not: of ``crux_torch.status()["applied"]`` where they don't.
        under: starts a program there.
        env: variables there.
        path: folders that Python looks in first.
    """

    missing: frozenset[str]
    marked: bool
    why_not: str = ""
    under: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    path: tuple[Path, ...] = ()


def complete(folder: Path) -> Machine:
    return Machine(frozenset(), marked=True)


def without_library(folder: Path) -> Machine:
    """The package as it is installed where the library could not be built."""
    copy = folder / "site" / "crux_torch"
    copy.mkdir(parents=True)
    for entry in (ROOT / "crux_torch").iterdir():
        if entry.name != transport.LIBRARY.name:
            (copy / entry.name).symlink_to(entry)
    missing = frozenset({"transport library", "transport preload"})
    return Machine(missing, marked=False, why_not="cannot open", path=(copy.parent,))


def switched_off(folder: Path) -> Machine:
    missing = frozenset({"transport preload"})
    return Machine(missing, marked=True, env={"CRUX_TRANSPORT": "0"})


def without_verbs(folder: Path) -> Machine:
    """A mount namespace in which every libibverbs is an empty file."""
    folders = {Path(p) for p in ("/usr/lib", "/lib", "/usr/lib64", "/usr/local/lib")}
    present = sorted(
        {file.resolve() for f in folders if f.is_dir() for file in f.rglob("libibverbs.so*")}
    )
    covers = "".join(f"mount --bind /dev/null '{file}' && " for file in present)
    under = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if not _works(*under, f"{covers}true"):
        pytest.skip("no user and mount namespaces here, to hide libibverbs in")
    missing = frozenset({"libibverbs", "RDMA devices"})
    return Machine(missing, marked=True, under=(*under, f'{covers}exec "$@"', "sh"))


def refusing(refusal: int) -> Callable[[Path], Machine]:
    def machine(folder: Path) -> Machine:
        under = (sys.executable, REFUSE_OPTIONS, str(refusal))
        if not _works(*under, "true"):
            pytest.skip("no seccomp filters here, to refuse socket options with")
        missing = frozenset({"DSCP on IPv4", "DSCP on IPv6", "SO_MAX_PACING_RATE", "error queue"})
        return Machine(missing, marked=False, why_not=os.strerror(refusal), under=under)

    return machine


def without_privileges(folder: Path) -> Machine:
    """Nobody, or where nobody may not run this Python root without any capability."""
    missing = frozenset({"paths of live TCP"})
    if os.geteuid() != 0:
        return Machine(missing, marked=True)
    drop = ["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *drop]
    root = ["setpriv", "--securebits=+noroot", *drop]
    child = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import torch'], check=1)"
    )
    for under in (nobody, root):
        if _works(*under, sys.executable, "-c", child):
            return Machine(missing, marked=True, under=tuple(under), env={"HOME": str(folder)})
    pytest.skip("no setpriv, to drop privileges with")


def _works(*command: str) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return not subprocess.run(command, capture_output=True, timeout=BOUND_S).returncode


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """One that nobody may write to as well: pytest's own are for their owner only."""
    with tempfile.TemporaryDirectory(prefix="crux-absences-") as name:
        made = Path(name)
        made.chmod(0o777)
        yield made


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[str]:
    """The losses of the same job under torchrun."""
    job = Job("torch.distributed.run", folder / "undisturbed", f"--steps={STEPS}", "--sleep-s=0")
    try:
        job.end(after_its_steps=True)
        return job.losses()
    finally:
        job.kill_everything()


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def launch(folder: Path, machine: Machine) -> Job:
        folder.mkdir()
        folder.chmod(0o777)
        env = {**CRUX, **MARKED_ENV, "CRUX_STORE": f"tcp://127.0.0.1:{free_port()}", **machine.env}
        options = ("--status", "--sleep-s=0.03", f"--steps={STEPS}")
        jobs.append(Job("cruxrun", folder, *options, under=machine.under, path=machine.path, **env))
        return jobs[-1]

    yield launch
    for job in jobs:
        job.kill_everything()


def examined(machine: Machine, folder: Path) -> dict[str, Any]:
    """The doctor's findings there, by part."""
    done = subprocess.run(
        [*machine.under, sys.executable, "-m", "crux_torch.cli", "doctor", "--json"],
        env={**environment(machine.path), **machine.env, "CRUX_STORE": "none", **MARKED_ENV},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DOCTOR_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {check["part"]: check for check in json.loads(done.stdout)}


@pytest.mark.full
@pytest.mark.parametrize(
    "place",
    [
        complete,
        without_library,
        switched_off,
        without_verbs,
        pytest.param(refusing(errno.EPERM), id="options_refused"),
        without_privileges,
    ],
)
# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_a_job_trains_the_same_and_the_doctor_says_what_is_missing(
    place: Callable[[Path], Machine],
    request: pytest.FixtureRequest,
    folder: Path,
    undisturbed: list[str],
    start: Callable[..., Job],
) -> None:
    if not transport.LIBRARY.exists():
        pytest.skip("libcrux_transport.so is not built: there is nothing to be absent")
    # A second try has a folder of its own.
    scratch = Path(tempfile.mkdtemp(prefix=request.node.callspec.id, dir=folder))
    scratch.chmod(0o777)
    machine = place(scratch)
    job = start(scratch / "job", machine)

    def followed() -> bool:
        """Whether both ranks have carried out a plan as far as they can."""
        assert job.launcher.poll() is None, job.errors.read_text()
        for rank in (0, 1):
            status = job.status(rank)
            order, applied = status.get("order"), status.get("applied")
            if not order or order["measuring"] or applied["level"] is None:
                return False
            if machine.marked != (applied["marked"] > 0 and applied["refused"] == 0):
                return False
        return True

    until(followed, BOUND_S, "a plan to be followed as far as it can be")
    for rank in (0, 1):
        status = job.status(rank)
        assert status["errors"] == {}
        if not machine.marked:
            reasons = [status["applied"]["error"]]
            reasons += [mark["error"] for mark in status["applied"]["sockets"]]
            assert any(machine.why_not in (reason or "") for reason in reasons), reasons
    job.end()
    assert job.steps() > 20
    assert job.losses() == undisturbed[: job.steps()]
    # torch says what it misses itself, with or without Crux. Ranks of a busy machine may measure
    # one after the other.
    said = [
        line
        for line in job.said()
        if not (line.startswith("[W") or "no collective was seen by two ranks" in line)
    ]
    assert len(said) <= 1, said

    the_doctor_says_it(machine, job.folder)


def the_doctor_says_it(machine: Machine, folder: Path) -> None:
    parts = examined(machine, folder)
    for part in machine.missing:
        assert parts[part]["state"] == "missing", parts[part]
        assert parts[part]["cost"]
        assert parts[part]["remedy"]
    of_the_machine = {"transport library", "transport preload", "DSCP on IPv4", "error queue"}
    for part in of_the_machine - machine.missing:
        assert parts[part]["state"] == "ok", parts[part]


def test_a_kernel_that_does_not_know_the_options(folder: Path) -> None:
    the_doctor_says_it(refusing(errno.ENOPROTOOPT)(folder), folder)
