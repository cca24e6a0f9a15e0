"""Folders of this host that other users can't take: for sockets, locks and shared memory.

A user's own is ``crux`` in the runtime directory, or ``/dev/shm/crux-UID``. Those of a group, who
asked to share, have ``/dev/shm/crux-group-GID``.
"""

from __future__ import annotations

import contextlib
import grp
import os
import socket
import stat
import struct
from pathlib import Path

from crux_torch.errors import CruxError, SettingsError

#: Memory that all processes of a host share; everyone may make files in it, and remove their own.
MEMORY = Path("/dev/shm")
#: Where a login session has its runtime directory, also where ``XDG_RUNTIME_DIR`` does not say so.
SESSIONS = Path("/run/user")
#: From <asm-generic/socket.h>; and the most groups of a process that Python can be told.
_SO_PEERGROUPS = 59
_MAX_PEER_GROUPS = 256


class FolderError(CruxError, OSError):
    """A folder or socket is not as private as it must be; the message says what to do."""


def group_id(name: str) -> int | None:
    """Returns the number of the group ``name``, which may be a number; None for an empty name.

    Raises:
        SettingsError: this host has no such group.
    """
    if not name:
        return None
    if name.isdecimal():
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise SettingsError(
            f"CRUX_STORE_GROUP={name!r}: this host has no group of that name"
        ) from None


def own_folders(group: int | None = None) -> tuple[Path, ...]:
    """Returns the places of this user's folder, or of ``group``'s, the best first.

    A session's runtime directory may come and go while the user's jobs run, so there are two.
    """
    if group is not None:
        return (MEMORY / f"crux-group-{group}",)
    uid = os.geteuid()
    named = os.environ.get("XDG_RUNTIME_DIR", "")
    session = SESSIONS / str(uid)
    if os.path.isabs(named) and Path(named) != session and _is_own(Path(named)):
        return (Path(named, "crux"),)
    sessions = (session / "crux",) if _is_own(session) else ()
    return (*sessions, MEMORY / f"crux-{uid}")


def spare_folder() -> tuple[Path, ...]:
    """Returns a folder in the user's home, if another user has taken the last of own_folders().

    Nobody can take it, but a home may be slow, and shared by hosts. Once made, it stays in use.
    """
    home = os.environ.get("HOME", "")
    spare = Path(home, f".crux-{socket.gethostname()}")
    if not os.path.isabs(home) or not _is_own(Path(home)):
        return ()
    last = own_folders()[-1]
    return (spare,) if spare.is_dir() or (os.path.lexists(last) and not _is_own(last)) else ()


def open_folder(folder: Path, group: int | None = None, *, make: bool = False) -> int:
    """Returns a descriptor of ``folder``, which only this user, or ``group``'s members, can use.

    With ``make``, it is made if it is not there.

    Raises:
        FolderError: it is another user's, or others may write to it.
        OSError: it is not there, or can't be made.
    """
    if make:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    fd = _open(folder)
    try:
        status = os.fstat(fd)
        mine = status.st_uid == os.geteuid()
        if group is not None and make and mine and status.st_mode & 0o7777 == 0o700:
            # As mkdir left it, so nobody else was in it.
            os.fchown(fd, -1, group)
            os.fchmod(fd, 0o770)
            status = os.fstat(fd)
        if group is None:
            if not mine:
                raise FolderError(f"{folder} belongs to user {status.st_uid}: have it removed")
            if status.st_mode & 0o077:
                raise FolderError(f"{folder} is open to others: chmod 700 it, or remove it")
        # Nobody but a member, or root, can have given it the group.
        elif status.st_gid != group or status.st_mode & 0o007:
            raise FolderError(
                f"{folder} must be group {group}'s alone: its owner, user {status.st_uid}, has to "
                f"chgrp {group} and chmod 770 it, or remove it"
            )
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_guarded(folder: Path, group: int | None = None) -> int:
    """Returns a descriptor of ``folder``, where only this user, root and ``group`` can write.

    Raises:
        FolderError: others may write to it.
        OSError: it is not there.
    """
    fd = _open(folder)
    status = os.fstat(fd)
    is_groups = group is not None and status.st_gid == group
    trusted = is_groups or status.st_uid in (0, os.geteuid())
    refused = 0o002 if is_groups else 0o022
    if trusted and not status.st_mode & refused:
        return fd
    os.close(fd)
    raise FolderError(
        f"others can replace what is in {folder}: name a folder that only its user can write to"
    )


def usable_folder(group: int | None = None) -> Path:
    """Returns a folder for shared memory, the same for all processes of the user, or ``group``.

    Raises:
        FolderError: all places are taken by others.
        OSError: none can be made.
    """
    failures: list[OSError] = []
    # Every process of the user sees the last place, in whatever session it runs.
    for folder in reversed(own_folders(group)):
        try:
            os.close(open_folder(folder, group, make=True))
        except OSError as error:
            failures.append(error)
        else:
            return folder
    raise failures[0]


def peer_is_trusted(connected: socket.socket, group: int | None = None) -> bool:
    """Returns True if the other end of a Unix socket is this user's, root's, or ``group``'s."""
    _, uid, gid = peer(connected)
    if uid in (0, os.geteuid()) or gid == group:
        return True
    if group is None:
        return False
    try:
        size = struct.calcsize("I")
        raw = connected.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MAX_PEER_GROUPS * size)
    except OSError:  # more groups than that
        return False
    return group in struct.unpack(f"{len(raw) // size}I", raw)


def peer(connected: socket.socket) -> tuple[int, int, int]:
    """Returns process, user and group of the other end of a Unix socket."""
    form = struct.Struct("3i")
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, form.size)
    pid, uid, gid = form.unpack(raw)
    return pid, uid, gid


def _open(folder: Path) -> int:
    try:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:
        raise FolderError(f"{folder} is no folder, or a link to one: remove it") from None
    except PermissionError:
        raise FolderError(f"{folder} is another user's: have it removed") from None


def _is_own(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    is_mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return is_mine and not status.st_mode & 0o022
