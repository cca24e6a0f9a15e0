"""A shim for the installed libibverbs, through which every queue pair of a process goes.

``libcrux_ibverbs.so`` is a template; docs/understand/transport.md describes the copies of it. There
are two: for programs that are linked to libibverbs, and for NCCL, which asks for ``libibverbs.so``
first (from 2.30.3 on also for ``NCCL_IBVERBS_LIB``). A copy gets another SONAME, more needed
libraries and more version nodes. Names and layouts are those of the gABI, chapter 5, and of the
Linux Standard Base, "Symbol Versioning". pyelftools does not fit: it only reads, and it finds
version nodes through section headers, which the written files do not have.

``python -m crux_torch.apply.verbs_shim COMMAND...`` runs any program with it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shlex
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import click

from crux_torch.apply.transport import LIBRARY
from crux_torch.errors import CruxError
from crux_torch.own_folders import open_folder

logger = logging.getLogger(__name__)

TEMPLATE = LIBRARY.with_name("libcrux_ibverbs.so")
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

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_NEEDED, _DT_STRTAB, _DT_STRSZ, _DT_SONAME = 0, 1, 5, 10, 14
_DT_VERDEF, _DT_VERDEFNUM = 0x6FFFFFFC, 0x6FFFFFFD
_VER_FLG_BASE = 1
#: Indices of added version nodes begin here: far above those that a linker gives to a library's
#: own nodes and to the ones that it needs, which share their numbers.
_FIRST_ADDED = 256
_ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_DYNAMIC = struct.Struct("<qQ")
_VERDEF = struct.Struct("<HHHHIII")
_VERDAUX = struct.Struct("<II")


class VerbsShimError(CruxError, OSError):
    """No shim for libibverbs can be made here; the message says why."""


def environment(existing: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that steer the queue pairs of a process that starts with them.

    ``LD_PRELOAD`` and ``NCCL_IBVERBS_LIB``; none if there is no libibverbs, or no shim can be made.
    Libraries that ``existing``, the process's environment, preloads are kept, and NCCL's shim leads
    to the library that ``existing`` names in ``NCCL_IBVERBS_LIB``.
    """
    try:
        real = nccl_real = find_real(existing)
        if real is None:
            return {}
        own = existing.get(NCCL_VARIABLE)
        if own and not is_shim(own):
            nccl_real = find_real(existing, own)
        for_programs = prepare(real, PROGRAM_NAME, existing)
        for_nccl = prepare(nccl_real or real, NCCL_NAME, existing)
    except (CruxError, OSError) as error:
        logger.warning("queue pairs can't be steered: %s", error)
        return {}
    preloaded = [entry for entry in preload_entries(existing) if not is_shim(entry)]
    added = [str(path) for path in (LIBRARY, for_programs, for_nccl)]
    preloaded += [path for path in added if path not in preloaded]
    return {"LD_PRELOAD": ":".join(preloaded), NCCL_VARIABLE: str(for_nccl)}


def find_real(existing: Mapping[str, str], name: str = PROGRAM_NAME) -> Path | None:
    """Returns the libibverbs that a program in the environment ``existing`` loads as ``name``.

    None if there is none. Its path has no symbolic links.

    Raises:
        VerbsShimError: the dynamic loader can't be asked.
    """
    env = {key: value for key, value in existing.items() if key != NCCL_VARIABLE}
    others = (e for e in preload_entries(existing) if e != str(LIBRARY) and not is_shim(e))
    env["LD_PRELOAD"] = ":".join(others)
    found = _python(_WHERE, name, env=env)
    if found.returncode or not found.stdout:
        return None
    return Path(found.stdout.splitlines()[0]).resolve()


def prepare(
    real: Path, name: str = PROGRAM_NAME, existing: Mapping[str, str] | None = None
) -> Path:
    """Makes the shim for ``real``, the installed libibverbs, unless it exists already.

    Returns its path, in a folder that only this user can write to.

    Args:
        name: SONAME and file name of the shim.
        existing: says where caches are (``XDG_CACHE_HOME``, ``HOME``); default: os.environ.

    Raises:
        VerbsShimError: the template was not built, or libraries can't be loaded from any folder.
        ElfError: the real library can't be read.
    """
    for path, remedy in (
        (TEMPLATE, "install libibverbs-dev and build crux_torch again"),
        (LIBRARY, "`pip install --no-build-isolation .` makes it"),
    ):
        if not path.is_file():
            raise VerbsShimError(f"{path} is not there: {remedy}")
    for path in (real, LIBRARY):
        _check_name(path)
    template = TEMPLATE.read_bytes()
    image = make(template, real, name)
    about = real.stat()
    identity = f"{real} {about.st_size} {about.st_mtime_ns} {about.st_ino} {LIBRARY} ".encode()
    folder = _FOLDER_PREFIX + hashlib.sha256(identity + template).hexdigest()[:20]
    failures = []
    for root in _cache_roots(os.environ if existing is None else existing):
        try:
            return _store(root, folder, image, real, name)
        except OSError as error:
            failures.append(f"{root}: {error}")
    raise VerbsShimError("no folder takes the shim: " + "; ".join(failures))


