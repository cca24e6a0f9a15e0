"""Gives a shared library another SONAME, more needed libraries and more version nodes.

For 64-bit little-endian ELF files (x86-64, AArch64). Names and layouts are those of the gABI,
chapter 5, and of the Linux Standard Base, "Symbol Versioning". pyelftools does not fit: it only
reads, and it finds version nodes through section headers, which the written files do not have.
"""

from __future__ import annotations

import struct

from crux_torch.errors import CruxError

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


class ElfError(CruxError, ValueError):
    """The file is no shared library that can be read here."""


class SharedObject:
    """The dynamic section of a shared library, and the tables that it points at.

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
        """The place in the file of what is loaded at ``address``."""
        for offset, start, size in self._segments:
            if start <= address < start + size:
                return address - start + offset
        raise ElfError(f"{self.name} has nothing at address {address:#x}")

    def address(self, file_offset: int) -> int:
        """The address at which that part of the file is loaded."""
        for offset, start, size in self._segments:
            if offset <= file_offset < offset + size:
                return file_offset - offset + start
        raise ElfError(f"{self.name} does not load what is at offset {file_offset:#x}")

    def versions(self) -> dict[str, int]:
        """The version nodes that it defines, without the base one: name to index."""
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
        """Gives it another SONAME, and adds to the libraries it needs and the versions it defines.

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
