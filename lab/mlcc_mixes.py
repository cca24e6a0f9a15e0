"""The jobs that mlcc's comparison trains side by side (lab.mlcc)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crux_torch.sim.served import Pair, Rule, ServedJob, iteration_s
from lab.fabric import Fabric, FabricSpec

#: The paper's models on links a hundredth as fast, so that a transfer takes as long: width of the
#: MLP that has a hundredth of the model's bytes (549, 528, 98 and 1,200 MB), milliseconds of
#: computation, estimated.
MODELS = {
    "vgg19": (768, 400),
    "vgg16": (736, 400),
    "resnet50": (192, 250),
    "gpt2": (1296, 900),
    "vgg16-ps": (736, 400),
    "vgg19-ps": (768, 400),
}
#: §VI-A's models on links of 10 Gbit/s: seconds of computation (as on its GPUs, estimated), and of
#: transfer alone, from the models' sizes.
SHAPES = {
    "vgg19": (0.40, 0.44),
    "vgg16": (0.40, 0.42),
    "gpt2": (0.90, 0.96),
    "resnet50": (0.25, 0.08),
}
#: Those with a parameter server: two workers at one end of the link, and it at the other.
SERVED = ("vgg16-ps", "vgg19-ps")
#: What the paper calls 1 Gbit/s, in Mbit/s.
SCALE_MBIT = 10.0
#: Turns: the kernel's congestion controls without Crux, mlcc over cubic with one host that keeps
#: all tables, the same while that host's service stands still, the same over BBR, and with hosts
#: that keep their own (§VI-H).
PLAIN = ("cubic", "reno", "bbr", "dctcp")
MLCC, MLCC_STILL, MLCC_BBR, MLCC_HOSTS = "mlcc", "mlcc-still", "mlcc-bbr", "mlcc-hosts"


@dataclass(frozen=True)
class Mix:
    """Jobs that share a link.

    Attributes:
        name, about: of the mix.
        jobs: names of :data:`MODELS`.
        turns: in their order, in each round.
        gbit: of the paper's links, which are a hundred times as fast.
        loss: share of packets that the link loses at random.
        cross: whether foreign flows cross the link, in both directions.
    """

    name: str
    about: str
    jobs: tuple[str, ...]
    turns: tuple[str, ...] = (*PLAIN, MLCC, MLCC_HOSTS)
    gbit: float = 10.0
    loss: float = 0.0
    cross: bool = False

    @property
    def rate_Bps(self) -> float:
        return self.gbit * SCALE_MBIT * 1e6 / 8

    def senders(self, job: str) -> int:
        """Number of ranks of ``job`` that send over the link in one direction."""
        return 2 if job in SERVED else 1

    def fabric(self) -> Fabric:
        """Its network: two switches and one link between them, with as many hosts as it needs."""
        hosts, rate_mbit = max(map(self.senders, self.jobs)), self.gbit * SCALE_MBIT
        return Fabric(FabricSpec(hosts_per_leaf=hosts, rate_mbit=rate_mbit, loss=self.loss))


_VGG = ("vgg19", "vgg16")
#: The mixes that train; the paper's models at its 10 and 20 Gbit/s.
LIVE = {
    m.name: m
    for m in (
        Mix("vgg", "two alike", _VGG),
        Mix(
            "vgg-15", "two alike, on links half as fast again", _VGG,
            (*PLAIN, MLCC, MLCC_HOSTS, MLCC_STILL), gbit=15.0,
        ),
        Mix("vgg-20", "two alike, on links twice as fast", _VGG, gbit=20.0),
        Mix("gpt2", "a short and a long iteration", ("vgg19", "gpt2")),
        Mix("resnet", "a large and a small burst", ("vgg19", "resnet50")),
        Mix(
            "four", "all four", ("vgg19", "vgg16", "gpt2", "resnet50"), ("cubic", MLCC),
            gbit=20.0,
        ),
        Mix(
            "ps", "VGG16 with a parameter server and two workers, on links twice as fast",
            ("vgg19", "vgg16-ps"), ("cubic", MLCC), gbit=20.0,
        ),
        Mix(
            "ps-two", "two alike with a parameter server and two workers each",
            ("vgg19-ps", "vgg16-ps"), ("cubic", MLCC), gbit=15.0,
        ),
        Mix(
            "loss", "a packet in 500 is lost (Figure 10)", _VGG,
            ("cubic", "reno", "bbr", MLCC, MLCC_BBR), gbit=20.0, loss=0.002,
        ),
        Mix(
            "cross", "foreign flows of 0.2 to 2 s, one every 2 s each way (§VI-A)", _VGG,
            ("cubic", "bbr", MLCC, MLCC_HOSTS), gbit=20.0, cross=True,
        ),
    )
}  # fmt: skip


#: Compared with fair sharing.
RULES: tuple[Rule, ...] = ("start-after", "initial", "mlcc")
HORIZON_S = 40.0


def served(
    name: str, shape: str, compute: float = 1.0, workers: str = "ab", server: str = "s"
) -> ServedJob:
    """A job of two workers and a parameter server, each on a host."""
    compute_s, moved = SHAPES[shape]
    pairs = (
        Pair(w, server, moved, (f"{w}>", f">{server}"), (f"{server}>", f">{w}")) for w in workers
    )
    return ServedJob(name, compute * compute_s, tuple(pairs))


def with_servers() -> dict[str, dict[str, float]]:
    """Mean time of an iteration of jobs with parameter servers, over fair sharing's, by rule."""
    links = {link: 1.0 for host in "abcs" for link in (f"{host}>", f">{host}")}
    one = served("one", "vgg16", 3.0)
    cases = {
        "one alone": (links, [one]),
        "two alike": (links, [one, served("two", "vgg16", 3.1)]),
        "a large and a small one": (links, [one, served("two", "resnet50", 3.0)]),
        "one with a slow worker": (
            links | {"a>": 0.25},
            [served("one", "vgg16"), served("two", "vgg16", 1.1, workers="bc")],
        ),
    }
    return {case: _over_fair(*of_case) for case, of_case in cases.items()}


def _over_fair(links: Mapping[str, float], jobs: Sequence[ServedJob]) -> dict[str, float]:
    def times_s(rule: Rule) -> list[float]:
        found = iteration_s(links, jobs, rule, HORIZON_S)
        return [found[job.name] or HORIZON_S for job in jobs]

    fair = times_s("fair")
    return {
        rule: statistics.fmean(a / b for a, b in zip(times_s(rule), fair, strict=True))
        for rule in RULES
    }
