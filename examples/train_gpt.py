"""Train a byte-level GPT on the sources of Python's standard library, data parallel.

torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --steps 50
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import stdlib_text
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerator import Accelerator
from torch import nn
from training import arguments, start, train

VOCABULARY = 256


class Block(nn.Module):
    """Pre-norm transformer block with causal self-attention."""

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
    """A GPT over bytes, its embedding tied to its output."""

    def __init__(self, args: argparse.Namespace, accelerator: Accelerator) -> None:
        super().__init__()
        self.accelerator = accelerator
        self.embed = nn.Embedding(VOCABULARY, args.width)
        self.position = nn.Embedding(args.context, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.heads) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = self.accelerator.layer(block(x))
        return F.linear(self.norm(x), self.embed.weight)


def next_byte_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(args: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    text = stdlib_text.load()
    generator = torch.Generator().manual_seed(1000 * args.seed + dist.get_rank())
    while True:
        yield stdlib_text.sample(text, args.batch, args.context, generator)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], batch=4, lr=0.05)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=112)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64, help="bytes of a row")
    args = parser.parse_args()

    device = start(args)
    accelerator = Accelerator(args.accelerator_ms, args.layers)
    loss = train(GPT(args, accelerator), accelerator, batches(args), next_byte_loss, device, args)
    if dist.get_rank() == 0:
        print(f"loss {loss:.4f}")
    # Nobody hangs up while another rank is still talking.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
