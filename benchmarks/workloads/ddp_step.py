"""The training step that benchmarks time in a process group."""

from __future__ import annotations

from collections.abc import Callable


def ddp_step(device: str = "cpu") -> Callable[[], None]:
    """One step of DDP on six linear layers, in buckets of 2 MB; every rank calls it."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512) for _ in range(6)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device), bucket_cap_mb=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(64, 512).to(device)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step
