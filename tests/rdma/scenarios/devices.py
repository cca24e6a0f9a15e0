"""What the package finds of two Soft-RoCE devices, by sysfs and by Debian's pyverbs."""

from __future__ import annotations

import os
from pathlib import Path

from lab.network import connect_pair
from lab.recorder import Recorder

_ROOT = Path(__file__).resolve().parents[3]
_LIST = """
import dataclasses, json
from crux_torch.fabric.rdma import rdma_devices
print(json.dumps([dataclasses.asdict(device) for device in rdma_devices()]))
"""


def main() -> None:
    recorder = Recorder()
    connect_pair()
    env = {**os.environ, "PYTHONPATH": f"{_ROOT}:{_ROOT / 'launcher'}"}
    recorder.run("devices", ["/usr/bin/python3", "-B", "-c", _LIST], env)


if __name__ == "__main__":
    main()
