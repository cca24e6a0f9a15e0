"""Two releases in one cluster: the store's protocol, and records that the other one wrote.

docs/operate/upgrades.md promises what is tested here.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from control_fakes import record
from places import ROOT, SUPPORT
from store_server import ServerThread

from crux_torch.agreement.registry import Registry
from crux_torch.errors import Cause, StoreError
from crux_torch.store.client import StoreClient
from crux_torch.store.endpoint import TcpConnector

pytestmark = pytest.mark.slow

#: Trees that stand for releases: the last one with protocol 1, and one of protocol 2 and schema 2.
PROTOCOL_1, PROTOCOL_2 = "fd600a79", "528b77be"


def git(*command: str) -> bytes:
    return subprocess.run(["git", "-C", ROOT, *command], capture_output=True, check=True).stdout


def last_tag() -> str:
    try:
        return git("describe", "--tags", "--abbrev=0", "--match", "v*").decode().strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


@pytest.fixture
def older(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    def start(revision: str, *command: str) -> subprocess.Popen[str]:
        if not revision:
            pytest.skip("this clone has no tag of a release (v*)")
        try:
            packed = git("archive", revision, "crux_torch")
        except (OSError, subprocess.CalledProcessError):
            pytest.skip(f"this clone lacks {revision}: git fetch --unshallow")
        with tarfile.open(fileobj=io.BytesIO(packed)) as files:
            files.extractall(tmp_path / "older")
        script = [sys.executable, SUPPORT / "older_release.py", tmp_path / "older", *command]
        return subprocess.Popen(list(map(str, script)), stdout=subprocess.PIPE, text=True)

    return start


def said(process: subprocess.Popen[str]) -> str:
    text = process.communicate(timeout=600)[0]
    assert process.returncode == 0, text
    return text


@pytest.mark.parametrize("release", [PROTOCOL_2, "the last tag"])
def test_jobs_of_an_older_release_read_and_write_the_same_store(
    older: Callable[..., subprocess.Popen[str]], release: str
) -> None:
    revision = last_tag() if release == "the last tag" else release
    with ServerThread() as server:
        client = server.client()
        registry = Registry(client, "c")
        registry.publish_job(record("newer"), 600.0)
        answer = said(older(revision, "join", str(server.port)))
        if revision != PROTOCOL_2 and "of the protocol" in answer:
            client.close()
            return  # refused, with both versions: a release may change the protocol
        (seen,) = msgspec.json.decode(answer)
        jobs = {job.job: job for job in registry.look().jobs}
        client.close()
    assert seen["job"] == "newer"
    assert jobs["newer"] == record("newer")
    assert jobs["older"] == msgspec.structs.replace(jobs["newer"], job="older"), "a field was lost"


def test_an_older_protocol_is_refused_with_both_versions(
    older: Callable[..., subprocess.Popen[str]],
) -> None:
    with ServerThread() as server:
        assert "speaks version 2 of the protocol, this job 1" in said(
            older(PROTOCOL_1, "join", str(server.port))
        )
        client = server.client()
        client.put("still", b"here")
        client.close()


def test_the_server_of_an_older_protocol_is_refused_with_the_remedy(
    older: Callable[..., subprocess.Popen[str]],
) -> None:
    process = older(PROTOCOL_1, "serve")
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        client = StoreClient(TcpConnector("127.0.0.1", port), b"", timeout_s=60.0)
        with pytest.raises(
            StoreError, match="speaks version 1 of the protocol, this job 2"
        ) as error:
            client.put("a", b"b")
        assert error.value.cause == Cause.VERSION
        client.close()
    finally:
        process.kill()
        process.communicate()


def test_the_server_of_an_older_release_takes_this_release_s_jobs(
    older: Callable[..., subprocess.Popen[str]],
) -> None:
    process = older(PROTOCOL_2, "serve")
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        client = StoreClient(TcpConnector("127.0.0.1", port), b"", timeout_s=60.0)
        registry = Registry(client, "c")
        registry.publish_job(record("newer"), 600.0)
        assert registry.look().jobs == (record("newer"),)
        client.close()
    finally:
        process.kill()
        process.communicate()
