"""A Debian kernel with its modules, unpacked from its package; nothing is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lab.rdma.requirement import LabUnavailableError

#: Which kernel: empty for the distribution's own (Debian 12: 6.1), or a series such as ``6.12``.
SERIES_ENV = "RDMA_KERNEL"
_DOWNLOAD_TIMEOUT_S = 180


@dataclass(frozen=True)
class Kernel:
    """An unpacked kernel.

    Attributes:
        release: as ``uname -r`` says it.
        image: the bootable file.
        modules: the folder ``lib/modules/RELEASE``.
    """

    release: str
    image: Path
    modules: Path


def obtain(cache: Path, series: str | None = None) -> Kernel:
    """The kernel of ``series`` (default: what ``RDMA_KERNEL`` says), from ``cache`` or the archive.

    Raises:
        LabUnavailableError: there is none to be had.
    """
    series = os.environ.get(SERIES_ENV, "") if series is None else series
    wanted = cache / (f"kernel-{series}" if series else "kernel")
    if not wanted.is_dir():
        package = _package(series)
        with tempfile.TemporaryDirectory(dir=cache, prefix="unpack-") as folder:
            unpacked = Path(folder) / "kernel"
            _unpack(_download(package, Path(folder)), unpacked)
            unpacked.rename(wanted)
    images = sorted((wanted / "boot").glob("vmlinuz-*"))
    if len(images) != 1:
        raise LabUnavailableError(f"{wanted}: expected one kernel, found {len(images)}; remove it")
    release = images[0].name.removeprefix("vmlinuz-")
    # Since Debian 13 the modules are under /usr/lib.
    for root in (wanted / "lib", wanted / "usr" / "lib"):
        if (root / "modules" / release).is_dir():
            return Kernel(release, images[0], root / "modules" / release)
    raise LabUnavailableError(f"{wanted}: no modules for {release}; remove it")


def _package(series: str) -> str:
    # The plain flavour: the one for clouds has neither rdma_rxe nor 9p.
    meta = f"linux-image-{series}-amd64" if series else "linux-image-amd64"
    for tool in ("apt-cache", "apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise LabUnavailableError(f"no {tool}: the kernel comes from Debian's archive")
    said = _run(["apt-cache", "depends", meta])
    found = re.search(r"Depends: (linux-image-\d\S*-amd64)\b", said)
    if not found:
        raise LabUnavailableError(f"the archive has no {meta} (apt-get update may help)")
    return found[1]


def _download(package: str, folder: Path) -> Path:
    _run(["apt-get", "download", "-q", package], folder)
    found = list(folder.glob(f"{package}_*.deb"))
    if len(found) != 1:
        raise LabUnavailableError(f"apt-get download {package} left {len(found)} packages")
    return found[0]


def _unpack(package: Path, folder: Path) -> None:
    _run(["dpkg-deb", "-x", str(package), str(folder)])


def _run(argv: list[str], folder: Path | None = None) -> str:
    try:
        done = subprocess.run(
            argv, cwd=folder, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise LabUnavailableError(f"{' '.join(argv)}: no end in {_DOWNLOAD_TIMEOUT_S} s") from None
    if done.returncode:
        why = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise LabUnavailableError(f"{' '.join(argv)}: {why[-1] if why else 'failed'}")
    return done.stdout
