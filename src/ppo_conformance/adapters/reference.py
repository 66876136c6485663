"""The reference trainer as an adapter: it offers the whole protocol, with every value of its choices."""

from __future__ import annotations

from ppo_conformance.protocol import CHOICES
from ppo_conformance.reference.conversations import Conversations
from ppo_conformance.reference.trainer import Trainer

FEATURES = dict.fromkeys(("tools", "truncation", "left_padding", "rejection", "micro_batches", "ranks"), "yes")


class Adapter(Trainer, Conversations):
    """All choices, and float64."""

    name = "reference"
    profile = {name: " ".join(choice.values) for name, choice in CHOICES.items()} | FEATURES | {"precision": "float64"}

    def version(self) -> str:
        """The suite's version."""
        return "1"
