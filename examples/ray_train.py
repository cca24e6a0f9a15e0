"""Ray Train with two workers that attach Crux, on one machine over Gloo: docs/start/ray.md."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train() -> None:
    import time
    from pathlib import Path

    import torch
    import torch.distributed as dist

    import crux_torch

    gradient = torch.ones(1 << 16)
    for _ in range(200):
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
        time.sleep(0.02)
    status = crux_torch.status()
    told = {
        "rank": dist.get_rank(),
        "attached": status["attached"],
        "job": status.get("job"),
        "recorded": status["recorder"]["recorded"],
        "preloaded": "libcrux_transport" in Path("/proc/self/maps").read_text(),
        "left_out": (status["leader"] or {}).get("left_out"),
    }
    print(json.dumps(told), flush=True)


def main() -> None:
    """Train with the --crux-* flags of the command line."""
    command = ["crux", "env", "--format", "json", *sys.argv[1:]]
    variables = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    # Of this host; a worker on another one takes its own.
    variables.pop("CRUX_HOST", None)
    ray.init(num_cpus=3, include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            train,
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2),
            # Only the workers: Ray's own processes need no Crux.
            run_config=RunConfig(storage_path=folder, worker_runtime_env={"env_vars": variables}),
        ).fit()


if __name__ == "__main__":
    main()
