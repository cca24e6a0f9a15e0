"""The environment of several NCCL ranks on one GPU."""

from __future__ import annotations

import sys
from pathlib import Path

from loopback import free_port

from lab import nccl_ranks
from lab.job import Job, JobSpec


def test_ranks_take_one_another_for_other_hosts() -> None:
    """NCCL refuses a GPU twice on one host; it compares what NCCL_HOSTID says."""
    everyone = [nccl_ranks.environment(job, rank, "eth0") for job in "ab" for rank in range(4)]
    assert len({env["NCCL_HOSTID"] for env in everyone}) == len(everyone)
    assert {env["NCCL_MULTI_RANK_GPU_ENABLE"] for env in everyone} == {"1"}


def test_nothing_but_sockets_of_one_interface_and_one_channel_is_left() -> None:
    env = nccl_ranks.environment("job", 0, "eth0")
    assert env["NCCL_NET"] == "Socket"
    assert env["NCCL_SOCKET_IFNAME"] == "=eth0"
    assert {env[f"NCCL_{way}_DISABLE"] for way in ("P2P", "SHM", "IB")} == {"1"}
    assert env["NCCL_MIN_CTAS"] == env["NCCL_MAX_CTAS"] == "1"


def test_a_cpu_job_gets_none_of_it() -> None:
    spec = JobSpec("name", "mlp", (), 0, "cpu")
    assert not [key for key in spec.environment(0, "lo") if key.startswith("NCCL")]


PRINT_ENVIRONMENT = """
import json, os, sys
print(json.dumps({k: v for k, v in os.environ.items() if k.startswith(("NCCL", "GLOO"))}))
print(sys.argv[1:])
"""


def test_every_rank_of_a_job_is_started_in_its_own(tmp_path: Path) -> None:
    spec = JobSpec("job", "mlp", (), free_port(), "cuda")
    job = Job(spec, tmp_path, (sys.executable, "-c", PRINT_ENVIRONMENT))
    assert job.wait(60.0) == [0, 0]
    for rank in range(2):
        said = job.tail(rank)
        assert f'"NCCL_HOSTID": "job.{rank}"' in said
        assert '"NCCL_SOCKET_IFNAME": "=lo"' in said
        assert f"'--node-rank', '{rank}'" in said
        assert "'--device', 'cuda'" in said
