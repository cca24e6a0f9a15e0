"""Gradient-boosted trees that predict the bandwidth of choices across hosts: a baseline."""

from __future__ import annotations

import numpy as np
from sklearn.ensemble import HistGradientBoostingRegressor

from crux_torch.dispatch.cluster import DispatchCluster, Floats, Ints, Predictor
from crux_torch.dispatch.predictor import Samples


class Trees:
    """scikit-learn's histogram trees over what LiteGD's network sees (§4.2.3).

    A choice has the bandwidth within each host by its table and how many devices it takes there
    (missing where the host is not involved), and over all hosts the least bandwidth, the number of
    hosts and the number of devices. Hosts beyond those of the training have no column of their own.

    Args:
        seed: of whatever scikit-learn draws.
    """

    def __init__(self, cluster: DispatchCluster, samples: Samples, seed: int = 0) -> None:
        self._hosts = len(cluster.tables)
        # Squares: of the absolute error the trees stop at the median where most samples are equal.
        self._model = HistGradientBoostingRegressor(
            max_iter=300, min_samples_leaf=5, early_stopping=False, random_state=seed
        )
        self._model.fit(self._features(cluster, samples.choices), np.log(samples.bandwidth_Bps))

    def predictor(self, cluster: DispatchCluster) -> Predictor:
        """Bytes/s of choices of ``cluster``: by the table within a host, else by the trees."""

        def predict(choices: Ints) -> Floats:
            inside = cluster.inside_Bps(choices).min(axis=1)
            across = (choices > 0).sum(axis=1) > 1
            if across.any():
                found = np.exp(self._model.predict(self._features(cluster, choices[across])))
                inside[across] = np.where(inside[across] > 0, found, 0.0)
            return np.asarray(inside)

        return predict

    def _features(self, cluster: DispatchCluster, choices: Ints) -> Floats:
        involved = choices > 0
        inside = cluster.inside_Bps(choices)
        number = (choices[..., None] >> np.arange(16) & 1).sum(axis=-1)
        each = np.stack([np.where(np.isfinite(inside), inside, 1e15), number], axis=-1)
        each = np.where(involved[..., None], each, np.nan)[:, : self._hosts]
        least = np.minimum(inside.min(axis=1), 1e15)
        whole = np.stack([least, involved.sum(axis=1), number.sum(axis=1)], axis=1)
        return np.concatenate([each.reshape(len(choices), -1), whole], axis=1)
