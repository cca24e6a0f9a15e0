"""The package's list of devices, on a host that has some."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from lab.guest import Guest
from lab.network import PAIR_ADDRESSES
from lab.play import Outcome, play
from scenarios.pair import PYVERBS

TIMEOUT_S = 120


@pytest.fixture(scope="module")
def devices(guest: Guest) -> Iterator[Outcome]:
    outcome = play(guest, "devices", timeout_s=TIMEOUT_S)
    yield outcome
    outcome.remove()


def test_each_device_is_listed_with_the_address_that_verbs_use(devices: Outcome) -> None:
    (process,) = devices.steps["devices"].processes
    assert process.status == 0, process
    found = json.loads(process.stdout)
    assert [device["name"] for device in found] == ["rxe0", "rxe1"]
    for device, address in zip(found, PAIR_ADDRESSES, strict=True):
        (port,) = device["ports"]
        assert (port["number"], port["active"], port["link_layer"]) == (1, True, "Ethernet")
        assert port["interface"]
        routable = {gid["address"] for gid in port["gids"] if gid["kind"] == "RoCE v2"}
        assert f"::ffff:{address}" in routable
        assert {gid["interface"] for gid in port["gids"]} == {port["interface"]}
        assert device["pci_address"] is None
        if PYVERBS.exists():
            assert device["limits"]["queue_pairs"] > 0
            assert device["limits"]["rate_limit_Bps"] is None, "rxe can't pace"
