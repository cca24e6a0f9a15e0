"""``crux probe --hash`` in a fabric of namespaces: Linux's own hash, and one that is linear."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fabric_programs import built, sysctl
from places import ROOT

from lab import netns
from lab.fabric import Fabric, Host

_OK, _REASON = netns.available()
pytestmark = [pytest.mark.full, pytest.mark.skipif(not _OK, reason=_REASON)]

#: The last bits of the source port choose the spine, as in a switch that XORs ports and takes the
#: lowest bits; the mark picks a table with the one route over that spine.
_BY_PORT = """
table ip spread {
  chain before {
    type filter hook prerouting priority mangle;
    ip protocol udp meta mark set udp sport and 0x3 map { 0 : 0, 1 : 1, 2 : 2, 3 : 3 }
  }
}
"""


def probed(fabric: Fabric, host: Host, to: str, folder: Path) -> dict[str, Any]:
    written = folder / "fabric.yaml"
    written.write_text(fabric.topology_yaml())
    argv = [sys.executable, "-m", "crux_torch.cli", "probe", to, "--hash", "--json"]
    argv += ["--rate", "2000", "--topology", str(written)]
    answer: dict[str, Any] = json.loads(fabric.run(host, argv, timeout_s=120))
    return answer


def choose_by_source_port(fabric: Fabric) -> None:
    leaf = f"{fabric.prefix}leaf0"
    netns.run_batch(
        "ip",
        "".join(
            f"route add 10.1.0.0/16 via 10.100.{j}.2 dev up{j} table {100 + j}\n"
            f"rule add fwmark {j} iif host0 table {100 + j}\n"
            for j in range(4)
        ),
        leaf,
    )
    subprocess.run(
        ["ip", "netns", "exec", leaf, "nft", "-f", "-"], input=_BY_PORT, text=True, check=True
    )


@pytest.mark.parametrize("spines", [2, 3, 4])
def test_linux_has_a_hash_that_fits_none(spines: int, tmp_path: Path) -> None:
    with built(spines) as (fabric, a, b):
        (leaf,) = probed(fabric, a, b.address, tmp_path)["hashes"]["switches"]
        assert leaf["verdict"] == "none fits"
        assert len(leaf["next_hops"]) == spines
        assert leaf["choices"] >= 32 * spines


def test_a_switch_that_takes_the_last_bits_of_ports_is_recognised(tmp_path: Path) -> None:
    with built(4) as (fabric, a, b):
        choose_by_source_port(fabric)
        answer = probed(fabric, a, b.address, tmp_path)["hashes"]
        (leaf,) = answer["switches"]
        assert leaf["verdict"] == "explained"
        assert leaf["accuracy"] == 1.0
        assert leaf["chance"] < 1e-10
        assert "XOR of 16 bits over sport" in leaf["families"]
        assert answer["checked"] == [{"switch": "leaf0", "asked": 8, "right": 8}]
        assert answer["polarised"] == []


def test_discovery_names_the_hashes_too(tmp_path: Path) -> None:
    with built(4) as (fabric, a, b):
        choose_by_source_port(fabric)
        for name in netns.named(fabric.prefix):  # as switches do
            sysctl(name, "ipv4/icmp_errors_use_inbound_ifaddr=1")
        argv = [sys.executable, "-m", "crux_torch.cli", "topology", "discover", "--no-inside"]
        argv += ["--hosts", f"{a.namespace},{b.namespace}", "--ssh", "ip netns exec {}"]
        argv += ["--remote", f"{sys.executable} -m crux_torch.cli"]
        argv += ["--hash", "--out", str(tmp_path / "cluster.yaml"), "--json"]
        argv += ["--rate", "2000", "--router-rate", "2000"]
        done = subprocess.run(
            argv, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
        )
        found = json.loads(done.stdout)["hashes"]["switches"]
        by_verdict = {each["verdict"]: each for each in found if len(each["next_hops"]) == 4}
        assert set(by_verdict) == {"explained", "none fits"}, "leaf1 has Linux's own hash"
        assert "XOR of 16 bits over sport" in by_verdict["explained"]["families"]
        assert json.loads(done.stdout)["hashes"]["polarised"] == []
