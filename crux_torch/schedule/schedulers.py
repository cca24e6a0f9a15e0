"""The schedulers by name: what the simulator and, of them, ``--crux-policy`` choose from."""

from __future__ import annotations

from crux_torch.schedule.default.crux import crux, crux_first
from crux_torch.schedule.model import Scheduler
from crux_torch.schedule.papers.baselines import ecmp, ideal, sincronia, taccl, varys
from crux_torch.schedule.papers.cassini import cassini
from crux_torch.schedule.papers.crux import crux_pa, crux_paper, crux_ps_pa
from crux_torch.schedule.papers.mlcc import mlcc
from crux_torch.schedule.papers.mltcp import mltcp
from crux_torch.settings import LIVE_POLICIES

#: All schedulers; the simulator can play each of them.
SCHEDULERS: dict[str, Scheduler] = {
    "crux": crux,
    "crux-paper": crux_paper,
    "crux-pa": crux_pa,
    "crux-ps-pa": crux_ps_pa,
    "sincronia": sincronia,
    "varys": varys,
    "taccl": taccl,
    "cassini": cassini,
    "mlcc": mlcc,
    "mltcp": mltcp,
    "ecmp": ecmp,
    "ideal": ideal,
}

#: Schedulers for traces of days, which are too long for rates that change each few milliseconds.
IN_TRACES = {name: each for name, each in SCHEDULERS.items() if name not in ("mlcc", "mltcp")}

#: Schedulers whose decisions a running cluster can carry out.
LIVE: dict[str, Scheduler] = {name: SCHEDULERS[name] for name in LIVE_POLICIES}

#: The policy of a running cluster while a slower one decides: its name, and its scheduler.
FIRST_NAME: dict[str, str] = {"crux": "crux-first"}
FIRST: dict[str, Scheduler] = {"crux-first": crux_first}
