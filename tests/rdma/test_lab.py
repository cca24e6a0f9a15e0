"""The lab itself: what it boots, what it hands back, and what it says where it can't."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from lab.rdma import initramfs, requirement
from lab.rdma.guest import Guest, GuestError
from lab.rdma.kernel import Kernel
from lab.rdma.requirement import LabUnavailableError


def fake_kernel(tmp_path: Path) -> Kernel:
    """Modules of which one needs two others, one of them by a name that is spelled otherwise."""
    folder = tmp_path / "modules"
    (folder / "kernel").mkdir(parents=True)
    for name, depends in (
        ("top", "left-part,bottom"),
        ("left-part", "bottom"),
        ("bottom", ""),
        ("other", "within"),
    ):
        code = f"ELF\0license=GPL\0depends={depends}\0name={name}\0".encode()
        (folder / "kernel" / f"{name}.ko").write_bytes(code)
    (folder / "modules.builtin").write_text("kernel/fs/within.ko\n")
    return Kernel("1.2.3", tmp_path / "vmlinuz", folder)


def unpacked(archive: bytes, folder: Path) -> Path:
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("no busybox to read the archive with")
    folder.mkdir()
    subprocess.run([busybox, "cpio", "-idm"], input=archive, cwd=folder, check=True, timeout=120)
    return folder


def test_modules_are_loaded_after_what_they_need(tmp_path: Path) -> None:
    archive = initramfs.build(fake_kernel(tmp_path), ["top", "other"], b"shell", b"first")
    found = unpacked(archive, tmp_path / "root")
    order = (found / "modules" / "order").read_text().split()
    assert order == ["bottom", "left_part", "top", "other"]
    assert {file.name for file in (found / "modules").glob("*.ko")} == {f"{m}.ko" for m in order}
    assert (found / "init").read_bytes() == b"first"
    assert (found / "init").stat().st_mode & 0o777 == 0o755
    assert (found / "bin" / "busybox").read_bytes() == b"shell"
    assert (found / "bin" / "sh").readlink() == Path("busybox")


def test_a_module_that_the_kernel_has_not_is_named(tmp_path: Path) -> None:
    with pytest.raises(LabUnavailableError, match=r"1\.2\.3 has no module missing"):
        initramfs.build(fake_kernel(tmp_path), ["missing"], b"", b"")


def test_missing_programs_are_said_by_their_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(requirement.PROGRAMS, "no-such-program", "a-package")
    with pytest.raises(LabUnavailableError, match="a-package"):
        requirement.check(tmp_path)


def test_too_small_a_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirement, "PROGRAMS", {})
    monkeypatch.setattr(requirement, "PROVIDER", "*")
    monkeypatch.setattr(requirement, "NEEDED_BYTES", 1 << 62)
    with pytest.raises(LabUnavailableError, match="MiB free"):
        requirement.check(tmp_path)


def test_a_command_gives_back_what_it_did_and_leaves_the_host_alone(
    guest: Guest, tmp_path: Path
) -> None:
    beside = tmp_path / "beside"
    script = f"echo said; echo complained >&2; echo x >{beside}; cat {beside}; echo y >kept; exit 7"
    done = guest.run(script, timeout_s=90)
    assert (done.status, done.stdout, done.stderr) == (7, "said\nx\n", "complained\n")
    assert (done.out / "kept").read_text() == "y\n"
    assert not beside.exists(), "what the guest writes elsewhere stays in its memory"
    shutil.rmtree(done.out)


def test_a_command_without_an_end_is_stopped(guest: Guest) -> None:
    done = guest.run("sleep 1000", timeout_s=3)
    assert done.status is None
    assert not list(done.out.glob("status"))
    shutil.rmtree(done.out)


def test_a_machine_that_breaks_down_is_told_from_a_command_that_fails(guest: Guest) -> None:
    with pytest.raises(GuestError, match="no status") as caught:
        guest.run("exec busybox poweroff -f", timeout_s=90)
    shutil.rmtree(caught.value.out)
