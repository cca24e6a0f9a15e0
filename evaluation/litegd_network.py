"""LiteGD's network as the paper prints it (§4.2.2): a token for each GPU, and a mask.

Printed are 3 encoder layers, 3 linear ones, 642 KB, the bandwidth within each host as an input, and
the mask of the chosen GPUs. With a width of 64, 256 in the feed-forward layers and 64 GPUs, the
network has these 642 KB. The mean over the tokens and the training are not printed: the training is
that of our network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from crux_torch.dispatch.cluster import DispatchCluster, Ints
from crux_torch.dispatch.predictor import Network
from evaluation.dispatch import (
    Method,
    case,
    efficacy,
    mae_GBps,
    measured,
    remembered,
    searched,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_GPUS, _HOST, _WIDTH, _HEADS, _LAYERS = 64, 8, 64, 4, 3


class GpuTokens(Network):
    """A token is a chosen GPU: its number in the cluster, and the bandwidth of its host's part."""

    def tokens(self, cluster: DispatchCluster, choices: Ints) -> Sequence[Tensor]:
        """Features of each chosen GPU of each choice, the GPUs' numbers, and the mask."""
        import torch

        chosen = (choices[..., None] >> np.arange(_HOST) & 1).reshape(len(choices), -1) > 0
        longest = int(chosen.sum(axis=1).max())
        number = np.argsort(~chosen, axis=1, kind="stable")[:, :longest]
        rate = np.take_along_axis(cluster.inside_Bps(choices), number // _HOST, axis=1)
        alone = ~np.isfinite(rate)
        log = np.log(np.maximum(np.where(alone, 1e9, rate), 1.0) / 1e9)
        features = np.stack([log, alone], axis=-1)
        return (
            torch.from_numpy(features).float(),
            torch.from_numpy(number),
            torch.from_numpy(~np.take_along_axis(chosen, number, axis=1)),
        )

    def new_module(self) -> torch.nn.Module:
        """The network before its training."""
        import torch
        from torch import nn

        class Module(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.enter = nn.Linear(2, _WIDTH)
                self.number = nn.Embedding(_GPUS, _WIDTH)
                layer = nn.TransformerEncoderLayer(
                    _WIDTH, _HEADS, 4 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True
                )
                self.encoder = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)
                self.leave = nn.Sequential(
                    *(nn.Linear(_WIDTH, _WIDTH), nn.ReLU()),
                    *(nn.Linear(_WIDTH, _WIDTH // 2), nn.ReLU()),
                    nn.Linear(_WIDTH // 2, 1),
                )

            def forward(self, features: Tensor, number: Tensor, mask: Tensor) -> Tensor:
                # Choices of like length go together: padding takes most of the time otherwise.
                tokens = (~mask).sum(dim=1)
                order = tokens.argsort()
                rates = []
                for rows in order.tensor_split(4 if len(order) > _WIDTH else 1):
                    most = int(tokens[rows].max())
                    rates.append(self.rate(*(t[rows, :most] for t in (features, number, mask))))
                return torch.cat(rates)[order.argsort()]

            def rate(self, features: Tensor, number: Tensor, mask: Tensor) -> Tensor:
                x = self.enter(features) + self.number(number)
                x = self.encoder(x, src_key_padding_mask=mask)
                x = x.masked_fill(mask[..., None], 0.0).sum(dim=1)
                rate: Tensor = self.leave(x / (~mask).sum(dim=1, keepdim=True)).squeeze(-1)
                return rate

        return Module()


def printed(kinds: Sequence[str], seed: int) -> tuple[dict[str, float], dict[str, float]]:
    """The network as printed beside ours, after the same 500 samples of four hosts.

    Returns:
        the error in GB/s on 500 other choices, and mean GBE of Algorithm 1 over every third k, each
        by network.
    """
    one = case(kinds, seed, hosts=4, samples=500)
    test = measured(one.cluster, 500, np.random.default_rng(seed + 1))
    networks = {"ours": Network(seed), "as printed": GpuTokens(seed)}
    errors, chosen = {}, dict[str, Method]()
    for name, network in networks.items():
        network.train(one.cluster, one.samples)
        predict = network.predictor(one.cluster)
        errors[name] = mae_GBps(predict(test.choices), test)
        chosen[name] = searched(one.cluster, one.free, remembered(predict))
    found = efficacy(one, chosen, step=3)
    return errors, {name: float(np.mean(gbe)) for name, gbe in found.items()}
