"""A virtual machine that runs one command over the host's own files, and hands back what it did.

QEMU emulates the processor, so it needs neither KVM nor privileges. The guest sees the host's root
read-only (9p) below a layer in its memory: every program of the host is there, nothing it writes
reaches the host, except into the output folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab.rdma import initramfs, kernel, requirement
from lab.rdma.kernel import Kernel

CACHE = Path(__file__).resolve().parents[2] / "build" / "rdma"
_HERE = Path(__file__).resolve().parent
_MODULES = (
    "virtio_pci",
    "9pnet_virtio",
    "9p",
    "overlay",
    "crc32_generic",
    "crc32c_generic",
    "crc32c_intel",
    "af_packet",
    "veth",
    "rdma_rxe",
    "ib_uverbs",
    "rdma_ucm",
    "sch_netem",
)
#: Rather than ``max``: with that one's AVX, code on floats is 27 times slower under emulation.
_PROCESSOR = "Nehalem"
#: Keeps the emulated processors from work that nobody looks at, and the clock from being doubted.
_BOOT_OPTIONS = (
    "console=ttyS0 quiet loglevel=4 panic=-1 nokaslr mitigations=off tsc=reliable no_timer_check "
    "apparmor=0 audit=0 nowatchdog cryptomgr.notests raid=noautodetect rcupdate.rcu_expedited=1 "
    "random.trust_cpu=on"
)


class GuestError(RuntimeError):
    """The guest ended without a status of its command: what its console said last.

    Attributes:
        out: the output folder.
    """

    def __init__(self, out: Path) -> None:
        super().__init__(f"{out}: no status from the guest; its console:\n{_tail(out)}")
        self.out = out


@dataclass(frozen=True)
class Completed:
    """What a command in the guest left behind.

    Attributes:
        status: the command's exit status; ``None`` where it was stopped for lack of time.
        stdout: what it printed.
        stderr: what it complained of.
        out: the output folder, the command's working directory.
        wall_s: from the start of the machine to its end.
    """

    status: int | None
    stdout: str
    stderr: str
    out: Path
    wall_s: float


@dataclass(frozen=True)
class Guest:
    """A machine that can be booted any number of times, always from the same state.

    Attributes:
        kernel: it boots.
        memory_MiB: of which half is for files that the guest writes.
        processors: how many are emulated, each by a thread of the host.
    """

    kernel: Kernel
    memory_MiB: int = 1536
    processors: int = 2

    @classmethod
    def prepare(cls) -> Guest:
        """A guest of this machine; takes some seconds the first time, for the kernel's package.

        Raises:
            LabUnavailableError: something is missing.
        """
        requirement.check(CACHE)
        with _locked("prepare"):
            return cls(kernel.obtain(CACHE))

    def run(self, script: str, timeout_s: float) -> Completed:
        """Boot, run the shell ``script`` in a fresh output folder, and turn the machine off.

        The folder is the caller's to remove. One machine runs at a time: another waits.

        Raises:
            GuestError: the guest did not get as far as the command's end.
        """
        out = Path(tempfile.mkdtemp(prefix="run-", dir=CACHE))
        (out / "command").write_text(script)
        with _locked("run"):
            start = time.monotonic()
            ended = self._boot(out, timeout_s)
            wall_s = time.monotonic() - start
        if ended and not (out / "status").exists():
            raise GuestError(out)
        return Completed(
            status=int((out / "status").read_text()) if ended else None,
            stdout=_text(out / "stdout"),
            stderr=_text(out / "stderr"),
            out=out,
            wall_s=wall_s,
        )

    def _boot(self, out: Path, timeout_s: float) -> bool:
        """Whether the machine turned itself off in time."""
        with (out / "qemu").open("wb") as said:
            process = subprocess.Popen(
                self._command_line(out), stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return False
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        return True

    def _command_line(self, out: Path) -> list[str]:
        argv = ["qemu-system-x86_64", "-accel", "tcg,thread=multi", "-M", "pc", "-cpu", _PROCESSOR]
        argv += ["-smp", str(self.processors), "-m", str(self.memory_MiB)]
        argv += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
        argv += ["-kernel", str(self.kernel.image), "-initrd", str(self._initramfs())]
        argv += ["-append", f"{_BOOT_OPTIONS} lab.out={out}"]
        # A file, not stdio: with no standard input, QEMU's stdio blocks what the guest writes.
        argv += ["-serial", f"file:{out / 'console'}"]
        shared = "local,security_model=none"
        argv += ["-fsdev", f"{shared},id=host,path=/,readonly=on,multidevs=remap"]
        argv += ["-device", "virtio-9p-pci,fsdev=host,mount_tag=host"]
        argv += ["-fsdev", f"{shared},id=out,path={out}"]
        return [*argv, "-device", "virtio-9p-pci,fsdev=out,mount_tag=out"]

    def _initramfs(self) -> Path:
        busybox = Path(shutil.which("busybox") or "/bin/busybox").read_bytes()
        init = (_HERE / "init").read_bytes()
        source = (_HERE / "initramfs.py").read_bytes()
        inputs = hashlib.sha256(
            b"\0".join((self.kernel.release.encode(), *map(str.encode, _MODULES), init, source))
        )
        inputs.update(busybox)
        file = CACHE / f"initramfs-{inputs.hexdigest()[:12]}"
        if not file.exists():
            for old in CACHE.glob("initramfs-*"):
                old.unlink()
            written = file.with_name(f".{file.name}")
            written.write_bytes(initramfs.build(self.kernel, _MODULES, busybox, init))
            written.rename(file)
        return file


@contextmanager
def _locked(name: str) -> Iterator[None]:
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _text(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


def _tail(out: Path) -> str:
    said = _text(out / "console") + _text(out / "qemu")
    return os.linesep.join(said.splitlines()[-20:])
