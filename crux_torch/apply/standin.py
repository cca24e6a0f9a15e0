"""A stand-in for the installed libibverbs, through which every queue pair of a process goes.

``libcrux_ibverbs.so`` is a template; docs/transport.md says what the copies of it are. There are
two: for programs that are linked to libibverbs, and for NCCL, which asks for ``libibverbs.so``
first (from 2.30.3 on also for ``NCCL_IBVERBS_LIB``).

``python -m crux_torch.apply.standin COMMAND...`` runs any program with it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shlex
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import click

from crux_torch.apply.elf import SharedObject
from crux_torch.errors import CruxError

logger = logging.getLogger(__name__)

TEMPLATE = Path(__file__).parents[1] / "libcrux_ibverbs.so"
TRANSPORT = TEMPLATE.with_name("libcrux_transport.so")
#: The name that NCCL asks for first, and the name that programs are linked to.
NCCL_NAME, PROGRAM_NAME = "libibverbs.so", "libibverbs.so.1"
NCCL_VARIABLE = "NCCL_IBVERBS_LIB"

_MAGIC = b"CRUX-STAND-IN-1\0"
_PATH_BYTES, _TABLE_BYTES = 4080, 61440
_FOLDER_PREFIX = "verbs-"
_SUBPROCESS_TIMEOUT_S = 20
#: Runs in a new process, because loading a broken library may kill it.
_WHERE = """
import ctypes, sys
ctypes.CDLL(sys.argv[1])
for line in open("/proc/self/maps"):
    path = line.rstrip("\\n").split(None, 5)[5:]
    if path and "/libibverbs.so" in path[0]:
        print(path[0])
        break
"""
_CHECK = """
import ctypes, sys
for path in sys.argv[3:]:
    library = ctypes.CDLL(path)
    find = ctypes.CDLL(None).dlvsym
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_void_p] + [ctypes.c_char_p] * 2
    for name in ("ibv_modify_qp", "ibv_get_device_list"):
        if not find(library._handle, name.encode(), b"IBVERBS_1.1"):
            sys.exit(f"{path} does not lead to {name}")
sees = ctypes.CDLL(sys.argv[1]).crux_transport_sees_queue_pairs
if not sees():
    sys.exit(f"{sys.argv[1]} does not see queue pairs")
if sys.argv[2] not in open("/proc/self/maps").read():
    sys.exit(f"{sys.argv[2]} is not loaded behind it")
