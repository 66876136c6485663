"""What an optimizer holds on one machine, and its steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from kedge.plan.machine import Part, Phase, Speed, merged

__all__ = ["ADAMW", "PlannedOptimizer"]

ADAM_PASSES = 7
"""Reads and writes of a number per weight in a step of Adam: weight, gradient and two moments, all but one written."""
CLIP_PASSES = 3
"""The same for the gradient's norm and its scaling."""

STATE: Final[Mapping[str, float]] = MappingProxyType(
    {"adamw": 2.0, "muon": 2.0, "adamw8bit": 2 * (1 / 4 + 1 / 256), "adafactor": 0.01}
)
"""Bytes of an optimizer's state per byte of trained weights in fp32: two numbers; of 8 bits with a scale per 256; rows
and columns."""

HOST_BANDWIDTH = 20e9
"""Byte/s between a GPU and the host's memory: what PCIe 4.0 reaches of its 31.5."""


@dataclass(frozen=True)
class PlannedOptimizer:
    """An optimizer.

    Attributes:
        kind: See `STATE`.
        at_a_time: Bytes of weights whose state is on the device at a time, in a step, if the state is in the host's
            memory otherwise; None if it is on the device throughout.
    """

    kind: str = "adamw"
    at_a_time: float | None = None

    def held(self, figures: Mapping[str, float], role: str) -> Part:
        """A role's state between the steps."""
        return Part(role, "optimizer", 0.0 if self.at_a_time is not None else self._state(figures, role))

    def step(
        self,
        figures: Mapping[str, float],
        held: Iterable[Part],
        roles: Sequence[str],
        speed: Speed | None,
        *,
        steps: float = 1,
    ) -> Phase:
        """The steps of some roles, with all of their gradients.

        Args:
            figures: Of each role `ROLE.trained`, bytes.
            held: What is held besides.
            roles: The roles; those that are not trained have no gradients.
            speed: Of the machine; None for no times.
            steps: How many.
        """
        gradients = [Part(role, "gradients", figures[f"{role}.trained"]) for role in roles]
        trained, state = sum(part.bytes for part in gradients), sum(self._state(figures, role) for role in roles)
        here, copied = [], 0.0
        if self.at_a_time is not None:
            most = max(roles, key=lambda role: figures[f"{role}.trained"])
            here = [Part(most, "optimizer", min(state, self.at_a_time * STATE[self.kind]))]
            copied = 2 * state / HOST_BANDWIDTH
        seconds = None
        if speed is not None:
            seconds = steps * (trained * (ADAM_PASSES + CLIP_PASSES) / speed.bandwidth + copied)
        return Phase("step", merged([*held, *gradients, *here]), seconds)

    def _state(self, figures: Mapping[str, float], role: str) -> float:
        """Bytes; muon keeps one number per weight of the matrices inside the trunk."""
        inner = figures.get(f"{role}.inner", 0.0) if self.kind == "muon" else 0.0
        return STATE[self.kind] * (figures[f"{role}.trained"] - inner) + inner


ADAMW: Final = PlannedOptimizer()
"""The default."""
