"""An explanation in sentences."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from crux_torch.report.explanation import (
    LARGE_ERROR,
    MEDIAN_ERROR,
    OTHERS,
    Explanation,
    InPlan,
    Rival,
)
from crux_torch.report.live_cluster import LinkLoad
from crux_torch.report.tables import console, say
from crux_torch.schedule.model import Link
from crux_torch.words import age, safe, seconds

#: Shares of a step that are not worth a sentence.
NOTHING = 0.005
#: Rivals, links of one sentence, changes and remedies that are shown.
RIVALS_SHOWN, LINKS_SHOWN, CHANGES_SHOWN, REMEDIES_SHOWN = 8, 4, 3, 3

_ALONE = {
    "measured": "measured while its traffic went first",
    "computed": "computed from its compute time, its bytes and the topology",
    "bound": "at most: it was measured beside other jobs",
}


def render(found: Explanation, now_s: float | None = None) -> None:
    """Print ``found``.

    Args:
        now_s: seconds since 1970; default: now.
    """
    to = console()
    now_s = time.time() if now_s is None else now_s
    for heading, lines in sections(found, now_s):
        say(to, heading, fold=True)
        for line in lines:
            say(to, f"  {line}", indent=4, fold=True)


def sections(found: Explanation, now_s: float) -> Iterator[tuple[str, list[str]]]:
    """Yields headings, and the sentences below each."""
    yield f"{safe(found.job)}: {_headline(found)}", [*_waiting(found)]
    if found.computes_s is not None:
        yield "Who is in the way", [*_rivals(found, now_s)]
        yield "What that does not explain", [*_remainder(found)]
    yield "What the plan does about it", [*_plan(found.plan, now_s)]
    if found.remedies:
        yield "What would help", [*_remedies(found)]
    if found.doubts:
        yield "Take the figures with care", [f"{safe(doubt)}." for doubt in found.doubts]


def _headline(found: Explanation) -> str:
    steps = found.steps
    if found.computes_s is None:
        return f"it is {found.state} and was not measured yet, so nothing is known of its steps."
    if steps.step_s is None:
        return "none of its steps has ended of late, so what they take now is not known."
    text = f"a step takes {seconds(steps.step_s)} now"
    if steps.alone_s is None or steps.alone_source is None:
        return f"{text}."
    text += f", and {seconds(steps.alone_s)} alone ({_ALONE[steps.alone_source]})"
    ratio = steps.slowdown or 1.0
    return (
        f"{text}: {ratio:.2f} times as long."
        if ratio > 1 + NOTHING
        else f"{text}: not slowed down."
    )


def _waiting(found: Explanation) -> Iterator[str]:
    steps = found.steps
    if found.waits_s is None or found.computes_s is None or not steps.step_s:
        return
    waits_alone = ""
    if found.waits_alone_s is not None:
        waits_alone = f"; alone, {seconds(found.waits_alone_s)}"
    measured = f" {age(steps.alone_age_s)} ago" if steps.alone_age_s is not None else ""
    yield (
        f"Of each step, {seconds(found.waits_s)} ({found.waits_s / steps.step_s:.0%}) is waiting "
        f"for the network{waits_alone}. "
        f"The rest is computation: {seconds(found.computes_s)}, as measured{measured}."
    )


def _rivals(found: Explanation, now_s: float) -> Iterator[str]:
    if not found.rivals:
        yield "No other job that Crux knows sends over these links, as far as paths are known."
        return
    for rival in found.rivals[:RIVALS_SHOWN]:
        yield _about_rival(rival, found, now_s)
    if (more := len(found.rivals) - RIVALS_SHOWN) > 0:
        yield f"{more} more jobs send over these links."
    if found.links:
        yield _about_load(found.links, found.links[0][1])
    if len(found.rivals) > 1:
        yield (
            "Costs need not add up: where two jobs are in the way for the same time, removing one "
            "gains nothing."
        )


def _about_rival(rival: Rival, found: Explanation, now_s: float) -> str:
    name = _name(rival.job)
    name = name[0].upper() + name[1:] if not rival.job else name
    where = f"{name}, on {_links(rival.links)}: "
    cost = "what it costs was not played"
    if found.played_s is None and rival.without_s is not None:
        cost = f"without it a step would take {seconds(rival.without_s)}; with it, none ends"
    if rival.costs_s is not None and rival.costs_share is not None and rival.without_s is not None:
        cost = f"it costs {seconds(abs(rival.costs_s))} of each step ({rival.costs_share:.0%})"
        if abs(rival.costs_share) < NOTHING:
            cost = "it costs no time"
        elif rival.costs_share < 0:
            cost = f"without it a step would take {seconds(-rival.costs_s)} longer"
    level = found.plan.level if found.plan is not None else None
    order = ""
    if level is not None:
        order = "; its traffic shares this job's level"
        if rival.level != level:
            first = rival.level > level
            order = f"; its traffic goes {'before' if first else 'after'} this job's"
            order += f" (level {rival.level} against {level})"
    since = ""
    if rival.since_s is not None:
        ago = age(max(0.0, now_s - rival.since_s))
        since = f"; sharing these links since {_at(rival.since_s)} ({ago} ago)"
    return f"{where}{cost}{order}{since}."


def _about_load(links: Sequence[tuple[Link, LinkLoad]], load: LinkLoad) -> str:
    alike = [link for link, other in links if other.jobs == load.jobs]
    text = f"To run as fast as alone, the jobs on {_links(alike)} would together need "
    text += f"{load.planned_ratio:.0%} of {'each' if len(alike) > 1 else 'the'} link's capacity"
    if load.now_Bps is not None:
        text += f"; they use {load.now_Bps / load.capacity_Bps:.0%} now"
    return text + "."


def _remainder(found: Explanation) -> Iterator[str]:
    step_s, played_s = found.steps.step_s, found.played_s
    if step_s is None or not played_s or found.played_alone_s is None:
        if found.played_alone_s is not None and not played_s:
            yield "In the simulator this job starves: no step ends while the other jobs send."
        else:
            yield "Unknown: this needs a measured step, and a job that the simulator can play."
        return
    error = played_s / step_s - 1.0
    text = (
        f"The simulator predicts steps of {seconds(played_s)} beside the jobs that Crux knows, and "
        f"of {seconds(found.played_alone_s)} alone. "
    )
    usual = (
        f"the simulator's usual error (median {MEDIAN_ERROR:.1%}, 9 of 10 steps within "
        f"{LARGE_ERROR:.0%})."
    )
    if error < -LARGE_ERROR:
        yield (
            f"{text}The measured step is {seconds(step_s - played_s)} ({-error:.0%}) longer. That "
            f"is more than {usual} Something else slows the job down: traffic of no job that Crux "
            "knows, or a host that computes or loads data more slowly than when the job was "
            "measured."
        )
    elif error > LARGE_ERROR:
        yield (
            f"{text}The measured step is {seconds(played_s - step_s)} shorter. That is more than "
            f"{usual}"
        )
    else:
        yield f"{text}The measured step differs by {abs(error):.1%}, which is within {usual}"
    if found.scale != 1.0:
        yield "The costs above are scaled to the measured step."


def _plan(plan: InPlan | None, now_s: float) -> Iterator[str]:
    if plan is None:
        yield "No plan has this job: it keeps the network's defaults."
        return
    author = f" by {safe(plan.author)}" if plan.author else ""
    since = ""
    if plan.since_s is not None:
        since = f", made at {_at(plan.since_s)} ({age(max(0.0, now_s - plan.since_s))} ago)"
    why = f", because {safe('; '.join(plan.why))}" if plan.why else ""
    yield f"Plan {plan.epoch}{author}, policy {safe(plan.policy)}{since}{why}."
    if plan.level is None:
        yield "The job's traffic has no priority level (crux status says why)."
    else:
        yield f"The job's traffic has level {plan.level}; a higher level goes first."
    if not plan.paths:
        yield "The job has no planned paths: there is only one, or the network's hash chooses."
    for start, routers, end in plan.paths[:LINKS_SHOWN]:
        yield f"{safe(start)} reaches {safe(end)} over {safe(', '.join(routers) or 'any router')}."
    if (more := len(plan.paths) - LINKS_SHOWN) > 0:
        yield f"{more} more pairs of hosts have a planned path."
    if plan.paths and plan.seen is not None:
        total = plan.seen.as_planned + plan.seen.elsewhere + plan.seen.unknown
        yield f"{plan.seen.as_planned} of {total} connections were seen on their planned path."
    for at_s, change in plan.changes[:CHANGES_SHOWN]:
        yield f"Changed at {_at(at_s)}: {safe(change)}."
    if plan.verdict:
        yield f"Trial against the safe plan: {safe(plan.verdict)}."


def _remedies(found: Explanation) -> Iterator[str]:
    remedies, busy = found.remedies, found.busy
    in_force = found.plan.policy if found.plan is not None else ""
    useful = [r for r in remedies if r.change is not None and r.change < -NOTHING]
    useful.sort(key=lambda r: (r.change or 0.0, -r.busy))
    for remedy in useful[:REMEDIES_SHOWN]:
        policy = f"the policy {remedy.scheduler}"
        if remedy.scheduler == in_force:
            policy = f"another plan of {policy}"
        text = f"Under {policy} a step would take {seconds(remedy.step_s)} ({remedy.change:+.0%})"
        if busy is not None:
            text += (
                f", and the jobs that share links would keep {remedy.busy:.1%} of their devices "
                f"computing instead of {busy:.1%}"
            )
        yield f"{text}."
    if not useful:
        names = ", ".join(remedy.scheduler for remedy in remedies)
        yield f"No other schedule makes the job's steps shorter (played: {names})."
    elif busy is not None and all(remedy.busy < busy for remedy in useful):
        yield "Each of these costs the other jobs more than it gives this job."


def _links(links: Sequence[Link]) -> str:
    shown = ", ".join(map(safe, links[:LINKS_SHOWN]))
    more = len(links) - LINKS_SHOWN
    return f"{shown} and {more} more links" if more > 0 else shown


def _name(job: str) -> str:
    return safe(job) if job else OTHERS


def _at(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(at_s))
