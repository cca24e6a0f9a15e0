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
    "measured": "measured while this job had priority",
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
        yield "Does that explain the step?", [*_remainder(found)]
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
    measured = f" (measured {age(steps.alone_age_s)} ago)" if steps.alone_age_s is not None else ""
    yield (
        f"Of {seconds(steps.step_s)}, {seconds(found.waits_s)} "
        f"({found.waits_s / steps.step_s:.0%}) is waiting for the network, and "
        f"{seconds(found.computes_s)} is computation{measured}."
    )
    if found.waits_alone_s is not None:
        yield f"Alone, the job waits for {seconds(found.waits_alone_s)}."


def _rivals(found: Explanation, now_s: float) -> Iterator[str]:
    if not found.rivals:
        yield "No other job that Crux knows sends over this job's links, as far as paths are known."
        return
    before: Sequence[Link] = ()
    for rival in found.rivals[:RIVALS_SHOWN]:
        where = "the same links" if rival.links == before else _links(rival.links)
        yield _about_rival(rival, where, found, now_s)
        before = rival.links
    if (more := len(found.rivals) - RIVALS_SHOWN) > 0:
        yield f"{more} more jobs send over this job's links."
    if any(rival.costs_s is not None for rival in found.rivals):
        scaled = ", scaled to the measured step" if found.scale != 1.0 else ""
        yield (
            f"Each figure is the gain from removing that job alone, as simulated{scaled}. The "
            "figures need not add up."
        )
    if found.links:
        yield _about_load(found.links, before)


def _about_rival(rival: Rival, where: str, found: Explanation, now_s: float) -> str:
    name = _name(rival.job)
    name = name[0].upper() + name[1:] if not rival.job else name
    cost = "was not simulated"
    if found.played_s is None and rival.without_s is not None:
        cost = f"with it no step ends; without it a step would take {seconds(rival.without_s)}"
    if rival.costs_s is not None and rival.costs_share is not None and rival.without_s is not None:
        cost = f"adds {seconds(abs(rival.costs_s))} ({rival.costs_share:.0%}) to each step"
        if abs(rival.costs_share) < NOTHING:
            cost = "adds nothing to a step"
        elif rival.costs_share < 0:
            cost = f"shortens each step by {seconds(-rival.costs_s)}"
    level = found.plan.level if found.plan is not None else None
    order = ""
    if level is not None:
        order = "; same priority as this job"
        if rival.level != level:
            order = f"; {'higher' if rival.level > level else 'lower'} priority than this job"
            order += f" (level {rival.level} against {level})"
    since = ""
    if rival.since_s is not None:
        ago = age(max(0.0, now_s - rival.since_s))
        since = f"; here since {_at(rival.since_s)} ({ago} ago)"
    return f"{name}, on {where}: {cost}{order}{since}."


def _about_load(links: Sequence[tuple[Link, LinkLoad]], named: Sequence[Link]) -> str:
    load = links[0][1]
    alike = [link for link, other in links if other.jobs == load.jobs]
    where = "these links" if set(alike) == set(named) else _links(alike)
    text = f"To run as fast as alone, all jobs on {where} together would need "
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
    predicts = (
        f"the simulator predicts {seconds(played_s)} beside the jobs that Crux knows, and "
        f"{seconds(found.played_alone_s)} alone"
    )
    usual = (
        f"The simulator's error is {MEDIAN_ERROR:.1%} in the median, and below {LARGE_ERROR:.0%} "
        "for 9 of 10 steps."
    )
    if error < -LARGE_ERROR:
        yield (
            f"Not all of it: {predicts}. The measured step is {seconds(step_s - played_s)} "
            f"({-error:.0%}) longer. {usual} Something else slows the job down: traffic of no job "
            "that Crux knows, or a host that computes or loads data more slowly than when the job "
            "was measured."
        )
    elif error > LARGE_ERROR:
        yield (
            f"Not well: {predicts}. The measured step is {seconds(played_s - step_s)} shorter. "
            f"{usual}"
        )
    else:
        yield f"Yes: {predicts}. The measured step differs by {abs(error):.1%}. {usual}"


