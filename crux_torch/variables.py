"""The environment variables of Crux: one that nobody reads is a setting that was misspelt."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from crux_torch.settings import SETTINGS

#: Those that are no settings. The launcher's and the transport library's come first, then those of
#: the build, the lab and the tests.
NO_SETTINGS = (
    "CRUX_JOB_OF",
    "CRUX_LD_PRELOAD_THEN",
    "CRUX_TRANSPORT_LOG",
    "CRUX_TRANSPORT_PROBE_MS",
    "CRUX_TRANSPORT_ROUTES",
    "CRUX_TRANSPORT_STEER_ALL",
    "CRUX_BUILD",
    "CRUX_DEMO_USER_NAMESPACE",
    "CRUX_FAULT_ROUNDS",
    "CRUX_FAULT_RUNS",
    "CRUX_FAULT_SEED",
    "CRUX_GPU_RESULTS",
    "CRUX_GPU_SWITCHES",
    "CRUX_LAB_LIBNCCL",
    "CRUX_SOAK_MINUTES",
    "CRUX_SOAK_SEED",
    "CRUX_TEST_GPU",
)
#: What Kubernetes tells every container about a service called crux or crux-...
_SERVICE = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)|_PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?")


def misspelt(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of ``env`` that begin with ``CRUX_`` and that nobody reads.

    Returns:
        for each the setting with the most similar name; empty if none is similar.
    """
    settings = [setting.env for setting in SETTINGS]
    known = {*settings, *NO_SETTINGS}
    found = {}
    for name in sorted(env):
        if name.startswith("CRUX_") and name not in known and not _is_of_a_service(name, env):
            alike = difflib.get_close_matches(name.upper(), settings, n=1, cutoff=0.7)
            found[name] = alike[0] if alike else ""
    return found


def misspelt_in_words(env: Mapping[str, str]) -> str:
    """One sentence that names these variables, and what was probably meant; empty if all are known.

    Values are left out: they may be secret.
    """
    found = misspelt(env)
    each = [name + (f" (did you mean {meant}?)" if meant else "") for name, meant in found.items()]
    if not each:
        return ""
    rest = "is no setting of Crux and has" if len(each) == 1 else "are no settings of Crux and have"
    return f"{', '.join(each)} {rest} no effect"


def _is_of_a_service(name: str, env: Mapping[str, str]) -> bool:
    match = _SERVICE.search(name)
    return match is not None and f"{name[: match.start()]}_SERVICE_HOST" in env
