"""A scheduler extender for Kubernetes: kube-scheduler asks which nodes a pod may use, and prefers.

kube-scheduler posts ``ExtenderArgs`` as JSON, and reads ``ExtenderFilterResult`` and
``HostPriorityList`` (k8s.io/kube-scheduler/extender/v1). The kubelet chooses GPUs too late to
choose nodes, so this comes before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from threading import Lock
from typing import Any

import numpy as np

from crux_torch.dispatch.cluster import DispatchError
from crux_torch.dispatch.dispatcher import Dispatcher
from crux_torch.errors import CruxError

RESOURCE = "nvidia.com/gpu"
#: Annotations or labels of a pod: GPUs of all pods of its job, and the job's name.
JOB_GPUS, JOB = "crux-torch/job-gpus", "crux-torch/job"
#: ``MaxExtenderPriority``.
MAX_SCORE = 10
#: The most GPUs that one job, or one pod, may ask for.
MAX_GPUS = 1 << 20
#: Seconds for which the pods of one job are sent to the same nodes.
REMEMBERED_S = 600.0
#: Choices that are compared for nodes' scores.
COMPARED = 8


class Extender:
    """Answers kube-scheduler. Threads may call it at once.

    Args:
        dispatcher: gives the hosts and what runs on them now. May raise a CruxError.
    """

    def __init__(
        self, dispatcher: Callable[[], Dispatcher], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._dispatcher, self._clock = dispatcher, clock
        self._nodes_of: dict[str, tuple[float, frozenset[str]]] = {}
        self._lock = Lock()

    def filter(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """``ExtenderFilterResult``: the nodes with enough free GPUs, and why others lack them."""
        wanted, names = gpus_of(args["Pod"]), _names(args)
        failed: dict[str, str] = {}
        if wanted:
            try:
                dispatcher = self._dispatcher()
            except CruxError as error:
                return {"Error": str(error)}
            free = {
                table.host: bin(members).count("1")
                for table, members in zip(
                    dispatcher.cluster.tables, dispatcher.free.tolist(), strict=True
                )
            }
            for name in names:
                if name not in free:
                    failed[name] = "there is no table of its GPUs: crux dispatch measure"
                elif free[name] < wanted:
                    failed[name] = f"{wanted} GPUs asked for, and {free[name]} are free"
        result: dict[str, Any] = {"FailedNodes": failed, "Error": ""}
        if args.get("Nodes") is not None:
            kept = [n for n in args["Nodes"]["items"] if n["metadata"]["name"] not in failed]
            result["Nodes"] = {**args["Nodes"], "items": kept}
        else:
            result["NodeNames"] = [name for name in names if name not in failed]
        return result

    def prioritize(self, args: Mapping[str, Any]) -> list[dict[str, Any]]:
        """``HostPriorityList``: 10 for the nodes of the best choice, 0 for the worst.

        A pod whose job has more GPUs than the pod itself is sent to the nodes of the best choice
        for the whole job, and the job's other pods to the same.

        Raises:
            CruxError: the hosts, or the jobs that run, can't be told.
        """
        pod, names = args["Pod"], _names(args)
        wanted = gpus_of(pod)
        scores = dict.fromkeys(names, 0)
        if wanted:
            total = max(wanted, _gpus(_noted(pod, JOB_GPUS) or 0))
            if total > wanted:
                scores |= dict.fromkeys(self._nodes_for(pod, names, wanted, total), MAX_SCORE)
            else:
                scores |= self._scores(names, wanted)
        return [{"Host": name, "Score": scores[name]} for name in names]

    def _scores(self, names: Sequence[str], wanted: int) -> dict[str, int]:
        """Each node by the best choice on it alone."""
        dispatcher = self._dispatcher()
        worth = {}
        known = {table.host for table in dispatcher.cluster.tables}
        for name in known.intersection(names):
            try:
                best = next(dispatcher.choices(wanted, [name]))
            except DispatchError:
                continue
            worth[name] = best.worth
        if not worth:
            return {}
        low, high = min(worth.values()), max(worth.values())
        if not np.isfinite(high) or high == low:
            return dict.fromkeys(worth, MAX_SCORE)
        return {n: round(MAX_SCORE * (w - low) / (high - low)) for n, w in worth.items()}

    def _nodes_for(
        self, pod: Mapping[str, Any], names: Sequence[str], wanted: int, total: int
    ) -> frozenset[str]:
        """The nodes of the job's best choice, which the job's first pod decides."""
        key = _job_of(pod)
        with self._lock:
            now = self._clock()
            known = {k: v for k, v in self._nodes_of.items() if now - v[0] < REMEMBERED_S}
            self._nodes_of = known
            if key in known and known[key][1] & set(names):
                return known[key][1] & set(names)
            dispatcher = self._dispatcher()
            unit = wanted if total % wanted == 0 else 1
            best = max(
                islice(dispatcher.choices(total, names, unit), COMPARED), key=lambda one: one.worth
            )
            nodes = frozenset(dispatcher.cluster.names(best.choice))
            if key:
                self._nodes_of[key] = now, nodes
            return nodes


def gpus_of(pod: Mapping[str, Any]) -> int:
    """The GPUs that a pod's containers ask for."""
    total = 0
    for container in pod.get("spec", {}).get("containers") or ():
        resources = container.get("resources") or {}
        asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
        total += _gpus(asked.get(RESOURCE, 0))
    return total


def _gpus(told: Any) -> int:
    count = int(told)
    if not 0 <= count <= MAX_GPUS:
        raise ValueError(f"{count} GPUs asked for: expected 0 to {MAX_GPUS}")
    return count


def labels(dispatcher: Dispatcher) -> dict[str, dict[str, str]]:
    """Labels of each host's node: GB/s of its best sets, and of its link, in whole numbers.

    Kubernetes compares whole numbers alone (the operators Gt and Lt of a node's affinity).
    """
    found: dict[str, dict[str, str]] = {}
    for number, table in enumerate(dispatcher.cluster.tables):
        rates: dict[int, float] = {}
        for members, rate_Bps in enumerate(table.array.tolist()):
            size = bin(members).count("1")
            if size > 1:
                rates[size] = max(rates.get(size, 0.0), rate_Bps)
        found[table.host] = {
            f"crux-torch/gbps-{size}": f"{rate / 1e9:.0f}" for size, rate in rates.items() if rate
        }
        uplink_Bps = float(dispatcher.cluster.uplink_Bps[number])
        if uplink_Bps:
            found[table.host]["crux-torch/uplink-gbps"] = f"{uplink_Bps / 1e9:.0f}"
    return found


def _names(args: Mapping[str, Any]) -> list[str]:
    if args.get("Nodes") is not None:
        return [str(node["metadata"]["name"]) for node in args["Nodes"]["items"]]
    return [str(name) for name in args.get("NodeNames") or ()]


def _noted(pod: Mapping[str, Any], key: str) -> str | None:
    meta = pod.get("metadata") or {}
    value = (meta.get("annotations") or {}).get(key) or (meta.get("labels") or {}).get(key)
    return None if value is None else str(value)


def _job_of(pod: Mapping[str, Any]) -> str:
    """What the pods of one job have in common; empty where nothing tells."""
    meta = pod.get("metadata") or {}
    owners = meta.get("ownerReferences") or [{}]
    name = _noted(pod, JOB) or str(owners[0].get("uid", ""))
    return f"{meta.get('namespace', '')}/{name}" if name else ""
