"""Which schedulers a running cluster can carry out; importing this costs nothing."""

from __future__ import annotations

#: What ``--crux-policy`` may be: decisions that consist of candidate paths and the given levels.
#: The others need what no network offers (``ideal``, a level for every job), or what the processes
#: of a job can't do yet (time shifts), or more time than a training process should give
#: (``crux+``).
LIVE_POLICIES = ("crux", "crux-fair", "ecmp", "sincronia", "taccl", "varys")
#: Those of them that choose paths; under the others the network's own hash does.
PATH_POLICIES = ("crux", "crux-fair", "taccl")
