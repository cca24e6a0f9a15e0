"""Programs on the hosts of a fabric that answer lines with lines; and the fabric in IPv6."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lab import netns
from lab.fabric import Fabric, FabricSpec, Host


class Talker:
    """A program on a host that says ``ready``, and then answers every line with a line."""

    def __init__(self, fabric: Fabric, host: Host, program: str, *args: object, **env: str) -> None:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("CRUX_")}
        self.process = fabric.popen(
            host,
            [sys.executable, "-c", program, *map(str, args)],
            env={**inherited, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.hear() == "ready"

    def __call__(self, line: str) -> str:
        self.tell(line)
        return self.hear()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def hear(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the program has ended"
        return line.strip()


@contextmanager
def built(spines: int, **spec: Any) -> Iterator[tuple[Fabric, Host, Host]]:
    """A fabric, and a host at each of its two leaves."""
    with Fabric(FabricSpec(spines=spines, hosts_per_leaf=1, **spec)) as fabric:
        yield fabric, fabric.host(0, 0), fabric.host(1, 0)


def add_ipv6(fabric: Fabric) -> None:
    """The fabric's IPv4 network once more in IPv6: two leaves, two spines, a host at each leaf."""
    p = fabric.prefix
    for name in netns.named(p):
        sysctl(name, "ipv6/conf/all/forwarding=1 ipv6/conf/all/accept_dad=0 ipv6/icmp/ratelimit=0")
    for i in (0, 1):
        leaf, host = f"{p}leaf{i}", f"{p}h{i}-0"
        sysctl(leaf, "ipv6/fib_multipath_hash_policy=3 ipv6/fib_multipath_hash_fields=51")
        netns.run_batch(
            "ip", f"addr add fd00:{i}::2/64 dev eth0 nodad\nroute add default via fd00:{i}::1\n",
            host,
        )  # fmt: skip
        lines = [f"addr add fd00:{i}::1/64 dev host0 nodad"]
        for j in (0, 1):
            net = f"fd00:1{i}{j}:" if i else f"fd00:10{j}:"
            lines.append(f"addr add {net}:1/64 dev up{j} nodad")
            netns.run_batch(
                "ip",
                f"addr add {net}:2/64 dev down{i} nodad\n"
                f"route add fd00:{i}::/64 via {net}:1 dev down{i}\n",
                f"{p}spine{j}",
            )
        hops = " ".join(
            f"nexthop via {f'fd00:1{i}{j}:' if i else f'fd00:10{j}:'}:2 dev up{j}" for j in (0, 1)
        )
        lines.append(f"route add fd00:{1 - i}::/64 {hops}")
        netns.run_batch("ip", "\n".join(lines) + "\n", leaf)


def sysctl(namespace: str, settings: str) -> None:
    script = "\n".join(
        "echo {1} > /proc/sys/net/{0}".format(*setting.split("=")) for setting in settings.split()
    )
    subprocess.run(["ip", "netns", "exec", namespace, "sh", "-ec", script], check=True)
