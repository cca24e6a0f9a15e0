"""What the leader says of the names of its ranks' hosts, and when."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable

import msgspec
import pytest
from control_fakes import FakeClock
from hypothesis import given
from hypothesis import strategies as st
from seen_fabric import Host, fragment
from torch.distributed import HashStore

from crux_torch.agent.orders import GIVE_UP_S, LOOK_S, PATIENCE_S, RollCall
from crux_torch.agreement.job_channel import JobChannel
from crux_torch.agreement.problems import MOST_HOSTS, Place, place_of_this_process, problems
from crux_torch.network.discover.seen_topology import SeenTopology
from crux_torch.network.loaders import parse_yaml
from crux_torch.settings import Settings

TOPOLOGY = parse_yaml("""
version: 1
hosts: {h0: , h1: }
switches: {tor: tor}
links: [{between: [h0, tor], capacity_Bps: 1e9}, {between: [h1, tor], capacity_Bps: 1e9}]
addresses: {h0: [10.0.0.2], h1: [10.1.0.2]}
""")


def place(
    host: str, machine: str = "a", network: str = "1", address: str = "", told: bool = False
) -> Place:
    return Place(host, told, machine, network, ("127.0.0.1", address) if address else ())


@pytest.mark.parametrize(
    "other",
    [
        place("vm", machine="b", address="10.1.0.2"),
        place("vm", machine="b", address="10.1.0.2", told=True),
        # Two containers of one machine that nobody has named.
        place("vm", network="2", address="10.1.0.2"),
    ],
)
def test_two_machines_of_one_name_are_named_with_the_remedy(other: Place) -> None:
    mine = place("vm", address="10.0.0.2", told=other.told)
    (said,) = problems({0: mine, 1: mine, 2: other, 3: other}, None)
    assert said.startswith(
        "2 machines are called 'vm', that of rank 0 (10.0.0.2) and that of rank 2 (10.1.0.2): "
    )
    assert "CRUX_HOST (cruxrun --crux-host)" in said


def test_what_may_be_one_host_is_none_of_it() -> None:
    same = place("vm", address="10.0.0.2")
    assert problems({0: same, 1: same}, None) == ()
    # Containers of one machine whose user calls them one host.
    pods = [place("h0", network=n, told=True) for n in "12"]
    assert problems(dict(enumerate(pods)), TOPOLOGY) == ()
    assert problems({0: place("h0"), 1: place("h1", machine="b")}, TOPOLOGY) == ()


def test_a_host_that_the_topology_lacks_is_named_once_with_what_its_addresses_say() -> None:
    found = problems(
        {
            0: place("h0", address="10.0.0.2"),
            1: place("vm", machine="b", address="10.1.0.2"),
            2: place("vm", machine="b", address="10.1.0.2"),
            3: place("h_1", machine="c", address="10.9.9.9", told=True),
        },
        TOPOLOGY,
    )
    assert len(found) == 2
    assert "rank 1 calls itself 'vm', and by its addresses it is 'h1'" in found[0]
    assert "set CRUX_HOST=h1 there" in found[0]
    assert "no host 'h_1', the name that CRUX_HOST gives to the machine of rank 3" in found[1]


def test_a_network_that_other_jobs_saw_may_lack_this_jobs_hosts() -> None:
    seen = SeenTopology({"other": fragment([Host(0, 0), Host(1, 0)])})
    assert problems({0: place("vm", address="10.9.9.9", told=True)}, seen) == ()


def test_many_hosts_astray_are_counted() -> None:
    many = {rank: place(f"n{rank}", machine=f"{rank}") for rank in range(50)}
    found = problems(many, TOPOLOGY)
    assert len(found) == MOST_HOSTS + 1
    assert found[-1] == f"so it is with {50 - MOST_HOSTS} more hosts"


@given(
    st.dictionaries(
        st.integers(0, 9),
        st.builds(
            Place,
            st.sampled_from(["h0", "h1", "vm"]),
            st.booleans(),
            st.sampled_from("ab"),
            st.sampled_from("12"),
            st.lists(
                st.sampled_from(["10.0.0.2", "10.1.0.2", "::1", "no address", ""]), max_size=3
            ).map(tuple),
        ),
    )
)
def test_a_rank_that_tells_nonsense_breaks_nothing(places: dict[int, Place]) -> None:
    for said in problems(places, TOPOLOGY):
        assert said


def ranks_of(store: HashStore, places: Iterable[Place], clock: FakeClock) -> list[RollCall]:
    listed = list(places)
    return [
        RollCall(JobChannel(store, rank, len(listed)), len(listed), at, SAID.append_to, clock=clock)
        for rank, at in enumerate(listed)
    ]


class Said(list[str]):
    def append_to(self, _about: str, message: str) -> None:
        self.append(message)


SAID = Said()


def test_the_leader_judges_when_all_have_come_and_again_when_a_topology_comes() -> None:
    SAID.clear()
    clock = FakeClock()
    hosts = [place("h0"), place("other", machine="b")]
    leader, follower = ranks_of(HashStore(), hosts, clock)
    leader.send()
    leader.gather(None)
    follower.send()
    follower.send()
    leader.gather(None)
    assert leader.status() == {"ranks": {"h0": [0]}, "problems": []}
    clock.advance(LOOK_S)
    leader.gather(None)
    assert leader.status()["ranks"] == {"h0": [0], "other": [1]}
    assert SAID == []
    for _ in range(3):
        leader.gather(TOPOLOGY)
    assert len(SAID) == 1
    assert "no host 'other'" in SAID[0]
    assert list(leader.status()["problems"]) == [SAID[0]]


def test_silent_ranks_and_junk_delay_it_by_a_bounded_time() -> None:
    SAID.clear()
    clock, store = FakeClock(), HashStore()
    hosts = [place("vm"), place("vm", machine="b"), place("vm"), place("vm")]
    calls = ranks_of(store, hosts, clock)
    calls[0].send()
    calls[1].send()
    store.set("crux/host/2", b'{"host": 1}')  # type: ignore[arg-type]
    while clock.now < 1000.0 + PATIENCE_S - LOOK_S:
        calls[0].gather(TOPOLOGY)
        clock.advance(LOOK_S)
    assert SAID == []
    clock.advance(LOOK_S)
    calls[0].gather(TOPOLOGY)
    assert "2 machines are called 'vm'" in SAID[0]
    clock.advance(GIVE_UP_S)
    calls[3].send()
    calls[0].gather(TOPOLOGY)
    assert len(SAID) == 1
    assert calls[0].status()["ranks"] == {"vm": [0, 1]}


def test_this_process_tells_where_it_runs() -> None:
    mine = place_of_this_process(Settings(host="h0"), "h0")
    assert (mine.host, mine.told) == ("h0", True)
    assert not place_of_this_process(Settings(), "vm").told
    assert msgspec.json.decode(msgspec.json.encode(mine), type=Place) == mine
    own = "from crux_torch.host.machine import *; print(machine_id(), network_id())"
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("no unshare")
    command = [unshare, "--user", "--net", sys.executable, "-c", own]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no namespaces: {done.stderr.strip()}")
    machine, network = done.stdout.split()
    assert machine == mine.machine
    assert network != mine.network
