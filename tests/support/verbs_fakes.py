"""An RDMA device in memory as installed libraries: a libibverbs of its own release, a libmlx5, and
a client that is linked to them. Built by the first test that asks."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
from places import TESTS

from crux_torch.apply import verbs_shim
from crux_torch.apply.transport import LIBRARY

SOURCES = TESTS / "cpp"
#: Before each script: the client, under whatever stands in for libibverbs.
PREAMBLE = """
import ctypes, errno, os, sys
from crux_torch.apply.wire import QueuePairs
from crux_torch.apply.transport import Route, Transport, TransportError
client = ctypes.CDLL(os.environ["VERBS_CLIENT"])
for name in ("pair", "close"):
    getattr(client, "client_" + name).restype = ctypes.c_bool
client.client_number.restype = ctypes.c_uint32
device = ctypes.CDLL(os.environ["FAKE_IBVERBS"])
mlx5 = ctypes.CDLL(os.environ["FAKE_MLX5"]) if "FAKE_MLX5" in os.environ else None
for name in ("port", "class"):
    getattr(device, "fake_wire_" + name).restype = ctypes.c_uint32
def wire(end):
    number = client.client_number(end)
    return device.fake_wire_port(number), device.fake_wire_class(number)
"""
EPILOGUE = """
assert client.client_close()
"""


@dataclass(frozen=True)
class Fakes:
    """Paths of what was built."""

    ibverbs: Path
    mlx5: Path
    client: Path

    def environment(self, cache: Path, *, mlx5: bool = False, **more: str) -> dict[str, str]:
        """Command that runs a program over the device, under the shim."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("CRUX_", "LD_"))}
        programs = verbs_shim.prepare(
            self.ibverbs, verbs_shim.PROGRAM_NAME, {"XDG_CACHE_HOME": str(cache)}
        )
        env["LD_PRELOAD"] = f"{LIBRARY}:{programs}"
        env["VERBS_CLIENT"] = str(self.client)
        env["FAKE_IBVERBS"] = str(self.ibverbs)
        if mlx5:
            env["FAKE_MLX5"] = str(self.mlx5)
        # Without it, the installed libmlx5 would be asked about a device that it does not know.
        env["LD_LIBRARY_PATH"] = str(self.mlx5.parent if mlx5 else self.mlx5.parent / "broken")
        return {**env, **more}

    def run(self, script: str, cache: Path, *, mlx5: bool = False, **more: str) -> str:
        """The output of ``script`` with PREAMBLE before it and EPILOGUE behind."""
        code = PREAMBLE + textwrap.dedent(script) + EPILOGUE
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=self.environment(cache, mlx5=mlx5, **more),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr


def build(folder: Path) -> Fakes:
    """Compiles them into ``folder``; skips where that is not possible."""
    for library in (verbs_shim.TEMPLATE, LIBRARY):
        if not library.exists():
            pytest.skip(f"{library.name} was not built (libibverbs-dev)")
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no compiler {compiler[0]}")
    ibverbs, mlx5 = folder / "libibverbs.so.1.99", folder / "libmlx5.so.1"
    client = folder / "client.so"
    version_script = f"-Wl,--version-script={SOURCES / 'fake_ibverbs.map'}"
    for made, soname, *inputs in (
        (ibverbs, "libibverbs.so.1", version_script, "fake_ibverbs.cc", "fake_ibverbs_library.cc"),
        (mlx5, "libmlx5.so.1", "fake_mlx5.cc"),
        (client, "client.so", "verbs_client.cc", str(ibverbs)),
    ):
        flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", f"-Wl,-soname,{soname}"]
        command = [*compiler, *flags, *inputs, "-o", str(made)]
        subprocess.run(command, cwd=SOURCES, check=True, timeout=120)
    (folder / "broken").mkdir()
    (folder / "broken" / "libmlx5.so.1").write_bytes(b"")
    return Fakes(ibverbs, mlx5, client)
