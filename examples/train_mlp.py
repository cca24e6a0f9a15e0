"""Train a wide MLP to predict the next byte from the bytes before it, data parallel.

Few rows a step and wide layers: few FLOPs for each byte of gradient that goes over the network.

    torchrun --standalone --nproc-per-node 2 examples/train_mlp.py --steps 50
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


class MLP(nn.Module):
    """The bytes of a window, embedded side by side, through wide layers to the byte after it."""

    def __init__(self, args: argparse.Namespace, accelerator: Accelerator) -> None:
        super().__init__()
        self.accelerator = accelerator
        self.embed = nn.Embedding(VOCABULARY, args.embedding)
        widths = [args.context * args.embedding, *[args.width] * args.layers]
        self.layers = nn.ModuleList(map(nn.Linear, widths, widths[1:]))
        self.head = nn.Linear(args.width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens).flatten(1)
        for layer in self.layers:
            x = self.accelerator.layer(F.relu(layer(x)))
        return self.head(x)


def batches(args: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    text = stdlib_text.load()
    generator = torch.Generator().manual_seed(1000 * args.seed + dist.get_rank())
    while True:
        windows, following = stdlib_text.sample(text, args.batch, args.context, generator)
        yield windows, following[:, -1]


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], batch=16, lr=0.02)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=704)
    parser.add_argument("--context", type=int, default=32, help="bytes of a window")
    parser.add_argument("--embedding", type=int, default=24)
    args = parser.parse_args()

    device = start(args)
    accelerator = Accelerator(args.accelerator_ms, args.layers)
    loss = train(MLP(args, accelerator), accelerator, batches(args), F.cross_entropy, device, args)
    if dist.get_rank() == 0:
        print(f"loss {loss:.4f}")
    # Nobody hangs up while another rank is still talking.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
