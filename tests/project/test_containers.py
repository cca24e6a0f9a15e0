"""The exporter's image, built by buildah from its Containerfile, serves a cluster.

The base image stands in for the registry's: Debian with its own Python 3.11.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import heavy3
import pytest
from control_fakes import until
from places import ROOT
from store_server import ServerThread

from crux_torch.agreement.registry import Registry
from crux_torch.store.endpoint import open_store

CONTAINERFILE = ROOT / "deploy" / "Containerfile"
PACKAGES = "python3,python3-dev,python3-venv,ca-certificates"
IMAGE = "localhost/crux-exporter"
#: Seconds for one command: the archive and the package index are far away.
LIMIT_S = 900

_MISSING = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(2 * LIMIT_S),
    pytest.mark.skipif(os.geteuid() != 0, reason="a base image takes root"),
    pytest.mark.skipif(bool(_MISSING), reason=f"not installed: {', '.join(_MISSING)}"),
]


class Buildah:
    """buildah with images and containers of its own, below a folder."""

    def __init__(self, folder: Path) -> None:
        # Neither a file system nor namespaces of its own: works in a container, too.
        self._argv = ["buildah", "--storage-driver", "vfs", "--root", str(folder / "images")]
        self._argv += ["--runroot", str(folder / "run")]
        self.isolation = ("--isolation", "chroot")

    def argv(self, *words: str | Path) -> list[str]:
        return [*self._argv, *map(str, words)]

    def __call__(self, *words: str | Path) -> str:
        return run(*self.argv(*words))


def run(*argv: str | Path) -> str:
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout.strip()


def base_name() -> str:
    """The image that the Containerfile begins with."""
    lines = CONTAINERFILE.read_text().splitlines()
    (name,) = {line.split()[1] for line in lines if line.startswith("FROM ")}
    return name


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    folder = tmp_path_factory.mktemp("containers")
    made, base = Buildah(folder), folder / "base"
    try:
        made_base = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm"]
        done = subprocess.run([*made_base, base], capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode:
            pytest.skip(f"no base image can be made: {done.stdout[-200:]}{done.stderr[-200:]}")
        done = subprocess.run(made.argv("from", "scratch"), capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"buildah can't work here: {done.stderr[-300:]}")
        container = done.stdout.strip()
        (base / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        # It reaches the archive and the package index as this machine does.
        certificates = Path("/etc/ssl/certs/ca-certificates.crt")
        shutil.copy(certificates, base / certificates.relative_to("/"))
        for file in (Path("/etc/pip.conf"), *Path("/etc/apt/apt.conf.d").glob("99*")):
            if file.exists():
                shutil.copy(file, base / file.relative_to("/"))
        made("add", "--quiet", container, base, "/")
        made("commit", "--quiet", "--rm", container, base_name())
        yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_the_exporter_s_image_is_built_and_serves(buildah: Buildah) -> None:
    how = ("--pull-never", "--file", CONTAINERFILE, "--tag", IMAGE)
    buildah("build", *buildah.isolation, *how, ROOT)
    container = buildah("from", "--pull-never", IMAGE)
    inside = ("run", *buildah.isolation, container, "--")
    assert buildah(*inside, "id", "-u") == "65534"
    assert not buildah(*inside, "sh", "-c", "ls -d /source 2>/dev/null || true")
    entry = CONTAINERFILE.read_text().split("ENTRYPOINT ")[1].strip()
    assert '"exporter"' in entry
    with ServerThread() as server:
        where = f"tcp://127.0.0.1:{server.port}"
        store = open_store(where, "", timeout_s=10.0)
        heavy3.fill(Registry(store, "lab"))
        serve = ("--listen", "127.0.0.1", "--port", "0", "--store", where, "--cluster", "lab")
        exporter = subprocess.Popen(
            buildah.argv(*inside, "/opt/crux/bin/crux", "exporter", *serve),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            assert exporter.stdout is not None
            line = exporter.stdout.readline()
            metrics = next((word for word in line.split() if word.startswith("http://")), None)
            assert metrics is not None, line

            def shows_jobs() -> bool:
                with urllib.request.urlopen(metrics, timeout=30) as answer:
                    return 'job_name="A"' in answer.read().decode()

            until(shows_jobs, what="metrics of the jobs")
        finally:
            os.killpg(exporter.pid, signal.SIGKILL)
            exporter.wait()
            store.close()