def make(template: bytes, real: Path, name: str) -> bytes:
    """Returns the content of the shim with the SONAME ``name``.

    Args:
        template: content of ``TEMPLATE``.
        real: path of the real library, which is read for its version nodes.

    Raises:
        VerbsShimError: the two are for different machines.
        ElfError: one of the files is no shared library, or lacks room.
    """
    shim = SharedObject(template, str(TEMPLATE))
    library = SharedObject(real.read_bytes(), str(real))
    if library.machine != shim.machine:
        raise VerbsShimError(f"{real} is for another machine than {TEMPLATE}")
    start = template.find(_MAGIC)
    if start < 0 or template.find(_MAGIC, start + 1) >= 0:
        raise VerbsShimError(f"{TEMPLATE} is of another build than {__file__}")
    path = os.fsencode(real)
    if len(path) >= _PATH_BYTES:
        raise VerbsShimError(f"{real} is too long a path")
    path_start = start + len(_MAGIC)
    shim.image[path_start : path_start + len(path)] = path
    shim.rename(
        soname=name,
        needed=[str(LIBRARY), str(real)],
        versions=list(library.versions()),
        room=(path_start + _PATH_BYTES, _TABLE_BYTES),
    )
    return bytes(shim.image)


def _store(root: Path, key: str, image: bytes, real: Path, name: str) -> Path:
    """Writes the shim below ``root`` and loads it once. Raises OSError if that fails."""
    _check_name(root)
    folder = root / key
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    for private in (root, folder):
        os.close(open_folder(private, make=True))
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


def _check_name(path: Path) -> None:
    if re.search(r"[\s:;]", str(path)):
        raise VerbsShimError(f"the loader can't name {path}: a space, colon or semicolon")


