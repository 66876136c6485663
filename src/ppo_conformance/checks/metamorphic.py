"""Relations between two results of the same library, which need neither expected values nor shared conventions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ppo_conformance import vectors
from ppo_conformance.calls import alternatives, call, compare, require, table, tolerance_of
from ppo_conformance.checks import Check
from ppo_conformance.protocol import METHODS, Array, Deviation, NotOffered, offered

Arrays = dict[str, Any]
Settings = dict[str, Any]
Case = tuple[Arrays, Settings]
Back = Callable[[Arrays], Arrays]

RUBBISH = {"log_probs": -24.5, "old_log_probs": -25.5, "reference": -26.0, "mask": 0.0}
RUBBISH |= {"train_log_probs": -23.0, "sample_log_probs": -24.0}
"""Values of new padding by input; 431 for all others."""

LOSSES = ("policy_loss", "value_loss", "kl_loss")
BY_ROW = [name for name, method in METHODS.items() if "B" in next(iter(method.inputs.values()))]
MASKED = [name for name, method in METHODS.items() if method.inputs.get("mask") == "BT"]


@dataclass(frozen=True)
class Relation:
    """A change of a case that changes the results in a known way.

    Attributes:
        id: of the check, without its kind.
        case: suffix of its cases' names, after the method.
        purpose: in one line.
        methods: the methods that it holds for.
        change: maps a method and a case to the changed case, and a function from its results to those expected for the
            original case; None where there is nothing to change.
        needs: features that the profile must claim.
        min_rows: cases with fewer rows are skipped.
    """

    id: str
    case: str
    purpose: str
    methods: Sequence[str]
    change: Callable[[str, Arrays, Settings], tuple[Case, Back] | None]
    needs: Mapping[str, str] = field(default_factory=dict)
    min_rows: int = 2


def unchanged(found: Arrays) -> Arrays:
    """The results are those of the case itself."""
    return found


def along(axis: str, axes: Mapping[str, str], arrays: Arrays, change: Callable[[str, Array, int], Array]) -> Arrays:
    """Change the arrays that have an axis, along it."""
    return {name: change(name, x, axes[name].index(axis)) if axis in axes[name] else x for name, x in arrays.items()}


def padded(at: int, count: int, method: str, inputs: Arrays, settings: Settings) -> tuple[Case, Back]:
    """Masked columns before position `at`, or at the end for −1."""
    start = at if at >= 0 else inputs["mask"].shape[1]

    def insert(name: str, x: Array, axis: int) -> Array:
        return np.insert(x, [start] * count, RUBBISH.get(name, 431.0), axis)

    def delete(_: str, x: Array, axis: int) -> Array:
        return np.delete(x, range(start, start + count), axis)

    changed = along("T", METHODS[method].inputs, inputs, insert)
    return (changed, settings), lambda found: along("T", METHODS[method].outputs, found, delete)


def other_rubbish(method: str, inputs: Arrays, settings: Settings) -> tuple[Case, Back]:
    """Other numbers in masked positions; log probabilities stay below 0."""

    def change(name: str, x: Array, _: int) -> Array:
        return np.where(inputs["mask"] == 1, x, x * (0.7 if name in RUBBISH else -0.3))

    return (along("T", METHODS[method].inputs, inputs, change), settings), unchanged


def reversed_rows(method: str, inputs: Arrays, settings: Settings) -> tuple[Case, Back]:
    """The rows in the opposite order."""

    def flip(_: str, x: Array, axis: int) -> Array:
        return np.flip(x, axis)

    if "episodes" in settings:
        settings = {**settings, "episodes": settings["episodes"][::-1]}
    changed = along("B", METHODS[method].inputs, inputs, flip)
    return (changed, settings), lambda found: along("B", METHODS[method].outputs, found, flip)


def split(ranks: list[int], method: str, inputs: Arrays, settings: Settings) -> tuple[Case, Back] | None:
    """One micro-batch for the first row, and one for all others."""
    mask = inputs["mask"]
    # The vectors cover micro-batches without a counted token.
    if not mask[0].any() or not mask[1:].any():
        return None
    return (inputs, {**settings, "micro_batches": [[0], [*range(1, len(mask))]], "ranks": ranks}), unchanged


SCALES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "policy_loss": ({"advantages": 1}, {"loss": 1, "gradient": 1}),
    "value_loss": ({"values": 1, "old_values": 1, "returns": 1, "value_clip": 1}, {"loss": 2, "gradient": 1}),
    "kl_loss": ({"coef": 1}, {"loss": 1, "gradient": 1}),
    "shaped_rewards": ({"scores": 1, "coef": 1}, {"rewards": 1}),
    "gae": ({"rewards": 1, "values": 1, "last_values": 1}, {"advantages": 1, "returns": 1}),
    "whiten": ({"values": 1}, {}),
    "group_advantages": ({"scores": 1}, {"advantages": 1}),
}
"""By method: powers of the unit by which inputs and settings are multiplied, and the results."""


def times(powers: Mapping[str, int], sign: int, numbers: Arrays) -> Arrays:
    """Numbers times powers of 4, which is exact."""
    return {n: x if x is None or n not in powers else x * 4.0 ** (sign * powers[n]) for n, x in numbers.items()}


def scaled(method: str, inputs: Arrays, settings: Settings) -> tuple[Case, Back] | None:
    """Change the unit of all rewards and values; results divided by their standard deviation stay as they are."""
    if settings.get("whitening") == "std_only":  # (x − μ)/σ + μ has a part without a unit
        return None
    given, found = SCALES[method]
    if settings.get("gae_whitening", "no") != "no" or settings.get("baseline") in ("grpo", "reinforce++"):
        found = {**found, "advantages": 0}
    return (times(given, 1, inputs), times(given, 1, settings)), partial(times, found, -1)


def divided(method: str, inputs: Arrays, settings: Settings) -> tuple[Case, Back]:
    """Logits that are divided by the temperature, at temperature 1, and the gradient for the logits themselves."""
    tau = settings["temperature"]
    changed = {**inputs, "logits": inputs["logits"] / tau}, {**settings, "temperature": 1.0}
    return changed, lambda found: {**found, "gradient": found["gradient"] / tau}


RELATIONS = [
    Relation("padding", "right", "more padding after the rows changes nothing", MASKED, partial(padded, -1, 3)),
    Relation("padding", "left", "padding before the rows changes nothing", MASKED, partial(padded, 0, 2),
             {"left_padding": "yes"}),
    Relation("padding", "tool", "a tool's token within the rows changes nothing", MASKED, partial(padded, 1, 1),
             {"tools": "yes"}),
    Relation("padding", "rubbish", "what masked positions hold changes nothing", MASKED, other_rubbish),
    Relation("rows", "order", "the order of the rows changes nothing but the order of the results", BY_ROW,
             reversed_rows),
    Relation("micro_batches", "split", "the split changes nothing", LOSSES, partial(split, [0, 0]),
             {"micro_batches": "yes"}),
    Relation("micro_batches", "ranks", "a split over two ranks changes nothing", LOSSES, partial(split, [0, 1]),
             {"ranks": "yes"}),
    Relation("scale", "unit", "the unit of the numbers is that of the results", list(SCALES), scaled, min_rows=1),
    Relation("temperature", "divided", "τ divides the logits, and the gradient", ["log_probs", "entropy"], divided,
             min_rows=1),
]  # fmt: skip


def checks() -> list[Check]:
    """A check per relation and method, and per option of a method."""
    found = [
        Check(f"metamorphic/{each.id}", f"{method}_{each.case}", each.purpose, partial(hold, each, method))
        for each in RELATIONS
        for method in each.methods
    ]
    purpose = "two values of the option give two results where they should"
    for method in vectors.topics():
        options = dict.fromkeys(name for case in vectors.read(method)["cases"] for name in case.get("vary", {}))
        found += [
            Check("metamorphic/option_has_effect", f"{method}_{name}", purpose, partial(has_effect, method, name))
            for name in options
        ]
    return found


def answer(method: str, case: Case, adapter) -> Arrays:
    """The results for a case; NaN where masked positions are not compared; gradients are 0 there.

    Raises:
        Deviation: something else is not finite.
    """
    found = call(adapter, method, *case)
    masks = [] if method == "reward_loss" else [name for name in ("mask", "valid") if name in case[0]]
    for name, axes in METHODS[method].outputs.items():
        mask = [case[0][each] == 1 for each in masks if METHODS[method].inputs[each] == axes and name != "gradient"]
        counts = mask[0] if mask else np.ones(found[name].shape, bool)
        if not np.isfinite(found[name][counts]).all():
            raise Deviation(f"{name} of {method} is not finite")
        found[name] = np.where(counts, found[name], np.nan)
    return found


def hold(relation: Relation, method: str, adapter) -> float:
    """Check a relation on every case, under each convention that the profile claims; return the largest error."""
    require(adapter, relation.needs)
    topic, errors = vectors.read(method), []
    for case in topic["cases"]:
        if "micro_batches" in case["settings"] or case.get("kink") or case.get("may_refuse"):
            continue
        inputs = {name: table(x) for name, x in case["inputs"].items()}
        if len(next(iter(inputs.values()))) < relation.min_rows:
            continue
        for _, settings in alternatives(adapter, case, relation.needs):
            changed = relation.change(method, inputs, settings)
            # Padding decides whether a slot follows the last token.
            if changed is None or settings.get("score_at") == "after_last":
                continue
            try:
                before = answer(method, (inputs, settings), adapter)
            except Deviation:
                raise
            except Exception:  # the vectors report a method that fails without the change
                continue
            try:
                changed_case, back = changed
                after = back(call(adapter, method, *changed_case))
            except NotOffered:
                continue
            errors.append(compare(before, after, tolerance_of(adapter, topic), f"in case {case['name']}"))
    if not errors:
        raise NotOffered(f"{method} is not offered in a case of this kind")
    return max(errors)


def has_effect(method: str, name: str, adapter) -> None:
    """Check that any two claimed values of an option give different results where the oracle's differ."""
    tried = False
    for case in vectors.read(method)["cases"]:
        inputs = {each: table(x) for each, x in case["inputs"].items()}
        for one, other in itertools.combinations(alternatives(adapter, case), 2):
            changed = [key for key, value in one[0]["choices"].items() if value != other[0]["choices"][key]]
            expected = [{key: table(each[key]) for key in METHODS[method].outputs} for each, _ in (one, other)]
            if changed != [name] or not differ(*expected):
                continue
            try:
                results = [answer(method, (inputs, settings), adapter) for _, settings in (one, other)]
            except Exception as refusal:
                if not (isinstance(refusal, NotOffered) or case.get("may_refuse")):
                    raise
                continue
            tried = True
            if not differ(*results):
                values = f"{one[1][name]} and {other[1][name]}"
                raise Deviation(f"{name}: {values} give the same result in case {case['name']}")
    if not tried:
        claimed = f"; the profile claims {' '.join(offered(adapter, name))}" if name in METHODS[method].choices else ""
        raise NotOffered(f"no two values of {name} are offered{claimed}")


def differ(one: Arrays, other: Arrays) -> bool:
    """True if some number differs by more than any rounding."""
    return any(bool((np.abs(x - other[name]) > 1e-3 * np.maximum(np.abs(x), 1e-3)).any()) for name, x in one.items())
