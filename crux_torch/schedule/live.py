"""Which schedulers a running cluster can carry out; importing this costs nothing."""

from __future__ import annotations

#: What ``--crux-policy`` may be: decisions that consist of candidate paths and the given levels.
#: The others need what no network offers (``ideal``, a level for every job) or what the processes
#: of a job can't do yet (time shifts); for the bound of ``crux-fair`` there is no setting yet.
LIVE_POLICIES = ("crux", "ecmp", "sincronia", "taccl", "varys")
