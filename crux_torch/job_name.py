"""Facts that launchers tell a job's processes: the job's name, and each one's place on its host."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Mapping

#: Variables with a job's id, and what goes before it in a name; the first that is set counts.
LAUNCH_IDS = {
    "SLURM_JOB_ID": "slurm-",
    "RAY_JOB_ID": "ray-",
    "PET_RDZV_ID": "",
    "TORCHELASTIC_RUN_ID": "",
}
#: Variables with a process's number on its host: of torchrun, Open MPI, Hydra (Intel MPI, MPICH),
#: and srun; the first that is set counts, because a later one's processes start an earlier one's.
LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
#: The pod's namespace, which `crux env --format kubernetes` sets.
NAMESPACE = "POD_NAMESPACE"
#: Set in every container of Kubernetes.
IN_KUBERNETES = "KUBERNETES_SERVICE_HOST"
LOOPBACK = ("localhost", "127.", "[::1]", "::1")
#: Longest readable part of a name.
MAX_STEM = 100
_UUID = re.compile(r"[\da-f]{8}(-[\da-f]{4}){3}-[\da-f]{12}")


def job_name(stem: str, suffix: str) -> str:
    """Returns ``stem-suffix``, with ``stem`` cut and spelt so that it may be a job's name."""
    readable = re.sub(r"[^A-Za-z0-9._:@+-]+", "-", stem).lstrip("._:@+-")[:MAX_STEM] or "job"
    return f"{readable}-{suffix}"


def digest(*parts: str) -> str:
    """Returns a short hash of ``parts``, the suffix of a name."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def rendezvous(address: str) -> str:
    """Returns ``address`` as no other host has it: a loopback address with this host's name."""
    return f"{socket.gethostname()}/{address}" if address.startswith(LOOPBACK) else address


def name_of_launch(env: Mapping[str, str], script: str) -> str:
    """Returns the job's name from the variables that its launcher set; "" if there are none.

    torchrun, Kubeflow, Slurm and Ray give a job's processes its id. Several jobs may share one id,
    as two in one Slurm allocation do. So the name ends in a hash of all ids and the rendezvous. A
    process of ``srun`` whose script alone knows the rendezvous has its step's number there. In
    Kubernetes, a job without an id has the name of its first pod, by which the others reach it.

    Args:
        script: path of the training script; names a job that has no readable id.
    """
    address, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if address and port:
        met = (rendezvous(address), port)
    elif env.get("SLURM_JOB_ID") and env.get("SLURM_STEP_ID") and env.get("SLURM_PROCID"):
        met = ("step", env["SLURM_STEP_ID"])
    else:
        return ""
    ids = {name: env.get(name, "") for name in LAUNCH_IDS}
    stem = os.path.splitext(os.path.basename(script))[0]
    for name, prefix in LAUNCH_IDS.items():
        if ids[name] not in ("", "none") and not _UUID.fullmatch(ids[name]):
            stem = prefix + ids[name]
            break
    else:
        if env.get(IN_KUBERNETES) and address[:1].isalpha() and address != "localhost":
            stem = address.partition(".")[0]
    namespace = [env[NAMESPACE]] if env.get(NAMESPACE) else []
    return job_name(stem, digest(*ids.values(), *met, *namespace))


def local_rank(env: Mapping[str, str]) -> int | None:
    """Returns the process's number among those of its host, from 0; None if no launcher tells."""
    text = next((env[name] for name in LOCAL_RANKS if env.get(name)), "")
    return int(text) if text.isdecimal() else None


def may_host_store(rank: int, env: Mapping[str, str]) -> bool:
    """Returns True for one rank of each host, or for all where no launcher tells a local rank.

    Of several on one host, the first that binds the store's place hosts it; the others stand by.
    """
    return rank == 0 or local_rank(env) in (0, None)
