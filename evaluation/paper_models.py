"""The models of the paper's simulation (§6.3); the catalogue holds further ones."""

from __future__ import annotations

from crux_torch.sim.catalogue import MODELS

OPEN = ("bert", "gpt", "resnet", "nmt", "multi-interests")
VARIANTS = ("bert-128", "gpt-7b", "resnet-152", "nmt-base", "multi-interests-large")
STAND_INS = ("ctr", "transformer-nlp")
PAPER_MODELS = tuple(m for m in MODELS.values() if m.name in OPEN + VARIANTS + STAND_INS)
