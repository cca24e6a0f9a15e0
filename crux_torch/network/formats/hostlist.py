"""Slurm's host lists: ``tux[0-3,12],login`` stands for six names (``man slurm.conf``)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import product

from crux_torch.network.topology import MAX_NODES, TopologyError

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)", re.DOTALL)
#: The longest number in a range; longer ones are no number of a node.
MAX_DIGITS = 18


def expand(text: str) -> list[str]:
    """Returns the names that a host list stands for, in its order.

    Raises:
        TopologyError: it is no host list, or stands for over ``MAX_NODES`` names.
    """
    names: list[str] = []
    for entry in _entries(text):
        parts = [_choices(match, text) for match in _matches(entry, text)]
        count = 1
        for part in parts:
            count *= len(part)
            if len(names) + count > MAX_NODES:
                raise TopologyError(f"host list {text[:80]!r} stands for over {MAX_NODES} names")
        names += ("".join(chosen) for chosen in product(*parts))
    return names


def compress(names: Iterable[str]) -> str:
    """Returns a host list for ``names``: those that differ in one number share brackets."""
    groups: dict[tuple[str, str, bool], list[str]] = {}
    for name in dict.fromkeys(names):
        match = _NUMBERED.fullmatch(name)
        prefix, digits, suffix = match.groups() if match else (name, "", "")
        if len(digits) > MAX_DIGITS:
            prefix, digits, suffix = name, "", ""
        groups.setdefault((prefix, suffix, bool(digits)), []).append(digits)
    return ",".join(
        f"{prefix}{_brackets(digits)}{suffix}" for (prefix, suffix, _), digits in groups.items()
    )


def _entries(text: str) -> Iterator[str]:
    """Split at the commas outside of brackets."""
    for entry in re.findall(r"(?:\[[^\]]*\]?|[^,\[])+", text):
        if entry.strip():
            yield entry.strip()


def _matches(entry: str, text: str) -> list[re.Match[str]]:
    matches = list(_PART.finditer(entry))
    if sum(len(match[0]) for match in matches) != len(entry) or len(matches) > 16:
        raise TopologyError(f"{text[:80]!r} is no host list; expected one such as node[1-8,12]")
    return matches


def _choices(match: re.Match[str], text: str) -> list[str]:
    """Returns the names that one part of an entry may be."""
    if match[1] is None:
        return [match[2]]
    chosen: list[str] = []
    for item in match[1].split(","):
        pair = _RANGE.fullmatch(item.strip())
        if pair is None or max(map(len, pair.group(1, 2) if pair[2] else [pair[1]])) > MAX_DIGITS:
            raise TopologyError(f"{text[:80]!r}: {item[:40]!r} is no number or range")
        first, last = int(pair[1]), int(pair[2] or pair[1])
        if last < first or last - first >= MAX_NODES - len(chosen):
            raise TopologyError(f"{text[:80]!r}: {item[:40]!r} is empty or over {MAX_NODES} names")
        chosen += (str(number).zfill(len(pair[1])) for number in range(first, last + 1))
    return chosen


def _brackets(digits: list[str]) -> str:
    """Returns numbers as ranges; names of different widths (9 and 010) are no range."""
    if len(digits) == 1:
        return digits[0]
    ranges: list[list[str]] = []
    for text in sorted(digits, key=lambda d: (len(d), d)):
        last = ranges[-1][-1] if ranges else ""
        if last and int(text) == int(last) + 1 and _follows(last, text):
            ranges[-1][1:] = [text]
        else:
            ranges.append([text])
    return f"[{','.join('-'.join(each) for each in ranges)}]"


def _follows(last: str, text: str) -> bool:
    """True if Slurm writes ``text`` after ``last`` in one range that may be padded by zeros."""
    return len(last) == len(text) or (last[0] != "0" and text[0] != "0")
