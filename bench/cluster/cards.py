"""Accelerators: what their data sheets promise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True)
class Card:
    """One accelerator.

    Attributes:
        name: As in `--card`.
        flops: Dense bf16 peak, FLOP/s.
        bandwidth: Of its memory, byte/s.
        memory: Bytes.
        link: To the other cards of its machine, byte/s and direction.
        network: Its share of the machine's network, byte/s and direction.
        linked: Cards that share the link: those of one machine.
        source: Where the figures are from.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    link: float
    network: float
    linked: int = 8
    source: str = "given"


def _card(
    name: str, flops: float, bandwidth: float, memory: float, link: float, network: float, source: str, linked: int = 8
) -> Card:
    """A card in the units of data sheets: TFLOP/s, TB/s, GB, GB/s, GB/s."""
    return Card(name, flops * 1e12, bandwidth * 1e12, memory * 1e9, link * 1e9, network * 1e9, linked, source)


_HOPPER: Final = "https://www.nvidia.com/en-us/data-center/h100/"
_H200: Final = "https://www.nvidia.com/en-us/data-center/h200/"
_H20: Final = "https://willitrunai.com/es/gpus/h20-96gb"
_AMPERE: Final = "https://www.nvidia.com/en-us/data-center/a100/"
_MI300: Final = "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html"
_GB200: Final = "https://www.nvidia.com/en-us/data-center/gb200-nvl72/"

# H800 and A800 are H100 and A100 with a link of 400 GB/s for both directions together.
# The network is one adapter of 400 Gbit/s per card, 200 with Ampere: usual, but no property of the card.
_ALL: Final = (
    _card("H100", flops=989, bandwidth=3.35, memory=80, link=450, network=50, source=_HOPPER),
    _card("H200", flops=989, bandwidth=4.8, memory=141, link=450, network=50, source=_H200),
    _card("H800", flops=989, bandwidth=3.35, memory=80, link=200, network=50, source=_HOPPER),
    _card("H20", flops=148, bandwidth=4.0, memory=96, link=450, network=50, source=_H20),
    _card("A100", flops=312, bandwidth=2.0, memory=80, link=300, network=25, source=_AMPERE),
    _card("A800", flops=312, bandwidth=2.0, memory=80, link=200, network=25, source=_AMPERE),
    _card("MI300", flops=1307, bandwidth=5.3, memory=192, link=448, network=50, source=_MI300),
    _card("GB200", flops=2500, bandwidth=8.0, memory=186, link=900, network=50, source=_GB200, linked=72),
)
CARDS: Final[Mapping[str, Card]] = MappingProxyType({card.name: card for card in _ALL})
"""The known cards, by name."""
