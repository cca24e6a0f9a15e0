"""The embedded store's place on one host: a Unix socket that other users can't reach or take.

``STORE.lock`` beside the socket ``STORE`` is locked by the server as long as it lives, however it
dies. Whoever gets the lock may remove what a dead one left. Sockets are reached through their open
folder, so a path of any length will do, and nobody can replace the folder meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crux_torch.errors import Cause, SettingsError, StoreError
from crux_torch.own_folders import (
    FolderError,
    group_id,
    open_folder,
    open_guarded,
    own_folders,
    peer,
    peer_is_trusted,
    spare_folder,
)

UNIX = "unix:"
#: In the user's folder.
DEFAULT_NAME = "store"
#: Seconds between two looks of a server at its socket's name.
LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class UnixPlace:
    """Place of the socket, and its users.

    Attributes:
        name: name of the socket.
        folder: folder of the socket; None for the user's own folder, or the group's.
        group: group whose members may use it; None for its user alone.
    """

    name: str = DEFAULT_NAME
    folder: Path | None = None
    group: int | None = None

    def folders(self) -> tuple[Path, ...]:
        """Returns the possible folders, the best first."""
        if self.folder is not None:
            return (self.folder,)
        return own_folders(self.group) + (spare_folder() if self.group is None else ())

    @contextlib.contextmanager
    def opened(self, folder: Path, *, make: bool = False) -> Iterator[int]:
        """Yields a descriptor of one of :meth:`folders`; ``make`` makes the user's own."""
        if self.folder is None:
            fd = open_folder(folder, self.group, make=make)
        else:
            fd = open_guarded(folder, self.group)
        try:
            yield fd
        finally:
            os.close(fd)


def parse_unix(endpoint: str, group: str = "") -> UnixPlace:
    """Returns the place in ``unix:``, ``unix:///PATH`` or, for another server, ``unix:NAME``.

    Raises:
        SettingsError: ``endpoint`` has another form, or there is no such ``group``.
    """
    rest = endpoint.removeprefix(UNIX)
    if "/" not in rest:
        return UnixPlace(rest or DEFAULT_NAME, group=group_id(group))
    folder, _, name = rest.removeprefix("//").rpartition("/")
    if not rest.startswith("///") or not folder or name in ("", ".", ".."):
        raise SettingsError(f"store {endpoint!r}: expected {UNIX} or {UNIX}///FOLDER/NAME")
    return UnixPlace(name, Path(folder), group_id(group))


class UnixConnector:
    """Connects to the server at ``place``."""

    def __init__(self, place: UnixPlace) -> None:
        self._place = place
        sockets = " or ".join(str(folder / place.name) for folder in place.folders())
        self.where = f"store {UNIX}{sockets}"

    def connect(self, timeout_s: float) -> socket.socket:
        """Returns a new connection.

        Raises:
            StoreError: another user's program listens there.
            OSError: nobody does, or the folder is not as it must be.
        """
        failures: list[OSError] = []
        for folder in self._place.folders():
            try:
                return self._connect(folder, timeout_s)
            except OSError as error:
                failures.append(error)
        # The next cruxrun begins a store in the first folder, if nobody answers in the others.
        weak = (FileNotFoundError, ConnectionRefusedError, FolderError)
        raise next((each for each in failures if not isinstance(each, weak)), failures[0])

    def close(self) -> None:
        """Nothing is left over."""

    def _connect(self, folder: Path, timeout_s: float) -> socket.socket:
        with self._place.opened(folder) as fd:
            connected = socket.socket(socket.AF_UNIX)
            try:
                connected.settimeout(timeout_s)
                connected.connect(_through(fd, self._place.name))
                if not peer_is_trusted(connected, self._place.group):
                    raise StoreError(
                        f"user {peer(connected)[1]} has {folder / self._place.name}", Cause.FOREIGN
                    )
            except BaseException:
                connected.close()
                raise
        return connected


@contextlib.contextmanager
def listening(place: UnixPlace, backlog: int) -> Iterator[tuple[socket.socket, int, Path]]:
    """Yields a new socket at ``place``, a descriptor of its lock, and its path.

    The server inherits both: the lock ends with the last process that has it.

    Raises:
        OSError: the place can't be used; EADDRINUSE if a server has it.
    """
    with contextlib.ExitStack() as stack:
        found: list[tuple[Path, int, int]] = []
        failures: list[OSError] = []
        for folder in place.folders():
            try:
                fd = stack.enter_context(place.opened(folder, make=not found))
                lock = stack.enter_context(_locked(fd, place, make=not found))
            except BlockingIOError:
                raise OSError(errno.EADDRINUSE, f"a server has {folder / place.name}") from None
            except OSError as error:
                failures.append(error)
            else:
                found.append((folder, fd, lock))
        if not found:
            raise failures[0]
        folder, fd, lock = found[0]
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.stat(place.name, dir_fd=fd, follow_symlinks=False).st_mode):
                raise FolderError(f"{folder / place.name} is no socket: remove it")
            os.unlink(place.name, dir_fd=fd)
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        path = _through(fd, place.name)
        listener.bind(path)
        # Nobody can connect before it listens.
        _open_to(path, place.group)
        listener.listen(backlog)
        yield listener, lock, folder / place.name


@contextlib.contextmanager
def _locked(folder: int, place: UnixPlace, *, make: bool) -> Iterator[int]:
    name = f"{place.name}.lock"
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        if not make:
            raise
        fd = os.open(name, flags | os.O_CREAT, 0o600, dir_fd=folder)
        if place.group is not None:
            os.fchown(fd, -1, place.group)
            os.fchmod(fd, 0o660)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            named = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            raise BlockingIOError from None
        if not os.path.samestat(os.fstat(fd), named):
            raise BlockingIOError  # somebody removed the file, and another one made it anew
        yield fd
    finally:
        os.close(fd)


def _open_to(path: str, group: int | None) -> None:
    if group is not None:
        os.chown(path, -1, group)
    os.chmod(path, 0o600 if group is None else 0o660)


async def while_named(serving: Coroutine[Any, Any, None], path: Path | None) -> None:
    """Serve as long as ``path`` (if any) is this server's socket, and remove it at the end.

    The end of a login session may remove its folder. New clients would not find the server then.
    """
    if path is None:
        await serving
        return
    named = _identity(path)
    task = asyncio.ensure_future(serving)
    try:
        while named is not None and _identity(path) == named and not task.done():
            await asyncio.wait([task], timeout=LOOK_S)
        if task.done():
            task.result()
    finally:
        task.cancel()
        # The lock is still held, so what is there now is nobody else's.
        if named is not None and _identity(path) == named:
            path.unlink()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _through(folder: int, name: str) -> str:
    return f"/proc/self/fd/{folder}/{name}"
