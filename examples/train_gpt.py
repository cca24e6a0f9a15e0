"""Train a small GPT on the sources of Python's standard library, data parallel.

    cruxrun --nproc-per-node 2 examples/train_gpt.py

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


class Block(nn.Module):
    """A pre-norm transformer block with causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        heads = (rows, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm1(x)).view(heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A GPT over bytes. Its output layer shares the weights of its embedding."""

    def __init__(
        self, layers: int = 4, width: int = 112, context: int = 64, heads: int = 4
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embed.weight)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT, data parallel.")
    parser.add_argument("--steps", type=int, default=2000, help="training steps")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    text = stdlib_text.load()
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(args.steps):
        tokens, following = stdlib_text.sample(text, 4, 64, generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())
        loss.backward()
        optimizer.step()
        if step % 100 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
