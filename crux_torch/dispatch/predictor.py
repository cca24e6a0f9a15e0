"""LiteGD's network (§4.2.2), which predicts the bandwidth of choices across hosts.

It learns from choices that were measured, and again from each new one. A choice within one host is
never predicted: its table has it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from crux_torch.dispatch.cluster import (
    DispatchCluster,
    DispatchError,
    Floats,
    HostTable,
    Ints,
    Predictor,
)
from crux_torch.dispatch.samples import Samples
from crux_torch.files import read_file, write_file

if TYPE_CHECKING:
    from torch import Tensor

#: Hosts of a cluster whose places the network can tell apart.
MAX_HOSTS = 256
#: 3 encoder layers and 3 linear ones of this width have the paper's 642 KB.
_WIDTH, _HEADS, _FEED_FORWARD, _LAYERS = 64, 4, 192, 3
_GIGA = 1e9
#: A new sample that differs by more than this from what was predicted tells of a change.
SURPRISE = 0.2
#: Forgetting is bounded: an update adds at most this to the mean relative error on the earlier
#: samples that it keeps.
FORGOTTEN = 0.02
#: Samples of a host that it takes to tell that the host has changed.
TOLD = 3
#: Samples that it takes to train a network.
FEW = 10
#: Samples that are remembered at most, the newest.
REMEMBERED = 2048
#: Most repeats of a new sample for each replay of an earlier one.
MAX_REPEATS = 8


class Network:
    """LiteGD's predictor: a small Transformer over the hosts of a choice, trained on samples.

    A token is a host that the choice involves: the bandwidth of its part by its own table, how many
    devices it takes, and the host's place. So the number of hosts and devices may change. A
    host that it has not seen has a place without training, and is judged by its table alone.

    Args:
        seed: of the weights and of the order of samples; equal seeds and samples train equally.

    Attributes:
        memory: what it has learned from; None before the first call of :meth:`train`.
    """

    def __init__(self, seed: int = 0) -> None:
        import torch

        self._torch = torch
        self._seed = seed
        self.memory: Samples | None = None
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.module = self.new_module()

    def train(
        self,
        cluster: DispatchCluster,
        samples: Samples,
        epochs: int = 100,
        patience: int = 40,
        progress: Callable[[int, int | None], None] | None = None,
    ) -> int:
        """Learn ``samples``, and again those of earlier calls, so that they are not forgotten.

        Earlier samples of a host go where new ones show that it has changed, and those of a choice
        that was measured again. On those that stay, the mean relative error grows by ``FORGOTTEN``
        at most: weights that forget more are not taken, and those of before the call are always at
        hand. A fifth of the samples tells of progress: a first training stops after ``patience``
        epochs without any. An update goes to its end: at first its steps are large, and the bound
        may refuse them all.

        Args:
            progress: called after each epoch with the number of those done, and of all.

        Returns:
            how many earlier samples stayed.

        Raises:
            DispatchError: for fewer than ten samples, or too many hosts.
        """
        torch = self._torch
        kept = self._kept(cluster, samples)
        known = 0 if kept is None else len(kept)
        if kept is not None:
            samples = kept.joined(samples)
        if len(samples) < FEW or samples.choices.shape[1] > MAX_HOSTS:
            raise DispatchError(
                f"{len(samples)} samples of {samples.choices.shape[1]} hosts: expected {FEW} "
                f"samples or more, of {MAX_HOSTS} hosts or fewer"
            )
        rng = np.random.default_rng(self._seed)
        old, new = rng.permutation(known), known + rng.permutation(len(samples) - known)
        # Few samples are all learned, and all tell of progress.
        held = [rows[: len(rows) // 5] for rows in (old, new) if len(rows) >= FEW]
        checks = [*held, *(rows for rows in (old, new) if 0 < len(rows) < FEW)]
        learn = np.setdiff1d(np.arange(len(samples)), np.concatenate([*held, old[:0]]))
        # New samples repeat until they are as many as the replayed ones.
        again = min(MAX_REPEATS, max(1, len(old) // max(1, len(new))))
        learn = np.concatenate([learn[learn < known], np.repeat(learn[learn >= known], again)])
        tokens = self.tokens(cluster, samples.choices)
        truth = torch.from_numpy(np.log(samples.bandwidth_Bps / _GIGA)).float()

        def errors(rows: Ints) -> Tensor:
            with torch.no_grad():
                found = self.module(*(t[rows] for t in tokens))
            error: Tensor = (found.exp() - truth[rows].exp()).abs()
            return error

        def relative_error(rows: Ints) -> float:
            return float((errors(rows) / truth[rows].exp()).mean())

        self.module.eval()
        best, waited, state = np.inf, 0, _copied(self.module)
        if known:
            best = float(np.mean([float(errors(rows).mean()) for rows in checks]))
            allowed = relative_error(old) + FORGOTTEN
        optimizer = torch.optim.AdamW(self.module.parameters(), lr=2e-3, weight_decay=1e-4)
        plan = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
        for epoch in range(epochs):
            self.module.train()
            rng.shuffle(learn)
            for rows in np.array_split(learn, max(1, len(learn) // 100)):
                optimizer.zero_grad()
                error = self.module(*(t[rows] for t in tokens)) - truth[rows]
                error.abs().mean().backward()
                optimizer.step()
            plan.step()
            if progress is not None:
                progress(epoch + 1, epochs)
            self.module.eval()
            loss = float(np.mean([float(errors(rows).mean()) for rows in checks]))
            if loss < best and (not known or relative_error(old) <= allowed):
                best, waited, state = loss, 0, _copied(self.module)
            elif (waited := waited + 1) >= patience and not known:
                break
        self.module.load_state_dict(state)
        self.module.eval()
        self.memory = samples
        return known

    def error(self, cluster: DispatchCluster, samples: Samples) -> float:
        """The mean relative error on ``samples``."""
        predicted = self.predictor(cluster)(samples.choices)
        return float(np.abs(predicted / samples.bandwidth_Bps - 1).mean())

    def _kept(self, cluster: DispatchCluster, new: Samples) -> Samples | None:
        """Earlier samples, but those of hosts that new ones show to have changed, and of choices
        that were measured again.
        """
        if self.memory is None:
            return None
        changed = changed_hosts(new, self.predictor(cluster)(new.choices))
        choices = self.memory.choices
        again = (choices[:, None] == new.choices).all(axis=-1).any(axis=1)
        kept = np.flatnonzero(~(choices[:, changed] > 0).any(axis=1) & ~again)
        return self.memory.part(kept[-REMEMBERED:])

    def predictor(self, cluster: DispatchCluster) -> Predictor:
        """Bytes/s of choices of ``cluster``: by the table within a host, else by the network."""

        def predict(choices: Ints) -> Floats:
            inside = cluster.inside_Bps(choices).min(axis=1)
            across = (choices > 0).sum(axis=1) > 1
            if across.any():
                with self._torch.no_grad():
                    found = (
                        self.module(*self.tokens(cluster, choices[across])).double().exp().numpy()
                    )
                # A set whose table has no value stays out, whatever the network makes of it.
                inside[across] = np.where(inside[across] > 0, found * _GIGA, 0.0)
            return np.asarray(inside)

        return predict

    def tokens(self, cluster: DispatchCluster, choices: Ints) -> Sequence[Tensor]:
        """Features of each host of each choice, the hosts' places, and which tokens are padding."""
        import torch

        involved = choices > 0
        longest = int(involved.sum(axis=1).max())
        # The hosts that are involved come first, in their order.
        place = np.argsort(~involved, axis=1, kind="stable")[:, :longest]
        padding = ~np.take_along_axis(involved, place, axis=1)
        inside = np.take_along_axis(cluster.inside_Bps(choices), place, axis=1)
        alone = ~np.isfinite(inside)
        rate = np.log(np.maximum(np.where(alone, _GIGA, inside), 1.0) / _GIGA)
        taken = np.take_along_axis(choices, place, axis=1)
        number = (taken[..., None] >> np.arange(16) & 1).sum(axis=-1) / 8
        features = np.stack([rate, alone, number], axis=-1)
        return (
            torch.from_numpy(features).float(),
            torch.from_numpy(place),
            torch.from_numpy(padding),
        )

    def new_module(self) -> torch.nn.Module:  # type: ignore[name-defined] # noqa: F821
        """The network before its training."""
        import torch
        from torch import nn

        class Module(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.enter = nn.Linear(3, _WIDTH)
                self.place = nn.Embedding(MAX_HOSTS, _WIDTH)
                nn.init.zeros_(self.place.weight)
                layer = nn.TransformerEncoderLayer(
                    _WIDTH, _HEADS, _FEED_FORWARD, dropout=0.0, batch_first=True, norm_first=True
                )
                self.encoder = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)
                self.leave = nn.Sequential(
                    *(nn.Linear(_WIDTH, _WIDTH), nn.ReLU()),
                    *(nn.Linear(_WIDTH, _WIDTH // 2), nn.ReLU()),
                    nn.Linear(_WIDTH // 2, 1),
                )

            def forward(self, features: Tensor, place: Tensor, padding: Tensor) -> Tensor:
                x = self.encoder(
                    self.enter(features) + self.place(place), src_key_padding_mask=padding
                )
                # The weakest host decides: the least of each feature over the hosts.
                weakest = x.masked_fill(padding[..., None], torch.inf).amin(dim=1)
                rate: Tensor = self.leave(weakest).squeeze(-1)
                return rate

        return Module()


def _copied(module: torch.nn.Module) -> dict[str, Tensor]:  # type: ignore[name-defined] # noqa: F821
    return {name: value.clone() for name, value in module.state_dict().items()}


def changed_hosts(new: Samples, predicted_Bps: Floats) -> Ints:
    """The fewest hosts that explain surprises, greedily: most of their fastest samples surprised.

    A choice that is limited elsewhere does not show that a link has changed. So of a host's samples
    the fastest fifth counts, by what was measured or predicted, and ``TOLD`` at least. A host with
    fewer samples has not changed: one odd sample is no change.

    Args:
        predicted_Bps: for each new sample.
    """
    surprising = np.abs(predicted_Bps / new.bandwidth_Bps - 1) > SURPRISE
    fastest_first = np.argsort(-np.maximum(predicted_Bps, new.bandwidth_Bps), kind="stable")
    surprising, involved = surprising[fastest_first], new.choices[fastest_first] > 0
    changed: list[int] = []
    left = np.ones(len(new), dtype=bool)
    while (surprising & left).any():
        # Shares of the fastest fifth, and of all samples, which tells equals apart.
        shares: list[tuple[float, float]] = []
        for host in range(involved.shape[1]):
            mine = surprising[involved[:, host] & left]
            fastest = mine[: max(TOLD, len(mine) // 5)]
            shares.append((fastest.mean(), mine.mean()) if len(mine) >= TOLD else (0.0, 0.0))
        host = max(range(len(shares)), key=shares.__getitem__)
        if shares[host][0] <= 0.5:
            break
        changed.append(host)
        left &= ~involved[:, host]
    return np.array(changed, dtype=np.int64)


_VERSION = 1
MAX_FILE_BYTES = 1 << 30
#: Two measurements of one choice that differ by less than this share say the same.
EQUAL = 0.05


def save_network(file: Path, network: Network, hosts: Sequence[str]) -> None:
    """Write a trained ``network`` of ``hosts``, whole or not at all."""
    import torch

    assert network.memory is not None
    content = {
        "version": _VERSION,
        "hosts": list(hosts),
        "weights": network.module.state_dict(),
        "choices": torch.from_numpy(network.memory.choices).int(),
        "bandwidth_Bps": torch.from_numpy(network.memory.bandwidth_Bps),
    }
    packed = io.BytesIO()
    torch.save(content, packed)
    write_file(file, packed.getvalue())


def load_network(file: Path, tables: Sequence[HostTable]) -> tuple[Network, DispatchCluster]:
    """The network in ``file``, and the cluster of ``tables`` in an order that it knows them by.

    Hosts that it does not know come last. The uplinks of the cluster are not known.

    Raises:
        DispatchError: the file is no network's, or a host that it knows has no table.
    """
    import torch

    network = Network()
    try:
        content = torch.load(io.BytesIO(read_file(file, MAX_FILE_BYTES)), weights_only=True)
        if content["version"] != _VERSION:
            raise ValueError(f"version {content['version']}, not {_VERSION}")
        hosts = [str(host) for host in content["hosts"]]
        network.module.load_state_dict(content["weights"])
        choices = content["choices"].numpy().astype(np.int64).reshape(-1, len(hosts))
        memory = Samples(choices, content["bandwidth_Bps"].double().numpy())
    except Exception as error:  # whatever the bytes lead torch to
        raise DispatchError(f"{file} has no network of `crux dispatch learn`: {error}") from None
    network.module.eval()
    by_name = {table.host: table for table in tables}
    if lacking := [host for host in hosts if host not in by_name]:
        raise DispatchError(
            f"{file} has learned of {lacking[0]!r}, which has no --table: give it, or remove the "
            "file and learn again"
        )
    known = [by_name.pop(host) for host in hosts]
    cluster = DispatchCluster([*known, *by_name.values()], np.zeros(len(tables)))
    network.memory = Samples(
        np.pad(memory.choices, ((0, 0), (0, len(by_name)))), memory.bandwidth_Bps
    )
    return network, cluster


def news(network: Network, samples: Samples) -> Samples:
    """Returns the ``samples`` that the network does not remember."""
    memory = network.memory
    if memory is None:
        return samples
    known = {
        choice.tobytes(): rate
        for choice, rate in zip(memory.choices, memory.bandwidth_Bps.tolist(), strict=True)
    }
    rows = [
        i
        for i, (choice, rate) in enumerate(
            zip(samples.choices, samples.bandwidth_Bps.tolist(), strict=True)
        )
        if abs(known.get(choice.tobytes(), 0.0) / rate - 1) > EQUAL
    ]
    return samples.part(np.array(rows, np.int64))
