"""Whole updates of the tiny model: against the reference trainer, and against themselves in another arrangement.

A case, `vectors/update/*.json`, has

    kind         ppo | grpo | rloo | reward_model | sft
    model        see `ppo_conformance.reference.model.initial_weights`
    batches      one per update, each with lists of one entry per response: `prompts` and `responses` in tokens (a
                 stop token included), `groups`, `scores`, `ended` (False: cut off), `valid` (False: rejected);
                 `tools`, by row the places of tokens that the policy did not choose; `orders`, for each epoch the
                 rows of each minibatch. In those of a reward model, a chosen and a rejected response take turns.
    settings     numbers and options. One value of each of the protocol's choices is added from the adapter's profile.
    execution    what may not change the result; empty for the usual one: `micro_batch` (rows), `ranks`, `layout`
                 (padded, left, packed, shared_prompts), `pad_to` (its width), `resume_at` (save and load before this
                 batch)
    expected     of the weights after it: the norm and three entries of each tensor. A choice that the case leaves open
                 has its first value.

`python -m ppo_conformance.oracle` writes `expected` where the reference trainer makes another.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from ppo_conformance.adapters import reference
from ppo_conformance.calls import compare
from ppo_conformance.checks import Check
from ppo_conformance.protocol import CHOICES, Adapter, Deviation, NotOffered, offered
from ppo_conformance.reference.model import Weights, initial_weights

FOLDER = Path(__file__).resolve().parent.parent / "vectors" / "update"
CASES = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))
BOUNDS = {"float64": 1e-6, "float32": 2e-3}
"""Largest error of a weight, relative to the largest change of any weight. Adam's first steps divide small gradients by
themselves, which magnifies rounding."""

REFERENCE = reference.Adapter()

Case = dict[str, Any]
Change = Callable[[Case], Case]


def checks() -> list[Check]:
    """A check per case, and one per arrangement of some of them."""
    whole = [Check(f"update/{name}", "whole", load(name)["about"], partial(check_whole, name)) for name in CASES]
    return whole + [
        Check(f"update/{id}", label, purpose, partial(check_arrangement, *changed))
        for id, (purpose, labels) in ARRANGEMENTS.items()
        for label, changed in labels.items()
    ]


@cache
def load(name: str) -> Case:
    """Read a case."""
    return json.loads((FOLDER / f"{name}.json").read_text("utf-8"))


def chosen(case: Case, adapter: Adapter) -> Case:
    """The case with the values of all choices: the case's own where the adapter offers it, else the adapter's default.

    Raises:
        NotOffered: The adapter does not claim a feature that the case needs, or the ratio or baseline that it is for.
    """
    settings = dict(case["settings"])
    for choice in CHOICES:
        values = offered(adapter, choice)
        if choice in ("ratio", "baseline") and settings.get(choice, values[0]) not in values:
            raise NotOffered(f"the profile does not claim {choice}={settings[choice]}")
        settings[choice] = settings[choice] if settings.get(choice) in values else values[0]
    responses = [token for batch in case["batches"] for response in batch["responses"] for token in response]
    left_out = settings["padding_logit"] == "left_out" and settings["pad"] not in responses
    settings["never_sampled"] = [settings["pad"]] if left_out else []
    needed = {"tools": "tools", "valid": "rejection"}
    for batch in case["batches"]:
        for key, feature in needed.items():
            if key in batch and settings[feature] == "no":
                raise NotOffered(feature)
        if case["kind"] == "ppo" and not all(batch["ended"]) and settings["truncation"] == "no":
            raise NotOffered("truncation")
    return {**case, "settings": settings}


def check_whole(name: str, adapter: Adapter) -> float:
    """The weights after the update are those of the reference trainer."""
    case = chosen(load(name), adapter)
    return compare_weights(updated(adapter, case), updated(REFERENCE, case), case)


def updated(adapter: Adapter, case: Case) -> Weights:
    """The weights after a case, computed once per adapter, which need not be hashable."""
    return _updated(adapter.update, json.dumps(case))


@cache
def _updated(update: Callable[[Case], Weights], case: str) -> Weights:
    return update(json.loads(case))


def check_arrangement(name: str, one: Change, other: Change, adapter: Adapter) -> float:
    """The weights after the update are the same in two arrangements."""
    case = chosen(load(name), adapter)
    return compare_weights(updated(adapter, other(case)), updated(adapter, one(case)), case)


def compare_weights(found: Weights, expected: Weights, case: Case) -> float:
    """Compare weights by name; return the largest error relative to the largest change.

    Raises:
        Deviation: No weight is expected to change, one is not finite, or an error is too large.
    """
    start = initial_weights(case["model"])
    moved = np.max([np.abs(expected[name] - start[name]).max() for name in start])
    if not 0 < moved < np.inf:
        raise Deviation(f"the largest change of a weight is {moved:g}")
    return compare(expected, found, BOUNDS[case["settings"]["precision"]], "weights after the update", moved)


def executed(case: Case, **execution) -> Case:
    """The case with another execution."""
    return {**case, "execution": {**case["execution"], **execution}}


def reordered(case: Case) -> Case:
    """The case with the rows of its batches in reverse; the pairs of a reward model stay pairs."""
    unit = 2 if case["kind"] == "reward_model" else 1
    batches: list[Case] = []
    for batch in case["batches"]:
        number = len(batch["responses"])
        order = [first + each for first in reversed(range(0, number, unit)) for each in range(unit)]
        rows: Case = {
            key: [value[row] for row in order] for key, value in batch.items() if key not in ("orders", "tools")
        }
        rows["tools"] = {str(order.index(int(row))): places for row, places in batch.get("tools", {}).items()}
        rows["orders"] = [[[order.index(row) for row in part] for part in epoch] for epoch in batch["orders"]]
        batches.append({key: value for key, value in rows.items() if key in batch})
    return {**case, "batches": batches}


def _each(names: str, **execution) -> dict[str, tuple[str, Change, Change]]:
    """For each case, by its name: itself, and with another execution."""
    return {name: (name, executed, partial(executed, **execution)) for name in names.split()}


ARRANGEMENTS: dict[str, tuple[str, dict[str, tuple[str, Change, Change]]]] = {
    "split": (
        "micro-batches of other sizes make the same step",
        _each("ppo grpo gspo", micro_batch=1) | _each("reward_model sft", micro_batch=2),
    ),
    "padding": (
        "padding after the text, before it, or none: the same step",
        _each("ppo grpo_rejected reward_model", layout="padded", pad_to=16)
        | _each("ppo_cut_off grpo", layout="left", pad_to=20)
        | _each("rloo ppo_tools sft", layout="packed"),
    ),
    "rows": (
        "rows in another order in the batch make the same step",
        {name: (name, executed, reordered) for name in ["ppo", "ppo_tools", "grpo", "rloo", "reward_model", "sft"]},
    ),
    "ranks": (
        "ranks that share the rows make the same step",
        _each("ppo grpo", ranks=2) | _each("reward_model sft", ranks=2, micro_batch=1),
    ),
    "shared_prompts": (
        "prompts that are read once for all their responses make the same step",
        {
            name: (name, partial(executed, layout="packed"), partial(executed, layout="shared_prompts"))
            for name in ("ppo", "grpo", "ppo_tools")
        },
    ),
    "resume": ("a run resumed from its checkpoint makes the same steps", _each("ppo grpo ppo_lora", resume_at=1)),
}
"""By id: the purpose, and by label a case and the two arrangements that are compared."""


def sampled(weights: Weights) -> dict[str, dict[str, float]]:
    """The norm of each tensor, and its first, middle and last entry."""
    return {
        name: {"norm": float(np.sqrt((weight**2).sum()))}
        | {str(place): float(weight.flat[place]) for place in (0, weight.size // 2, weight.size - 1)}
        for name, weight in weights.items()
    }


def filled(name: str) -> Case:
    """A case with the reference trainer's weights."""
    case = load(name)
    return {**case, "expected": sampled(updated(REFERENCE, chosen(case, REFERENCE)))}
