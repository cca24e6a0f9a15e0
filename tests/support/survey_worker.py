"""Plays ``crux`` on a host of a simulated network: says hello, and answers tasks.

Its arguments are those of the command, and the environment has the world: SURVEY_LEAVES (the leaf
of each host), SURVEY_DIE (HOST:TASKS after which it ends), SURVEY_SLOW_S (of each task),
SURVEY_RELEASE, SURVEY_GREETING.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import msgspec
from survey_world import SurveyWorld

from crux_torch._version import __version__
from crux_torch.cli.discover import work
from crux_torch.cli.discover.channel import Superior
from crux_torch.network.discover.tasks import Hello, Outcome, Task


def main() -> None:
    env = os.environ
    name = sys.argv[sys.argv.index("--name") + 1]
    index = int(name.removeprefix("h"))
    world = SurveyWorld([int(leaf) for leaf in env["SURVEY_LEAVES"].split(",")])
    dies, _, after = env.get("SURVEY_DIE", "").partition(":")
    done = 0

    def survey(task: Task) -> Iterator[Outcome]:
        nonlocal done
        done += 1
        if dies == name and done > int(after):
            raise SystemExit("it dies")
        time.sleep(float(env.get("SURVEY_SLOW_S", "0")))
        yield from world.results(task)[0]

    if greeting := env.get("SURVEY_GREETING"):
        print(greeting, flush=True)
    hello = Hello(
        rank=index,
        host=world.hosts[index],
        machine=env.get("SURVEY_MACHINE") or f"machine-{index}",
        release=env.get("SURVEY_RELEASE") or __version__,
        inside=msgspec.Raw(b"null"),
        notes=("it is simulated",),
    )
    work(Superior(0, 1), hello, survey)


if __name__ == "__main__":
    main()
