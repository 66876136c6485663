"""`plan_cluster`: from a few numbers to layouts with their times, memory and error band."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from bench.cluster.cards import CARDS, Card
from bench.cluster.check import Band, band_of
from bench.cluster.layouts import NUMBERS, Wish, cheapest, sweep
from bench.cluster.report import plan_report
from bench.cluster.shape import ModelShape, parse_parameters, read_shape, typical_shape
from bench.cluster.update import UpdateTime
from bench.cluster.work import Workload
from kedge_base.errors import ConfigError

MOST_CARDS: Final = 16_384
LONGER: Final = {"prompt": 2.0, "response": 3.0}
"""Longest length in units of the mean, where it is not given."""

CARD_UNITS: Final = {"flops": 1e12, "bandwidth": 1e12, "memory": 1e9, "link": 1e9, "network": 1e9}
"""Units of own figures of a card: TFLOP/s, TB/s, GB, GB/s, GB/s."""


@dataclass(frozen=True)
class ClusterPlan:
    """Layouts of an update, the cheapest that fits, and how far off the model may be. Printed, it is a report.

    Attributes:
        best: The layout that fits with the fewest card-seconds per update.
        updates: All layouts that were tried.
        band: Smallest and largest published time, in units of the model's, of updates like this one.
        lengths_known: Whether the longest lengths were given.
    """

    best: UpdateTime
    updates: tuple[UpdateTime, ...]
    band: Band
    lengths_known: bool

    @property
    def seconds(self) -> float:
        """Per update, on the cheapest layout."""
        return self.best.seconds

    def __str__(self) -> str:
        return plan_report(self.best, self.updates, self.band, lengths_known=self.lengths_known)


def plan_cluster(
    *,
    model: str | os.PathLike[str] | None = None,
    parameters: str | float | None = None,
    prompt_tokens: float = 512,
    longest_prompt: float | None = None,
    response_tokens: float = 512,
    longest_response: float | None = None,
    responses: int = 1024,
    card: str | Card = "H100",
    own_figures: Mapping[str, float] | None = None,
    cards: int | None = None,
    rollout_cards: int | None = None,
    tensor_parallel: int | None = None,
    staleness: int | None = None,
    epochs: int = 4,
    minibatches: int = 1,
    critic: Literal["shared", "separate", "none"] = "shared",
    reference: bool = True,
    reward_parameters: str | float | None = None,
) -> ClusterPlan:
    """Estimate the time and memory of a PPO update on a cluster, and choose a layout; nothing is loaded or started.

    Args:
        model: Folder of a model, or a config.json.
        parameters: Size instead of a model, such as `"7B"`; its shape is that of a published model of about this size.
        prompt_tokens: Mean.
        longest_prompt: Twice the mean if None.
        response_tokens: Mean.
        longest_response: Where the sampler stops; three times the mean if None.
        responses: Per update.
        card: H100, H200, H800, H20, A100, A800, MI300, GB200, or a name of your own with all of its figures.
        own_figures: Of a card: `flops` (TFLOP/s), `bandwidth` (TB/s), `memory` (GB), `link` and `network` (GB/s).
        cards: Number; None tries powers of two from 1 to 512.
        rollout_cards: Cards of the servers; 0 for taking turns on all cards; None tries both.
        tensor_parallel: Cards of one server; None tries 1, 2, 4 and 8.
        staleness: 0 for synchronous, 1 for one step off; None tries both.
        epochs: As `ppo.num_epochs`.
        minibatches: As `ppo.num_minibatches`.
        critic: On the policy's trunk, a model of the policy's size, or none.
        reference: Whether a frozen copy of the policy computes log probabilities.
        reward_parameters: Size of the reward model; None for a function.

    Raises:
        ConfigError: An impossible number, or no layout fits.
        ModelError: The model has no readable config.json.
    """
    given = {"prompt_tokens": prompt_tokens, "longest_prompt": longest_prompt, "response_tokens": response_tokens,
             "longest_response": longest_response, "responses": responses, "cards": cards, "epochs": epochs,
             "tensor_parallel": tensor_parallel, "minibatches": minibatches}  # fmt: skip
    for name, number in given.items():
        if number is not None and not 1 <= number < float("inf"):
            raise ConfigError(f"{name} must be at least 1; it is {number:g}")
    work = Workload(
        _policy(model, parameters), responses, prompt_tokens,
        _longest("prompt", prompt_tokens, longest_prompt), response_tokens,
        _longest("response", response_tokens, longest_response), epochs, minibatches, critic, reference,
        None if reward_parameters is None else _sized(reward_parameters),
    )  # fmt: skip
    chosen = card_of(card, own_figures or {})
    wish = _wish(cards, rollout_cards, tensor_parallel, staleness)
    updates = sweep(work, chosen, NUMBERS if cards is None else (cards,), wish)
    best = cheapest(updates)
    if best is None:
        raise ConfigError(_nothing_fits(work, chosen, wish, updates, cards))
    known = longest_response is not None
    return ClusterPlan(best, tuple(updates), band_of(work, best.layout, lengths_known=known), known)


def card_of(card: str | Card, own_figures: Mapping[str, float]) -> Card:
    """A known card, with own figures instead of its data sheet's; or one of which all figures are given.

    Raises:
        ConfigError: The card is not known and a figure is missing, or a figure is not positive.
    """
    for name, given in own_figures.items():
        if name not in CARD_UNITS or not 0 < given < float("inf"):
            raise ConfigError(f"own figures of a card are {', '.join(CARD_UNITS)}, above 0; {name} is {given:g}")
    known = card if isinstance(card, Card) else CARDS.get(card.upper())
    if known is None and (missing := [name for name in CARD_UNITS if name not in own_figures]):
        raise ConfigError(f"no card is called {card!r}: name one of {', '.join(CARDS)}, or give its {missing[0]}, too")
    if known and not own_figures:
        return known

    def figure(name: str) -> float:
        return own_figures[name] * CARD_UNITS[name] if name in own_figures else getattr(known, name)

    # Own figures make it another card: no published figure is of it.
    return Card(
        f"{known.name} with own figures" if known else str(card), figure("flops"), figure("bandwidth"),
        figure("memory"), figure("link"), figure("network"), known.linked if known else 8,
    )  # fmt: skip


def _policy(model: str | os.PathLike[str] | None, parameters: str | float | None) -> ModelShape:
    if (model is None) == (parameters is None):
        raise ConfigError("give either a model (folder or config.json) or its number of parameters (7B)")
    return _sized(parameters) if parameters is not None else read_shape(os.fspath(model or ""))


def _sized(parameters: str | float) -> ModelShape:
    return typical_shape(parse_parameters(parameters if isinstance(parameters, str) else f"{parameters:.0f}"))


def _longest(what: Literal["prompt", "response"], mean: float, longest: float | None) -> float:
    if longest is None:
        return LONGER[what] * mean
    if longest < mean:
        raise ConfigError(f"the longest {what} cannot be shorter than the mean: {longest:g} against {mean:g} tokens")
    return longest


def _wish(cards: int | None, rollout: int | None, parallel: int | None, staleness: int | None) -> Wish:
    if staleness not in (None, 0, 1):
        raise ConfigError(f"staleness is 0 (synchronous) or 1 (one step off); it is {staleness}")
    if rollout is not None and rollout < 0:
        raise ConfigError(f"rollout_cards must be at least 0; it is {rollout}")
    if rollout and cards is not None and rollout >= cards:
        raise ConfigError(f"{rollout} rollout cards of {cards} leave none to train; 0 means turns on all cards")
    if staleness == 1 and (rollout == 0 or cards == 1):
        raise ConfigError("one step off needs cards for servers besides those that train")
    if cards is not None and cards > MOST_CARDS:
        raise ConfigError(f"cards must be at most {MOST_CARDS}; it is {cards}")
    if parallel and (rollout or cards or parallel) % parallel:
        raise ConfigError(
            f"servers of {parallel} cards need a multiple of {parallel} cards; there are {rollout or cards}"
        )
    return Wish(rollout, parallel, staleness)


def _nothing_fits(work: Workload, card: Card, wish: Wish, updates: list[UpdateTime], cards: int | None) -> str:
    """The closest layout's problem, and how many cards would do."""
    if not updates:
        return (
            f"no layout is possible: servers are whole, have at most {card.linked} cards and at least one response "
            "each, and a card must be left to train"
        )
    nearest = min(updates, key=lambda each: each.trainer.bytes + each.server.weights)
    where = f"{cards} {card.name}" if cards else f"up to {NUMBERS[-1]} {card.name}"
    told = f"no layout of {where} fits a policy of {work.policy.parameters / 1e9:.1f}B parameters: "
    told += f"on {nearest.layout.cards} cards, {nearest.problem}"
    more = [number for number in NUMBERS if number > (cards or NUMBERS[-1])]
    enough = next((number for number in more if cheapest(sweep(work, card, (number,), wish))), None)
    return f"{told}; {enough} cards are enough" if enough else told