def _check_loads(shim: Path, real: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    checked = _python(_CHECK, str(LIBRARY), str(real), str(shim), env=env)
    if checked.returncode:
        lines = checked.stderr.strip().splitlines() or [f"status {checked.returncode}"]
        raise VerbsShimError(f"the shim can't be loaded: {lines[-1]}")


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
        raise VerbsShimError(f"the dynamic loader could not be asked: {error}") from error


def _cache_roots(existing: Mapping[str, str]) -> list[Path]:
    caches, home = existing.get("XDG_CACHE_HOME", ""), existing.get("HOME", "")
    roots = [Path(tempfile.gettempdir(), f"crux_torch-{os.geteuid()}")]
    if os.path.isabs(caches) or os.path.isabs(home):
        cache = Path(caches) if os.path.isabs(caches) else Path(home, ".cache")
        roots.insert(0, cache / "crux_torch")
    return roots


def preload_entries(env: Mapping[str, str]) -> list[str]:
    """Returns the libraries in ``LD_PRELOAD``."""
    return [entry for entry in re.split(r"[\s:]+", env.get("LD_PRELOAD", "")) if entry]


def is_shim(path: str) -> bool:
    """True if :func:`prepare` made the library at ``path``."""
    named = Path(path)
    return named.name in (NCCL_NAME, PROGRAM_NAME) and named.parent.name.startswith(_FOLDER_PREFIX)


class ElfError(CruxError, ValueError):
    """The file is no shared library that can be read here."""


class SharedObject:
    """The dynamic section of a 64-bit little-endian shared library, and its tables.

    Args:
        name: of the file, for messages.

    Raises:
        ElfError: it is no 64-bit little-endian ELF file with a dynamic section.
    """

    def __init__(self, image: bytes, name: str = "library") -> None:
        self.name = name
        self.image = bytearray(image)
        try:
            self._read_headers()
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise ElfError(f"{name} is cut off or damaged: {error}") from error

    def _read_headers(self) -> None:
        if self.image[:6] != b"\x7fELF\x02\x01":
            raise ElfError(f"{self.name} is no 64-bit little-endian ELF file")
        header = _ELF_HEADER.unpack_from(self.image)
        self.machine: int = header[2]
        table, entry_size, count = header[5], header[9], header[10]
        # (offset in the file, address, size in the file)
        self._segments: list[tuple[int, int, int]] = []
        self._dynamic = range(0)
        for i in range(count):
            kind, _, offset, address, _, file_size, _, _ = _PROGRAM_HEADER.unpack_from(
                self.image, table + i * entry_size
            )
            if kind == _PT_LOAD:
                self._segments.append((offset, address, file_size))
            elif kind == _PT_DYNAMIC:
                self._dynamic = range(offset, offset + file_size, _DYNAMIC.size)
        if not self._dynamic:
            raise ElfError(f"{self.name} has no dynamic section")
        # The place and value of the first of each tag.
        self._tags: dict[int, tuple[int, int]] = {}
        for offset in self._dynamic:
            tag, value = _DYNAMIC.unpack_from(self.image, offset)
            self._end = offset
            if tag == _DT_NULL:
                break
            self._tags.setdefault(tag, (offset, value))

    def _value(self, tag: int) -> int:
        return self._tags[tag][1]

    def file_offset(self, address: int) -> int:
        """Returns the offset in the file of ``address``."""
        for offset, start, size in self._segments:
            if start <= address < start + size:
                return address - start + offset
        raise ElfError(f"{self.name} has nothing at address {address:#x}")

    def address(self, file_offset: int) -> int:
        """Returns the address at which that part of the file is loaded."""
        for offset, start, size in self._segments:
            if offset <= file_offset < offset + size:
                return file_offset - offset + start
        raise ElfError(f"{self.name} does not load what is at offset {file_offset:#x}")

    def versions(self) -> dict[str, int]:
        """Returns the index of each version node that it defines, without the base one."""
        found: dict[str, int] = {}
        if _DT_VERDEF not in self._tags:
            return found
        offset = self.file_offset(self._value(_DT_VERDEF))
        strings = self.file_offset(self._value(_DT_STRTAB))
        for _ in range(self._value(_DT_VERDEFNUM)):
            _, flags, index, _, _, first, following = _VERDEF.unpack_from(self.image, offset)
            if not flags & _VER_FLG_BASE:
                name, _ = _VERDAUX.unpack_from(self.image, offset + first)
                start = strings + name
                found[self.image[start : self.image.index(0, start)].decode()] = index
            offset += following
        return found

    def rename(
        self, soname: str, needed: list[str], versions: list[str], room: tuple[int, int]
    ) -> None:
        """Sets the SONAME, and adds to the libraries it needs and the versions it defines.

        Args:
            room: offset and size of an unused, loaded part of the file, for the new string table
                and version definitions.

        Raises:
            ElfError: there is not enough room, or the dynamic section has too few spare entries.
        """
        old_start = self.file_offset(self._value(_DT_STRTAB))
        strings = bytearray(self.image[old_start : old_start + self._value(_DT_STRSZ)])

        def add(text: str) -> int:
            start = len(strings)
            strings.extend(text.encode() + b"\0")
            return start

        indices = self.versions()
        added = [version for version in versions if version not in indices]
        indices |= {version: index for index, version in enumerate(added, _FIRST_ADDED)}
        name = add(soname)
        nodes = [(_VER_FLG_BASE, 1, soname, name)]
        nodes += [(0, index, version, add(version)) for version, index in indices.items()]
        needs = [add(library) for library in needed]

        start, size = room
        definitions_start = start + (len(strings) + 7) // 8 * 8
        definitions = _verdef_table(nodes)
        if definitions_start + len(definitions) > start + size:
            raise ElfError(f"{self.name} has too little room for its new names")
        self.image[start : start + len(strings)] = strings
        self.image[definitions_start : definitions_start + len(definitions)] = definitions
        self._set(_DT_STRTAB, self.address(start))
        self._set(_DT_STRSZ, len(strings))
        self._set(_DT_SONAME, name)
        self._set(_DT_VERDEF, self.address(definitions_start))
        self._set(_DT_VERDEFNUM, len(nodes))
        for offset in needs:
            self._append(_DT_NEEDED, offset)
        # The section headers still point at the old tables. Only tools read them.
        header = list(_ELF_HEADER.unpack_from(self.image))
        header[6] = header[12] = header[13] = 0  # e_shoff, e_shnum, e_shstrndx
        _ELF_HEADER.pack_into(self.image, 0, *header)

    def _set(self, tag: int, value: int) -> None:
        if tag in self._tags:
            _DYNAMIC.pack_into(self.image, self._tags[tag][0], tag, value)
        else:
            self._append(tag, value)

    def _append(self, tag: int, value: int) -> None:
        # A DT_NULL has to stay at the end.
        if self._end + _DYNAMIC.size not in self._dynamic:
            raise ElfError(f"{self.name} has no spare entries in its dynamic section")
        _DYNAMIC.pack_into(self.image, self._end, tag, value)
        self._end += _DYNAMIC.size


def _verdef_table(nodes: list[tuple[int, int, str, int]]) -> bytes:
    """Version definitions of (flags, index, name, offset of the name among the strings)."""
    size = _VERDEF.size + _VERDAUX.size
    table = b""
    for i, (flags, index, name, offset) in enumerate(nodes):
        following = size if i < len(nodes) - 1 else 0
        table += _VERDEF.pack(1, flags, index, 1, _hash(name), _VERDEF.size, following)
        table += _VERDAUX.pack(offset, 0)
    return table


def _hash(name: str) -> int:
    """The System V hash of a symbol's or version's name."""
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ (high >> 24)) & ~high
    return value


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
