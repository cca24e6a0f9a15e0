"""Several NCCL ranks on one GPU: the environment in which each takes the others for other hosts.

NCCL's maintainers do not support this, and it serves tests and demonstrations only. Without MPS the
ranks share the GPU by time slices, so that a collective takes milliseconds.
"""

from __future__ import annotations

#: Everything goes through TCP sockets, by one thread block: ranks of other processes must get their
#: slices of the GPU, and the network must be what a collective waits for.
_SOCKETS_ONLY = {
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NET_GDR_LEVEL": "LOC",
    "NCCL_MIN_CTAS": "1",
    "NCCL_MAX_CTAS": "1",
    # Its threads listen on every interface, which a rank of a namespace of its own has no use for.
    "NCCL_RAS_ENABLE": "0",
}


def environment(job: str, rank: int, interface: str) -> dict[str, str]:
    """Variables of one rank, to be set before its process starts.

    Args:
        job: tells the ranks of this job from those of others on the GPU.
        rank: of the process in its job.
        interface: network interface that it reaches the other ranks by.
    """
    return _SOCKETS_ONLY | {
        # Up to NCCL 2.29 a GPU is taken for a second one by the identity of its host.
        "NCCL_HOSTID": f"{job}.{rank}",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        # Exactly this name: without the sign it is a prefix.
        "NCCL_SOCKET_IFNAME": f"={interface}",
    }
