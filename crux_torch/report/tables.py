"""Results of commands: JSON without infinity, tables in as many blocks as fit, and path maps."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import msgspec
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from crux_torch.network.discover.hashes import Checked, Polarised, SwitchHash
from crux_torch.network.probe.packets import Hops
from crux_torch.network.probe.prober import PathMap
from crux_torch.network.topology import Topology

#: Line width without COLUMNS and without a terminal.
WIDTH = 80
#: Largest share of the width for a column of text in a table that is too wide.
TEXT_SHARE = 0.3
#: Letters between two cells, and at the two ends of a line.
_BETWEEN, _ENDS = 3, 4
#: Ports in a row of a path table, and in its footnote.
EXAMPLES = 6
PORTS_LISTED = 100


def json_text(value: Any) -> str:
    """Returns plain values as JSON with a line for each field, and null for infinity."""
    return json.dumps(bounded(value), indent=1, allow_nan=False) + "\n"


def bounded(value: Any) -> Any:
    """Returns ``value`` with None for each number that is infinite, or NaN.

    The intensity of a job without traffic is infinite; plans hold the largest float for it.
    """
    if isinstance(value, float):
        # False for NaN, too.
        return value if abs(value) < sys.float_info.max else None
    if isinstance(value, Mapping):
        return {key: bounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [bounded(each) for each in value]
    return value


def console(file: IO[str] | None = None, width: int | None = None) -> Console:
    """Returns a console as wide as COLUMNS or the terminal says, without colour if NO_COLOR.

    Args:
        file: default: standard output.
        width: default: by the environment.
    """
    made = Console(file=file, width=width, highlight=False)
    if width is None and not made.is_terminal:
        columns = os.environ.get("COLUMNS", "")
        made.width = int(columns) if columns.isdecimal() and int(columns) > 0 else WIDTH
    return made


def say(
    to: Console, text: str, *, indent: int = 0, start: int = 0, style: str = "", fold: bool = False
) -> None:
    """Print a line of prose: a terminal gets it in lines of whole words, a file in one.

    Args:
        indent: of the lines after the first.
        start, style: number of letters at the start, and their style.
        fold: True to fold lines in a file, too.
    """
    if to.is_terminal or fold:
        words = textwrap.TextWrapper(to.width, break_long_words=False, break_on_hyphens=False)
        words.subsequent_indent = " " * min(indent, to.width // 2)
        text = "\n".join(words.wrap(text))
    line = Text(text)
    line.stylize(style, 0, start)
    to.print(line, soft_wrap=True)


@dataclass(frozen=True)
class Grid:
    """A table's content.

    Attributes:
        rows: the cells of each row by heading; all rows have the same headings.
        text: headings of columns of text, whose cells may be folded; the others are numbers.
        title: printed above it, if any.
        keys: number of columns that identify a row; each block begins with them.
    """

    rows: Sequence[Mapping[str, str]]
    text: Sequence[str] = ()
    title: str = ""
    keys: int = 1

    def print(self, to: Console) -> None:
        """Print the table in as many blocks as the width of ``to`` needs."""
        if self.title:
            to.print(Text(self.title, style="italic"))
        for block in self._blocks(to.width):
            to.print(self._table(block))

    def _blocks(self, width: int) -> Iterator[dict[str, int]]:
        """Headings and widths of the columns of each block."""
        natural = {heading: self._width(heading) for heading in self.rows[0]}
        least = dict(natural)
        if _total(natural) > width:
            for heading in natural.keys() & set(self.text):
                share = max(int(TEXT_SHARE * width), cell_len(heading))
                least[heading] = min(natural[heading], share)
        headings = list(natural)
        keys = {heading: least[heading] for heading in headings[: self.keys]}
        block = dict(keys)
        for heading in headings[self.keys :]:
            if len(block) > len(keys) and _total({**block, heading: least[heading]}) > width:
                yield _widened(block, natural, width)
                block = dict(keys)
            block[heading] = least[heading]
        yield _widened(block, natural, width)

    def _width(self, heading: str) -> int:
        return max(cell_len(heading), *(cell_len(row[heading]) for row in self.rows))

    def _table(self, block: Mapping[str, int]) -> Table:
        table = Table()
        for heading, width in block.items():
            side = "left" if heading in self.text else "right"
            table.add_column(Text(heading), justify=side, overflow="fold", width=width)  # type: ignore[arg-type]
        for row in self.rows:
            table.add_row(*(Text(row[heading]) for heading in block))
        return table


def _widened(block: Mapping[str, int], natural: Mapping[str, int], width: int) -> dict[str, int]:
    """The widths of ``block``, with the room that is left given to columns that need more."""
    given = dict(block)
    for heading in block:
        room = max(0, width - _total(given))
        given[heading] = min(natural[heading], given[heading] + room)
    return given


def _total(widths: Mapping[str, int]) -> int:
    """Letters in a line of these columns."""
    return sum(widths.values()) + _BETWEEN * (len(widths) - 1) + _ENDS


@dataclass(frozen=True, slots=True)
class PathTable:
    """Contents of a probe's report.

    Attributes:
        topology: gives switches their names; None: addresses.
        via: nodes or addresses that a path must pass, all of them.
    """

    found: PathMap
    topology: Topology | None = None
    via: tuple[str, ...] = ()

    def rows(self) -> list[tuple[str, Hops, tuple[int, ...]]]:
        """Returns (number, hops, ports) of the paths over all of ``via``; ``?``: partly seen."""
        groups = [(str(i), *group) for i, group in enumerate(self.found.paths.items(), start=1)]
        groups += [("?", *group) for group in self.found.partial.items()]
        return [group for group in groups if self._passes(group[1])]

    def ports_via(self) -> tuple[int, ...]:
        """Returns the source ports whose path passes all of ``via``, ascending."""
        return tuple(sorted(p for p, hops in self.found.hops.items() if self._passes(hops)))

    def _passes(self, hops: Hops) -> bool:
        answers = {address for _, address in hops}
        return all(answers & addresses_of(name, self.topology) for name in self.via)


def addresses_of(name: str, topology: Topology | None) -> frozenset[str]:
    """Returns the addresses of a node of the topology; any other name is an address itself."""
    known = topology.addresses.get(name) if topology is not None else None
    return frozenset(known) if known else frozenset({name})


def as_json_text(report: PathTable, more: Mapping[str, Any] | None = None) -> str:
    """Returns ``report`` as JSON; the map keeps its schema under ``map``.

    Args:
        more: further fields, as plain values.
    """
    found, topology = report.found, report.topology
    fields: dict[str, Any] = {
        "map": msgspec.to_builtins(found, str_keys=True),
        "paths": [
            {
                "hops": [
                    {"ttl": ttl, "address": address, "node": name if name != address else None}
                    for (ttl, address), name in zip(hops, found.names(hops, topology), strict=True)
                ],
                "ports": list(ports),
            }
            for hops, ports in (*found.paths.items(), *found.partial.items())
        ],
    }
    if report.via:
        fields["via"] = {"nodes": list(report.via), "ports": list(report.ports_via())}
    return json_text({**fields, **(more or {})})


def render(report: PathTable) -> None:
    """Print ``report``: a row for each path, its evidence, and warnings."""
    to = console()
    found = report.found
    title = f"{found.source} to {found.destination}, {found.protocol} port {found.port}"
    if found.distance is not None:
        title += f", {found.distance - 1} routers on the way"
    say(to, title)
    rows = []
    for number, hops, ports in report.rows():
        way = " > ".join(found.names(hops, report.topology)) or "no router on the way"
        share = f"{100 * len(ports) / len(found.hops):.0f}%"
        more = ["..."] if len(ports) > EXAMPLES else []
        examples = ", ".join([*map(str, ports[:EXAMPLES]), *more])
        counts = {"ports": str(len(ports)), "share": share, "source ports": examples}
        rows.append({"path": number, "hops": way, **counts})
    if rows:
        Grid(rows, text=("hops", "source ports")).print(to)
    for line in _footnotes(report):
        say(to, line)


def _footnotes(report: PathTable) -> list[str]:
    found = report.found
    lines = [
        f"{len(found.hops)} ports, {found.sent} probes, {found.answered} answers, "
        f"{found.seconds:.1f} s; the probability that a path with an equal share is missing is at "
        f"most {1 - found.confidence:.1%}"
    ]
    if found.ended == "time":
        lines.append("the time limit ended the search, so there may be more paths: see --time")
    if found.ended == "ports":
        lines.append("every source port was probed")
    if found.changed:
        lines.append(
            f"do not rely on this table: {found.changed} of {found.repeated} ports took another "
            "path when they were probed again, so the source port does not decide the path here "
            "(packet spraying, IPv6 flow labels, or a change of routes)"
        )
    if found.partial:
        count = sum(map(len, found.partial.values()))
        lines.append(
            f"{count} ports got no answer (*) from a hop that answered for other ports: their path "
            "crosses a silent router, or answers were lost; the probability does not cover them"
        )
    if found.silent:
        lines.append(f"nobody answered at TTL {', '.join(map(str, found.silent))} (*)")
    if found.inferred:
        ttls = ", ".join(map(str, found.inferred))
        lines.append(
            f"TTL {ttls} answers slowly and was asked about some ports only: for the others its "
            "answer follows from the hops before it"
        )
    ports = report.ports_via() if report.via else ()
    if ports:
        more = f", and {len(ports) - PORTS_LISTED} more" if len(ports) > PORTS_LISTED else ""
        lines.append(
            f"{len(ports)} ports via {' and '.join(report.via)}: "
            f"{', '.join(map(str, ports[:PORTS_LISTED]))}{more}"
        )
    return lines


#: Names of equal hashes in a cell.
_NAMED = 2


def hashes_as_dict(
    found: Sequence[SwitchHash], checked: Sequence[Checked], polarised: Sequence[Polarised]
) -> dict[str, Any]:
    """Returns what was found as plain values for JSON."""
    return {
        "switches": [
            {
                "switch": switch,
                "verdict": fit.verdict,
                "reason": fit.reason or None,
                "families": list(fit.families),
                "selection": fit.selection or None,
                "coincidence": fit.coincidence,
                "next_hops": list(fit.next_hops),
                "choices": fit.choices,
                "accuracy": fit.accuracy,
                "chance": fit.chance,
            }
            for switch, fit in found
        ],
        "checked": [each._asdict() for each in checked],
        "polarised": [each._asdict() for each in polarised],
    }


def render_hashes(
    to: Console,
    found: Sequence[SwitchHash],
    checked: Sequence[Checked],
    polarised: Sequence[Polarised],
) -> None:
    """Print a row for each switch that has a choice, and what follows from it."""
    rows = []
    for switch, fit in found:
        tested = fit.verdict == "explained"
        rows.append(
            {
                "switch": switch,
                "next hops": str(len(fit.next_hops)),
                "ports": str(fit.choices),
                "hash": _hash_cell(fit.families, fit.selection) if tested else fit.verdict,
                "right": f"{fit.accuracy:.1%}" if tested else "-",
                "by chance": f"{fit.chance:.0e}" if tested else "-",
            }
        )
    if not rows:
        say(to, "no switch that answered has more than one next hop, so there is no hash to find")
        return
    Grid(rows, text=("switch", "hash")).print(to)
    for switch, fit in found:
        if fit.reason:
            say(to, f"{switch}: {fit.reason}")
        elif fit.families and fit.coincidence > 0.01:
            say(
                to,
                f"{switch}: its ports can be computed, but its hash may be another one: of linear "
                f"hashes of other names, {fit.coincidence:.1%} give these choices",
            )
    for switch, asked, right in checked:
        say(to, f"{switch}: {asked} computed ports were probed, {right} of them took their path")
    for each in polarised:
        say(
            to,
            f"polarised: of {each.known} next hops, {each.switch} uses {each.used} for flows from "
            f"{each.before}, as if both had one hash (by chance: {each.chance:.0e}); give each "
            "tier a hash seed of its own",
        )


def _hash_cell(families: Sequence[str], selection: str) -> str:
    if not families:
        return "linear, of unknown name"
    more = [f"{len(families) - _NAMED} more"] if len(families) > _NAMED else []
    return f"{' or '.join([*families[:_NAMED], *more])}, {selection}"
