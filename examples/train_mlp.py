"""Train a wide MLP to predict the next byte of Python's own sources, data parallel.

    cruxrun --nproc-per-node 2 examples/train_mlp.py

Nothing in the script is about Crux; ``torchrun`` starts it, too. After half a minute,
``crux status`` in another shell shows what Crux measured of the job.
"""

from __future__ import annotations

import argparse

import stdlib_text
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class MLP(nn.Module):
    """Embeds the bytes of a window side by side; wide layers predict the byte after the window.

    Each step has few rows, so there is little computation for each byte of gradient.
    """

    def __init__(
        self, layers: int = 2, width: int = 704, context: int = 32, embedding: int = 24
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, embedding)
        widths = [context * embedding, *[width] * layers]
        self.layers = nn.ModuleList(map(nn.Linear, widths, widths[1:]))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens).flatten(1)
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a wide MLP, data parallel.")
    parser.add_argument("--steps", type=int, default=4000, help="training steps")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(MLP())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    text = stdlib_text.load()
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(args.steps):
        windows, following = stdlib_text.sample(text, 16, 32, generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(windows), following[:, -1])
        loss.backward()
        optimizer.step()
        if step % 200 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
