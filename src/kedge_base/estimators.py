"""The facts about each value of `ppo.advantage` and `ppo.critic`, also for tools that only read a run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from kedge_base.texts import read_table


class Estimator(NamedTuple):
    """The properties of an advantage estimator: a row of estimators.tsv.

    Attributes:
        title: The algorithm's name in model cards.
        critic: Whether it uses a critic's values.
        baseline: What a response is compared with: the others of its `group`, its prompt's `greedy` response, or the
            mean of the prompt's scores in earlier updates (`history`).
        process: What rewards per token are compared with before they are summed: the mean over the group's tokens
            (`mean`), which is also divided by their standard deviation (`std`), or the mean of the other responses'
            means (`others`). `reward`: nothing, they are part of the rewards.
        divides: Whether it divides by the standard deviation of a group's scores. Equal scores then have no scale, so a
            KL cannot be weighed against them in the reward, and in the loss β weighs it against a spread of 1.
        whitens: Whether it was published with normalization of the advantages over the batch.
        by_turn: Whether an action is a turn, regardless of `ppo.credit`.
        decays_by_lambda: Whether λ decides how much of a score reaches earlier tokens directly.
        adds_to: The estimator whose advantage the critic adds to, with a fitted weight; or `none`.
    """

    title: str
    critic: Literal["unused", "possible", "needed"]
    baseline: Literal["none", "group", "greedy", "history"]
    process: Literal["reward", "mean", "std", "others"]
    divides: bool
    whitens: bool
    by_turn: bool
    decays_by_lambda: bool
    adds_to: str


ESTIMATORS = {
    name: Estimator._make({"yes": True, "no": False}.get(fact, fact) for fact in facts)
    for name, *facts in read_table(Path(__file__).with_suffix(".tsv"))
}
"""The facts by the value of `ppo.advantage`."""

OWN = ESTIMATORS.pop("own")
"""The facts about a function of the user's, and about another library's estimator that has no counterpart."""

CRITICS: dict[str, Literal["shared", "separate", "none"]] = {
    "shared": "shared",
    "detached": "shared",
    "readout": "shared",
    "separate": "separate",
    "frozen_attention": "separate",
    "privileged": "separate",
    "frozen": "separate",
    "none": "none",
}
"""The kind of critic that each value of `ppo.critic` but `auto` stands for: `shared`, `separate` or `none`."""


def estimator_of(name: str) -> Estimator:
    """Return the facts about a value of `ppo.advantage`, given without its parameter."""
    return ESTIMATORS.get(name, OWN)
