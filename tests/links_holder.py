"""A process of another job on a link: enters when told to, until its input ends.

Lines in: ``enter``, ``leave``, ``level N``; each is answered by ``ok``.
"""

from __future__ import annotations

import sys

import torch  # noqa: F401 - the extension needs its libraries

from crux_torch import _C


def main() -> None:
    folder, link, job, level = sys.argv[1:]
    gate = _C.link_gate()
    gate.cross(0, [gate.join(folder, "c", link, job)])
    gate.set_level(int(level))
    tickets = []
    print("ok", flush=True)
    for line in sys.stdin:
        word, _, rest = line.partition(" ")
        if word.strip() == "enter":
            tickets.append(gate.enter(0, 1 << 20))
        elif word.strip() == "leave":
            gate.leave(tickets.pop())
        else:
            gate.set_level(int(rest))
        print("ok", flush=True)
    gate.retire()


if __name__ == "__main__":
    main()
