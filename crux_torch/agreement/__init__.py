"""Agreement between the jobs of a cluster: stores, records, leaders, plans."""

from __future__ import annotations

from typing import Annotated

import msgspec

#: Goes up when a field changes its meaning. Readers ignore other versions, with a warning. A new
#: field with a default does not change it: older readers leave out what they do not know.
SCHEMA_VERSION = 2

Level = Annotated[int, msgspec.Meta(ge=0, le=63)]