def _plan(plan: InPlan | None, now_s: float) -> Iterator[str]:
    if plan is None:
        yield "No plan has this job: it keeps the network's defaults."
        return
    author = f" by job {safe(plan.author)}" if plan.author else ""
    since = ""
    if plan.since_s is not None:
        since = f" at {_at(plan.since_s)} ({age(max(0.0, now_s - plan.since_s))} ago)"
    why = f", because {safe('; '.join(plan.why))}" if plan.why else ""
    yield f"Plan {plan.epoch} (policy {safe(plan.policy)}) was made{author}{since}{why}."
    if plan.level is None:
        yield "This job's traffic has no priority level (crux status says why)."
    else:
        yield f"This job has priority level {plan.level}; a higher level goes first."
    pairs = _both_ways(plan.paths)
    if not pairs:
        yield "This job has no planned paths: there is only one, or the network's hash chooses."
    for pair, routers in pairs[:LINKS_SHOWN]:
        yield f"{safe(pair)} over {safe(', '.join(routers) or 'any router')}."
    if (more := len(pairs) - LINKS_SHOWN) > 0:
        yield f"{more} more pairs of hosts have a planned path."
    if plan.paths and plan.seen is not None:
        total = plan.seen.as_planned + plan.seen.elsewhere + plan.seen.unknown
        yield f"{plan.seen.as_planned} of {total} connections were seen on their planned path."
    for at_s, change in plan.changes[:CHANGES_SHOWN]:
        yield f"Changed at {_at(at_s)}: {safe(change)}."
    if plan.verdict:
        yield f"Trial against the safe plan: {safe(plan.verdict)}."


def _both_ways(
    paths: Sequence[tuple[str, tuple[str, ...], str]],
) -> list[tuple[str, tuple[str, ...]]]:
    """Returns ("a -> b", routers), or ("a <-> b", routers) where the way back is the same one."""
    left = dict.fromkeys(paths)
    found = []
    while left:
        start, routers, end = path = next(iter(left))
        del left[path]
        back = (end, routers[::-1], start)
        found.append((f"{start} {'<->' if back in left else '->'} {end}", routers))
        left.pop(back, None)
    return found


def _remedies(found: Explanation) -> Iterator[str]:
    remedies, busy = found.remedies, found.busy
    in_force = found.plan.policy if found.plan is not None else ""
    useful = [r for r in remedies if r.change is not None and r.change < -NOTHING]
    useful.sort(key=lambda r: (r.change or 0.0, -r.busy))
    alike: dict[str, list[str]] = {}
    for remedy in useful:
        effect = f"a step would take {seconds(remedy.step_s)} ({remedy.change:+.0%})"
        if busy is not None:
            effect += (
                f", and the GPUs of all jobs that share links would compute {remedy.busy:.1%} of "
                f"the time instead of {busy:.1%}"
            )
        policy = f"another plan of {in_force}" if remedy.scheduler == in_force else remedy.scheduler
        alike.setdefault(effect, []).append(policy)
    for effect, policies in list(alike.items())[:REMEDIES_SHOWN]:
        yield f"Under {' or '.join(policies)} {effect}."
    if not useful:
        names = ", ".join(remedy.scheduler for remedy in remedies)
        yield f"No other policy makes this job's steps shorter (simulated: {names})."
        return
    # As many digits as the sentences above show.
    if busy is not None and all(round(remedy.busy, 3) < round(busy, 3) for remedy in useful):
        yield "Each of these costs the other jobs more than it gives this job."
    yield "The policy is set when jobs start: cruxrun --crux-policy, the same for all jobs."


def _links(links: Sequence[Link]) -> str:
    shown = ", ".join(map(safe, links[:LINKS_SHOWN]))
    more = len(links) - LINKS_SHOWN
    return f"{shown} and {more} more links" if more > 0 else shown


def _name(job: str) -> str:
    return safe(job) if job else OTHERS


def _at(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(at_s))
