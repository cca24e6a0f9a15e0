"""``crux env``: a job under torchrun with its variables is a job under cruxrun."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from control_fakes import until
from dscp_maps import MARKED_ENV
from loopback import free_port
from onlooker import Cluster
from training_job import BOUND_S, Job

from crux_torch.apply import preload
from crux_torch.cli.main import main
from crux_torch.job_name import local_rank, may_host_store, name_of_launch
from crux_torch.settings import Settings
from cruxrun import env, flags
from cruxrun.main import get_args_parser

STEPS = 1200


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CRUX_LEVELS", "CRUX_JOB", "CRUX_HOST", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["env", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_each_format_has_the_same_variables() -> None:
    given = ("--crux-policy", "ecmp", "--crux-trace", "a folder")
    expected = {"CRUX_POLICY": "ecmp", "CRUX_TRACE": "a folder", "CRUX_ATTACH": "1"}
    expected |= preload.environment(Settings(), {})
    assert json.loads(printed("--format", "json", *given)) == expected
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    script = printed(*given) + shlex.join([sys.executable, "-c", show])
    done = subprocess.run(
        ["sh", "-c", script], env={}, capture_output=True, text=True, check=True, timeout=60
    )
    assert expected.items() <= json.loads(done.stdout).items()
    lines = printed("--format", "slurm", *given).splitlines()
    assert dict(line.removeprefix("export ").split("=", 1) for line in lines) == expected
    patch = yaml.safe_load(printed("--format", "kubernetes", *given))
    values = {entry["name"]: entry["value"] for entry in patch["env"] if "value" in entry}
    assert values == expected
    assert patch["securityContext"]["capabilities"]["add"] == ["NET_RAW"]


def test_a_patch_for_all_hosts_names_no_host() -> None:
    given = ("--crux-host", "h0")
    assert json.loads(printed("--format", "json", *given))["CRUX_HOST"] == "h0"
    patch = yaml.safe_load(printed("--format", "kubernetes", *given))
    assert "CRUX_HOST" not in {entry["name"] for entry in patch["env"]}


def test_a_value_that_cannot_be_used_is_named_with_its_flag() -> None:
    result = CliRunner().invoke(main, ["env", "--crux-topology", "/nowhere.yaml"])
    assert result.exit_code == 1
    assert "--crux-topology (CRUX_TOPOLOGY)='/nowhere.yaml': no such file" in result.output


def test_cruxrun_sets_the_same_and_what_only_a_launcher_knows(tmp_path: Path) -> None:
    args = get_args_parser().parse_args(["--standalone", "--crux-levels", "4", "train.py"])
    launched, settings, _ = flags.job_environment(args, {})
    launched |= preload.environment(settings, {})
    attached = env.variables(["--crux-levels", "4"], {})
    only = {"CRUX_JOB", "CRUX_JOB_OF", "CRUX_LAUNCHED"}
    assert {name: text for name, text in launched.items() if name not in only} == attached


MET = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("ids", "stem"),
    [
        ({}, "train"),
        ({"SLURM_JOB_ID": "71", "TORCHELASTIC_RUN_ID": "b"}, "slurm-71"),
        ({"RAY_JOB_ID": "01000000"}, "ray-01000000"),
        ({"PET_RDZV_ID": "bert large"}, "bert-large"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "train"),
        ({"TORCHELASTIC_RUN_ID": "0f8fad5b-d9cb-469f-a165-70867728950e"}, "train"),
    ],
)
def test_the_launchers_id_names_the_job(ids: dict[str, str], stem: str) -> None:
    name = name_of_launch(MET | ids, "/a/train.py")
    assert name.rpartition("-")[0] == stem
    # Alike on every rank, and another job's differs.
    assert name_of_launch(MET | ids | {"RANK": "1"}, "/b/train.py") == name
    assert name_of_launch(MET | ids | {"MASTER_PORT": "29501"}, "/a/train.py") != name


def test_in_kubernetes_the_first_pod_and_the_namespace_name_the_job() -> None:
    pod = MET | {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "MASTER_ADDR": "bert-node-0-0.bert"}
    # torchrun's word for a job that was given no id.
    pod |= {"TORCHELASTIC_RUN_ID": "none", "POD_NAMESPACE": "vision"}
    name = name_of_launch(pod, "train.py")
    assert name.rpartition("-")[0] == "bert-node-0-0"
    assert name_of_launch(pod | {"POD_NAMESPACE": "speech"}, "train.py") != name
    by_address = name_of_launch(pod | {"MASTER_ADDR": "10.0.0.7"}, "train.py")
    assert by_address.rpartition("-")[0] == "train"


def test_a_process_that_no_launcher_started_has_no_such_name() -> None:
    assert name_of_launch({"SLURM_JOB_ID": "71"}, "train.py") == ""


def test_a_step_of_slurm_names_its_job_where_the_script_alone_knows_the_rendezvous() -> None:
    task = {"SLURM_JOB_ID": "71", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}
    name = name_of_launch(task, "train.py")
    assert name.startswith("slurm-71-")
    assert name_of_launch(task | {"SLURM_PROCID": "5"}, "train.py") == name
    assert name_of_launch(task | {"SLURM_STEP_ID": "1"}, "train.py") != name


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, None),
        ({"SLURM_LOCALID": "3"}, 3),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1", "SLURM_LOCALID": "0"}, 1),
        ({"MPI_LOCALRANKID": "2", "SLURM_LOCALID": "0"}, 2),
        # torchrun that srun started, one a host
        ({"LOCAL_RANK": "1", "SLURM_LOCALID": "0"}, 1),
        ({"LOCAL_RANK": "first"}, None),
    ],
)
def test_a_launcher_tells_the_rank_on_the_host(told: dict[str, str], expected: int | None) -> None:
    assert local_rank(told) == expected
    # Rank 8 is another host's than rank 0.
    assert may_host_store(8, told) is (expected is None)
    assert may_host_store(0, told)
    assert may_host_store(8, {"SLURM_LOCALID": "0"})


@pytest.mark.full
# torchrun and stock Gloo now and then lose a race for a port, or abort at teardown.
@pytest.mark.flaky(reruns=1)
def test_torchrun_with_the_variables_is_cruxrun(tmp_path: Path) -> None:
    """The same losses, the same plan, the same status; the job hosts the store itself."""
    losses, entries, statuses = [], [], []
    for launcher in ("cruxrun", "torch.distributed.run"):
        # A store of its own, so that each has to host one.
        given = {**MARKED_ENV, "CRUX_STORE": f"tcp://127.0.0.1:{free_port()}"}
        given |= {"CRUX_POLICY": "crux-paper", "CRUX_JOB": "same", "CRUX_PROFILE_S": "1"}
        attached = given if launcher == "cruxrun" else given | env.variables([], given)
        cluster = Cluster(given["CRUX_STORE"])
        (tmp_path / launcher).mkdir()
        job = Job(
            launcher, tmp_path / launcher / "same", "--status", f"--steps={STEPS}", **attached
        )

        def follows(job: Job = job, cluster: Cluster = cluster) -> bool:
            plan = cluster.plan()
            return plan is not None and job.follows(plan)

        try:
            until(follows, BOUND_S, "the job's plan")
            plan = cluster.plan()
            assert plan is not None
            entries.append([(entry.job, entry.level, entry.paths) for entry in plan.entries])
            statuses.append(job.status())
            job.end(after_its_steps=True)
            losses.append(job.losses())
        finally:
            job.kill_everything()
            cluster.close()
    assert losses[0] == losses[1]
    assert entries[0] == entries[1]
    ours, theirs = statuses
    assert ours.keys() == theirs.keys()
    assert {**ours["settings"], "store": ""} == {**theirs["settings"], "store": ""}
    assert ours["attached"] is theirs["attached"] is True
    assert ours["leader"]["left_out"] == theirs["leader"]["left_out"]
