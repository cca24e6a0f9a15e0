"""The package's shim for libibverbs, made on the host for programs in the guest."""

from __future__ import annotations

import json
import os

from crux_torch.apply import verbs_shim
from crux_torch.apply.transport import LIBRARY
from lab.rdma.guest import CACHE
from lab.rdma.requirement import LabUnavailableError


def environment() -> str:
    """JSON of the variables that put the shim before a program.

    The guest sees the same files under the same names, so what fits the host's libibverbs fits
    there.

    Raises:
        LabUnavailableError: it was not built.
    """
    for library in (verbs_shim.TEMPLATE, LIBRARY):
        if not library.exists():
            raise LabUnavailableError(f"{library.name} was not built (libibverbs-dev, make setup)")
    made = verbs_shim.environment({**os.environ, "XDG_CACHE_HOME": str(CACHE)})
    # An empty one would let every program succeed without a shim: the tests would tell, but
    # not why.
    assert made, "no shim could be made for the installed libibverbs; see the log"
    return json.dumps(made)
