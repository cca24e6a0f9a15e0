"""Keys in the order of their last change, so that a reader gets what changed since its last look.

Pure: no clock, no input. Both the embedded store and the mirror of an etcd keep one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from crux_torch.store.frames import change_size

#: Deleted keys that are remembered; who last looked before the oldest reads everything anew.
MAX_DELETED = 10_000


class Journal:
    """Values by key. Each change has a revision, one above the last."""

    def __init__(self) -> None:
        self.revision = 0
        self._values: OrderedDict[str, tuple[int, bytes]] = OrderedDict()
        self._deleted: OrderedDict[str, int] = OrderedDict()
        #: Up to this revision deletions are forgotten.
        self._forgotten = 0

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        """The keys, the one that did not change for the longest time first."""
        return iter(self._values)

    def get(self, key: str) -> bytes | None:
        """The value of ``key``."""
        found = self._values.get(key)
        return None if found is None else found[1]

    def set(self, key: str, value: bytes) -> None:
        """Change ``key``."""
        self.revision += 1
        self._values[key] = self.revision, value
        self._values.move_to_end(key)
        self._deleted.pop(key, None)

    def delete(self, key: str) -> None:
        """Remove ``key`` if it is there."""
        if self._values.pop(key, None) is None:
            return
        self.revision += 1
        self._deleted[key] = self.revision
        if len(self._deleted) > MAX_DELETED:
            _, self._forgotten = self._deleted.popitem(last=False)

    def changes(
        self, key: str, prefix: bool, since: int, limit_bytes: int
    ) -> tuple[int, list[tuple[str, bytes | None]], bool, bool]:
        """What changed after revision ``since`` of ``key``, or of all that begin with it.

        Returns:
            the revision up to which this is all, the values (None: deleted), whether there is
            more, and whether what was read before counts no longer.
        """
        if since == self.revision:
            return since, [], False, False
        anew = since == 0 or since < self._forgotten or since > self.revision
        if anew:
            since = 0
        if not prefix:
            at, value = self._values.get(key, (0, None))
            at = at or self._deleted.get(key, 0)
            changed = anew or at > since
            return self.revision, [(key, value)] if changed else [], False, anew
        found: list[tuple[int, str, bytes | None]] = []
        for name in reversed(self._values):
            at, value = self._values[name]
            if at <= since:
                break
            if name.startswith(key):
                found.append((at, name, value))
        if not anew:
            for name in reversed(self._deleted):
                at = self._deleted[name]
                if at <= since:
                    break
                if name.startswith(key):
                    found.append((at, name, None))
        found.sort(key=lambda change: change[0])
        page: list[tuple[str, bytes | None]] = []
        size = 0
        for at, name, value in found:
            page.append((name, value))
            size += change_size(name, value)
            if size >= limit_bytes:
                return at, page, at != found[-1][0], anew
        return self.revision, page, False, anew
