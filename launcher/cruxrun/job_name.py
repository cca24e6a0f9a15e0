"""What a job is called in the cluster when its user gives no name."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import uuid
from argparse import Namespace

from torch.distributed.run import parse_min_max_nnodes

_LOOPBACK = ("localhost", "127.", "[::1]", "::1")
_NO_ID = ("", "none")
_LONGEST = 100


def job_name(args: Namespace) -> str:
    """A name that all nodes of the job make alike and that no other job of the cluster makes.

    Before the rendezvous, the nodes of a job share only its id and its endpoint. The name is made
    from both, because people copy the id from one script to the next. The name of a job on one
    node ends in a random suffix.

    Args:
        args: the parsed command line, before torchrun fills in what ``--standalone`` implies.
    """
    run_id = args.rdzv_id if args.rdzv_id not in _NO_ID and not args.standalone else ""
    stem = run_id or os.path.splitext(os.path.basename(args.training_script))[0]
    if args.standalone or parse_min_max_nnodes(args.nnodes)[1] == 1:
        suffix = uuid.uuid4().hex[:8]
    else:
        endpoint = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port or 29500}"
        if endpoint.startswith(_LOOPBACK):
            endpoint = f"{socket.gethostname()}/{endpoint}"
        suffix = hashlib.sha256(f"{run_id}\n{endpoint}".encode()).hexdigest()[:8]
    readable = re.sub(r"[^A-Za-z0-9._:@+-]+", "-", stem).lstrip("._:@+-")[:_LONGEST] or "job"
    return f"{readable}-{suffix}"