"""


class StandinError(CruxError, OSError):
    """No stand-in for libibverbs can be made here; the message says why."""


def environment(existing: Mapping[str, str]) -> dict[str, str]:
    """The variables with which a process must be started so that its queue pairs are steered.

    ``LD_PRELOAD`` and ``NCCL_IBVERBS_LIB``; none if there is no libibverbs, or no stand-in can be
    made. What ``LD_PRELOAD`` of ``existing``, the process's environment, names is kept, and NCCL's
    stand-in leads to the library that it names in ``NCCL_IBVERBS_LIB``.
    """
    try:
        real = nccl_real = find_real(existing)
        if real is None:
            return {}
        own = existing.get(NCCL_VARIABLE)
        if own and not is_standin(own):
            nccl_real = find_real(existing, own)
        for_programs = prepare(real, PROGRAM_NAME, existing)
        for_nccl = prepare(nccl_real or real, NCCL_NAME, existing)
    except (CruxError, OSError) as error:
        logger.warning("queue pairs can't be steered: %s", error)
        return {}
    preloaded = [entry for entry in _preloaded(existing) if not is_standin(entry)]
    added = [str(path) for path in (TRANSPORT, for_programs, for_nccl)]
    preloaded += [path for path in added if path not in preloaded]
    return {"LD_PRELOAD": ":".join(preloaded), NCCL_VARIABLE: str(for_nccl)}


def find_real(existing: Mapping[str, str], name: str = PROGRAM_NAME) -> Path | None:
    """The libibverbs that a program with the environment ``existing`` loads as ``name``, or None.

    Its path has no symbolic links. Raises StandinError if the dynamic loader can't be asked.
    """
    env = {key: value for key, value in existing.items() if key != NCCL_VARIABLE}
    others = (entry for entry in _preloaded(existing) if entry != str(TRANSPORT))
    env["LD_PRELOAD"] = ":".join(entry for entry in others if not is_standin(entry))
    found = _python(_WHERE, name, env=env)
    if found.returncode or not found.stdout:
        return None
    return Path(found.stdout.splitlines()[0]).resolve()


def prepare(
    real: Path, name: str = PROGRAM_NAME, existing: Mapping[str, str] | None = None
) -> Path:
    """Makes the stand-in for ``real``, the installed libibverbs, unless it exists already.

    Returns its path, in a folder that only this user can write to.

    Args:
        name: SONAME and file name of the stand-in.
        existing: says where caches are (``XDG_CACHE_HOME``, ``HOME``); default: os.environ.

    Raises:
        StandinError: the template was not built, or libraries can't be loaded from any folder.
        ElfError: the real library can't be read.
    """
    if not TEMPLATE.is_file():
        raise StandinError(
            f"{TEMPLATE} was not built: install libibverbs-dev and build crux_torch again"
        )
    if not TRANSPORT.is_file():
        raise StandinError(
            f"{TRANSPORT} is not there: `pip install --no-build-isolation .` makes it"
        )
    for path in (real, TRANSPORT):
        if re.search(r"[\s:;]", str(path)):
            raise StandinError(f"{path} can't be named to the loader: a space, colon or semicolon")
    template = TEMPLATE.read_bytes()
    image = make(template, real, name)
    about = real.stat()
    identity = f"{real} {about.st_size} {about.st_mtime_ns} {about.st_ino} {TRANSPORT} ".encode()
    folder = _FOLDER_PREFIX + hashlib.sha256(identity + template).hexdigest()[:20]
    failures = []
    for root in _cache_roots(os.environ if existing is None else existing):
        try:
            return _store(root, folder, image, real, name)
        except OSError as error:
            failures.append(f"{root}: {error}")
    raise StandinError("no folder takes the stand-in: " + "; ".join(failures))


def make(template: bytes, real: Path, name: str) -> bytes:
    """The stand-in's file, with the SONAME ``name``, from the ``template``'s.

    Args:
        real: path of the real library, which is read for its version nodes.

    Raises:
        StandinError: the two are for different machines.
        ElfError: one of the files is no shared library, or lacks room.
    """
    standin = SharedObject(template, str(TEMPLATE))
    library = SharedObject(real.read_bytes(), str(real))
    if library.machine != standin.machine:
        raise StandinError(f"{real} is for another machine than {TEMPLATE}")
    start = template.find(_MAGIC)
    if start < 0 or template.find(_MAGIC, start + 1) >= 0:
        raise StandinError(f"{TEMPLATE} is of another build than {__file__}")
    path = os.fsencode(real)
    if len(path) >= _PATH_BYTES:
        raise StandinError(f"{real} is too long a path")
    path_start = start + len(_MAGIC)
    standin.image[path_start : path_start + len(path)] = path
    standin.rename(
        soname=name,
        needed=[str(TRANSPORT), str(real)],
        versions=list(library.versions()),
        room=(path_start + _PATH_BYTES, _TABLE_BYTES),
    )
    return bytes(standin.image)


def _store(root: Path, key: str, image: bytes, real: Path, name: str) -> Path:
    """Writes the stand-in below ``root`` and loads it once. Raises OSError if that fails."""
    if re.search(r"[\s:;]", str(root)):
        raise StandinError("the loader can't be told of it: a space, colon or semicolon")
    folder = root / key
    for made in (root, folder):
        made.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(made)
    target = folder / name
    if target.is_file() and target.read_bytes() == image:
        return target
    descriptor, scratch = tempfile.mkstemp(dir=folder, prefix=name, suffix=".new")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(image)
        os.chmod(scratch, 0o700)
        _check_loads(Path(scratch), real)
        os.replace(scratch, target)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise
    return target


def _check_private(folder: Path) -> None:
    """Only this user may write to a folder from which libraries are loaded."""
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        raise StandinError(f"{folder} is not a folder of this user")
    if about.st_mode & 0o077:
        raise StandinError(f"{folder} is open to other users: chmod 700 it, or remove it")


def _check_loads(standin: Path, real: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    checked = _python(_CHECK, str(TRANSPORT), str(real), str(standin), env=env)
    if checked.returncode:
        lines = checked.stderr.strip().splitlines() or [f"status {checked.returncode}"]
        raise StandinError(f"the stand-in can't be loaded: {lines[-1]}")


def _python(code: str, *arguments: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [sys.executable, "-I", "-S", "-c", code, *arguments],
            env=dict(env),
            capture_output=True,
            text=True,
            timeout=_SUBPROCESS_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StandinError(f"the dynamic loader could not be asked: {error}") from error


def _cache_roots(existing: Mapping[str, str]) -> list[Path]:
    caches, home = existing.get("XDG_CACHE_HOME", ""), existing.get("HOME", "")
    roots = [Path(tempfile.gettempdir(), f"crux_torch-{os.geteuid()}")]
    if os.path.isabs(caches) or os.path.isabs(home):
        cache = Path(caches) if os.path.isabs(caches) else Path(home, ".cache")
        roots.insert(0, cache / "crux_torch")
    return roots


def _preloaded(env: Mapping[str, str]) -> list[str]:
    return [entry for entry in re.split(r"[\s:]+", env.get("LD_PRELOAD", "")) if entry]


def is_standin(path: str) -> bool:
    """Whether :func:`prepare` made it."""
    named = Path(path)
    return named.name in (NCCL_NAME, PROGRAM_NAME) and named.parent.name.startswith(_FOLDER_PREFIX)


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--print-env", is_flag=True, help="Print what has to be exported, and end.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def main(print_env: bool, command: tuple[str, ...]) -> None:
    """Run COMMAND, whose queue pairs then go through the transport library."""
    if bool(command) == print_env:
        raise click.UsageError("either --print-env or a program")
    variables = environment(os.environ)
    if print_env:
        for name, value in variables.items():
            click.echo(f"export {name}={shlex.quote(value)}")
        sys.exit(0 if variables else 1)
    if not variables:
        logger.warning("%s runs without it", command[0])
    try:
        os.execvpe(command[0], command, {**os.environ, **variables})
    except OSError as error:
        logger.error("%s can't be run: %s", command[0], error)
        sys.exit(127)


if __name__ == "__main__":
    main()
