"""A client's view of one key or prefix, and its bounds."""

from __future__ import annotations

from crux_torch.errors import StoreTooLarge
from crux_torch.store.frames import PAGE_BYTES, Changes, Read, page_size
from crux_torch.store.shared_store import KEY_BYTES, MAX_STORE_BYTES, MAX_STORE_KEYS, encoded_size


class Look:
    """The values of one key or prefix, up to ``revision``.

    Args:
        limit_bytes: of the values and keys that it may hold.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.revision = 0
        #: As they were when the last page had come: whoever looked before keeps what he was given.
        self.values: dict[str, bytes] = {}
        #: As they are with the pages that have come, if there are some.
        self._coming: dict[str, bytes] | None = None
        self._limit_bytes = limit_bytes
        self._held_bytes = self._counted_bytes = 0

    def take(self, changes: Changes, about: Read) -> int:
        """Take in one page; return its bytes.

        Raises:
            ValueError: no server of ours sends it.
            StoreTooLarge: it is more than the limit.
        """
        size = page_size(changes.values)
        if changes.more and (size < PAGE_BYTES or changes.revision <= about.since):
            raise ValueError("a page that says that there is more without a reason")
        if changes.anew:
            self._coming, self._held_bytes, self._counted_bytes = {}, 0, 0
        elif self._coming is None and changes.values:
            self._coming = dict(self.values)
        values = self._coming
        for key, value in changes.values:
            fits = key.startswith(about.key) if about.prefix else key == about.key
            if not fits:
                raise ValueError(f"an answer about {key[:80]!r}, not {about.key!r}")
            assert values is not None
            before = values.pop(key, None)
            if before is not None:
                self._count(key, before, -1)
            if value is not None:
                values[key] = value
                self._count(key, value, 1)
        if values is not None:
            if len(values) > MAX_STORE_KEYS or self._counted_bytes > MAX_STORE_BYTES:
                raise ValueError(
                    f"{len(values)} keys and {self._counted_bytes >> 20} MiB under {about.key!r}, "
                    "more than a store holds"
                )
            if self._held_bytes > self._limit_bytes:
                raise StoreTooLarge(f"{self._held_bytes} bytes under {about.key!r}")
        self.revision = changes.revision
        if not changes.more and values is not None:
            self.values, self._coming = values, None
        return size

    def _count(self, key: str, value: bytes, sign: int) -> None:
        size = encoded_size(key) + len(value)
        self._held_bytes += sign * size
        self._counted_bytes += sign * (KEY_BYTES + size)
