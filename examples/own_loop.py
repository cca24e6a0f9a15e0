"""Use Crux in your own training loop, without cruxrun: choose the backend, read the profile.

    torchrun --nproc-per-node 2 examples/own_loop.py

``import crux_torch`` registers the backend "crux", which wraps gloo on CPUs and NCCL on GPUs. The
loop ends once the job has been measured, and prints its profile. Without a store (``cruxrun`` hosts
one) Crux warns once and goes on; ``CRUX_STORE=none`` says that there is none.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

import crux_torch


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a loop until Crux has measured it.")
    parser.add_argument("--steps", type=int, default=10_000, help="steps after which it gives up")
    args = parser.parse_args()

    dist.init_process_group("crux")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    inputs = torch.rand(64, 512)
    measured = torch.zeros(1)
    for step in range(args.steps):
        optimizer.zero_grad()
        (model(inputs) - inputs).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if step % 20 == 19:
            # All ranks have to leave the loop after the same step, so rank 0 decides for all.
            measured.fill_(crux_torch.profile() is not None)
            dist.broadcast(measured, 0)
            if measured:
                break
    if dist.get_rank() == 0:
        profile = crux_torch.profile()
        print(profile)
        if profile is not None:
            print(f"an iteration takes {1e3 * profile.period_s:.1f} ms, {profile.flops:.3g} FLOPs")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
