"""Variables that begin with ``CRUX_`` and that nobody reads, such as misspelt settings."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from crux_torch.settings import OTHER_VARIABLES, SETTINGS, TUNING, TUNING_VARIABLE

#: Variables that Kubernetes sets in each container for a service called crux or crux-...
_SERVICE = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)|_PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?")


def misspelt(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of ``env`` that begin with ``CRUX_`` and that nobody reads.

    Each is given with what sets the setting of the most similar name; empty if none is similar.
    """
    settings = [setting.env for setting in SETTINGS]
    tuning = {f"CRUX_{setting.field.upper()}": setting.field for setting in TUNING}
    found = {}
    for name in sorted(env):
        if not name.startswith("CRUX_") or name in (*settings, *OTHER_VARIABLES):
            continue
        service = _SERVICE.search(name)
        if service and f"{name[: service.start()]}_SERVICE_HOST" in env:
            continue
        if name in tuning:
            found[name] = f"{TUNING_VARIABLE}={tuning[name]}=..."
        else:
            alike = difflib.get_close_matches(name.upper(), settings, n=1, cutoff=0.7)
            found[name] = alike[0] if alike else ""
    return found


def misspelt_text(env: Mapping[str, str]) -> str:
    """Returns a sentence that names the :func:`misspelt` variables; empty if there are none.

    Values are left out: they may be secret.
    """
    found = misspelt(env)
    each = [name + (f" (did you mean {meant}?)" if meant else "") for name, meant in found.items()]
    if not each:
        return ""
    rest = "is no setting of Crux and has" if len(each) == 1 else "are no settings of Crux and have"
    return f"{', '.join(each)} {rest} no effect"
