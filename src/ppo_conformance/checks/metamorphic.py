"""Relations between two answers of the same library, which need no expected values and no agreement on conventions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from ppo_conformance import vectors
from ppo_conformance.calls import call, compare, require, table, tolerance_of
from ppo_conformance.checks import Check
from ppo_conformance.oracle.expect import values_of
from ppo_conformance.protocol import METHODS, Array, Deviation, NotOffered, offered

Arrays = dict[str, Array]
Case = tuple[Arrays, dict[str, Any]]
"""Inputs and settings."""

Back = Callable[[Arrays], Arrays]
"""From the outputs for the changed case to those that the case itself should have."""

RUBBISH = {"log_probs": -24.5, "old_log_probs": -25.5, "reference": -26.0}
RUBBISH |= {"train_log_probs": -23.0, "sample_log_probs": -24.0}
LOSSES = ("policy_loss", "value_loss", "kl_loss")
BY_ROW = [name for name, method in METHODS.items() if "B" in next(iter(method.inputs.values()))]
MASKED = [name for name, method in METHODS.items() if method.inputs.get("mask") == "BT"]


def same(outputs: Arrays) -> Arrays:
    """Outputs that should not change."""
    return outputs


def inserted(method: str, case: Case, at: int | None, count: int) -> tuple[Case, Back]:
    """Masked columns before position `at`, or at the end, filled with rubbish."""
    inputs, settings = case
    axes = {**METHODS[method].inputs, **METHODS[method].outputs}
    width = inputs["mask"].shape[1]
    where = width if at is None else at
    changed = dict(inputs)
    for name, array in inputs.items():
        if axes[name] == "BT":
            filling = 0.0 if name == "mask" else RUBBISH.get(name, 431.0)
            changed[name] = np.insert(array, [where] * count, filling, axis=1)

    def back(outputs: Arrays) -> Arrays:
        columns = [where + i for i in range(count)]
        return {name: np.delete(x, columns, axis=1) if x.ndim == 2 else x for name, x in outputs.items()}

    return (changed, settings), back


def right(method: str, case: Case) -> tuple[Case, Back]:
    """Three more columns of padding."""
    return inserted(method, case, None, 3)


def left(method: str, case: Case) -> tuple[Case, Back]:
    """Two columns of padding before the rows."""
    return inserted(method, case, 0, 2)


def within(method: str, case: Case) -> tuple[Case, Back]:
    """A tool's token after the first one."""
    return inserted(method, case, 1, 1)


def other_rubbish(method: str, case: Case) -> tuple[Case, Back]:
    """Other numbers in masked positions; log probabilities stay below 0."""
    inputs, settings = case
    axes = METHODS[method].inputs
    factors = {name: 0.7 if name in RUBBISH else -0.3 for name, letters in axes.items() if letters == "BT"}
    changed = {
        name: np.where(inputs["mask"] == 1, x, x * factors[name]) if name in factors else x
        for name, x in inputs.items()
    }
    return (changed, settings), same


def reversed_rows(method: str, case: Case) -> tuple[Case, Back]:
    """The rows in the opposite order."""
    inputs, settings = case
    axes = METHODS[method].outputs
    changed = {name: x[::-1] if METHODS[method].inputs[name].startswith("B") else x for name, x in inputs.items()}
    if "episodes" in settings:
        settings = {**settings, "episodes": settings["episodes"][::-1]}
    return (changed, settings), lambda found: {n: x[::-1] if axes[n].startswith("B") else x for n, x in found.items()}


def twice(method: str, case: Case) -> tuple[Case, Back] | None:
    """Every row twice: a mean stays the same, and each copy has half of the gradient."""
    inputs, settings = case
    if "episodes" in settings:
        return None
    changed = {name: np.concatenate([x, x]) for name, x in inputs.items()}
    rows = len(inputs["mask"])
    return (changed, settings), lambda found: {"loss": found["loss"], "gradient": 2 * found["gradient"][:rows]}


def split(ranks: bool, method: str, case: Case) -> tuple[Case, Back] | None:
    """One micro-batch or one rank for the first row, and one for all others."""
    inputs, settings = case
    rows = len(inputs["mask"])
    # A micro-batch without a counted token has a case of its own among the vectors.
    if rows < 2 or not inputs["mask"][0].any() or not inputs["mask"][1:].any():
        return None
    parts = {"micro_batches": [[0], list(range(1, rows))], "ranks": [0, int(ranks)]}
    return (inputs, {**settings, **parts}), same


SCALES: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "policy_loss": ({"advantages": 1}, {"loss": 1, "gradient": 1}),
    "value_loss": (
        {"values": 1, "old_values": 1, "returns": 1, "value_clip": 1},
        {"loss": 2, "gradient": 1},
    ),
    "kl_loss": ({"coef": 1}, {"loss": 1, "gradient": 1}),
    "shaped_rewards": ({"scores": 1, "coef": 1}, {"rewards": 1}),
    "gae": ({"rewards": 1, "values": 1, "last_values": 1}, {"advantages": 1, "returns": 1}),
    "whiten": ({"values": 1}, {"values": 0}),
    "group_advantages": ({"scores": 1}, {"advantages": 1}),
}
"""By method: powers of c by which inputs and settings are multiplied, and those of the outputs."""


def scaled(method: str, case: Case) -> tuple[Case, Back]:
    """Numbers in a unit c times as small."""
    powers, results = SCALES[method]
    inputs, settings = ({name: times(x, powers.get(name, 0)) for name, x in part.items()} for part in case)
    is_free = settings.get("gae_whitening", "no") != "no" or settings.get("baseline") in ("grpo", "reinforce++")
    results = {**results, "advantages": 0} if is_free else results
    if settings.get("whitening") == "std_only":  # (x − μ)/σ + μ has a part without a unit
        return case, same
    return (inputs, settings), lambda found: {name: times(x, -results[name]) for name, x in found.items()}


def times(x: Any, power: float) -> Any:
    """A number or table times 4 to a power, which is exact."""
    return x if x is None or power == 0 else x * 4.0**power


def shifted(method: str, case: Case) -> tuple[Case, Back]:
    """A number added to all logits, or to all scores."""
    inputs, settings = case
    first = next(iter(inputs))
    return ({**inputs, first: inputs[first] + 8.0}, settings), same


def renumbered(method: str, case: Case) -> tuple[Case, Back]:
    """Other numbers for the groups, in another order."""
    inputs, settings = case
    return ({**inputs, "groups": 100 - 7 * inputs["groups"]}, settings), same


def divided(method: str, case: Case) -> tuple[Case, Back]:
    """Logits that are divided by the temperature, at temperature 1."""
    inputs, settings = case
    tau = settings["temperature"]
    changed = {**inputs, "logits": inputs["logits"] / tau}, {**settings, "temperature": 1.0}
    return changed, lambda found: {"values": found["values"], "gradient": found["gradient"] / tau}


Relation = Callable[[str, Case], tuple[Case, Back] | None]
RELATIONS: list[tuple[str, str, str, Relation, list[str], dict[str, str]]] = [
    ("padding", "right", "more padding after the rows changes nothing", right, MASKED, {}),
    ("padding", "left", "padding before the rows changes nothing", left, MASKED, {"left_padding": "yes"}),
    ("padding", "tool", "a tool's token within the rows changes nothing", within, MASKED, {"tools": "yes"}),
    ("padding", "rubbish", "what masked positions hold changes nothing", other_rubbish, MASKED, {}),
    ("rows", "order", "the order of the rows changes nothing but the order of the results", reversed_rows, BY_ROW, {}),
    ("rows", "twice", "a batch in which every row is twice has the same loss", twice, list(LOSSES), {}),
    ("rows", "groups", "other numbers for the groups change nothing", renumbered, ["group_advantages"], {}),
    ("micro_batches", "split", "the split changes nothing", partial(split, False), list(LOSSES),
     {"micro_batches": "yes"}),
    ("micro_batches", "ranks", "a split over two ranks changes nothing", partial(split, True), list(LOSSES),
     {"ranks": "yes"}),
    ("scale", "unit", "four times the numbers, four times the results", scaled, list(SCALES), {}),
    ("scale", "shift", "a constant changes nothing", shifted,
     ["log_probs", "entropy", "group_advantages", "reward_loss"], {}),
    ("temperature", "divided", "τ divides the logits, and the gradient", divided, ["log_probs", "entropy"], {}),
]  # fmt: skip
"""Id, case, purpose, relation, methods, and the features that it needs."""

NUMBERS: list[tuple[str, str, str, Any]] = [
    ("policy_loss", "sides", "clip_low", 0.45),
    ("policy_loss", "sides", "clip_high", 0.6),
    ("policy_loss", "no_dual_clip", "dual_clip", 2.0),
    ("policy_loss", "lengths", "length", 16),
    ("value_loss", "clip", "value_clip", None),
    ("kl_loss", "estimators", "coef", 0.3),
    ("shaped_rewards", "padded", "coef", 0.3),
    ("gae", "padded", "gamma", 0.5),
    ("gae", "padded", "lam", 0.5),
    ("log_probs", "plain", "temperature", 0.5),
    ("entropy", "plain", "temperature", 0.5),
    ("off_policy_weights", "padded", "cap", 1.01),
    ("off_policy_weights", "padded", "low", 1.01),
    ("off_policy_weights", "padded", "high", 1.01),
    ("optimizer_steps", "steps", "lr", 0.02),
    ("optimizer_steps", "steps", "weight_decay", 0.5),
    ("optimizer_steps", "small_gradients", "eps", 1e-3),
    ("optimizer_steps", "steps", "betas", [0.5, 0.9]),
]
"""Method, case, setting and another value of it that must change a result under some convention."""


def checks() -> list[Check]:
    """A check per relation and method, and per option of a method."""
    found = [
        Check(f"metamorphic/{name}", f"{method}_{case}", purpose, partial(hold, method, relation, needs))
        for name, case, purpose, relation, methods, needs in RELATIONS
        for method in methods
    ]
    effects: dict[str, Callable[[Any], None]] = {}
    for method in vectors.topics():
        varied = dict.fromkeys(name for case in vectors.read(method)["cases"] for name in case.get("vary", {}))
        effects |= {f"{method}_{name}": partial(choice_has_effect, method, name) for name in varied}
    for method, case, name, other in NUMBERS:
        effects[f"{method}_{name}"] = partial(number_has_effect, method, case, {name: other})
    purpose = "two values of the option give two results where they should"
    return found + [Check("metamorphic/option_has_effect", name, purpose, run) for name, run in effects.items()]


def claimed(adapter: Any, topic: dict[str, Any], needs: dict[str, str]) -> Iterator[tuple[str, Case]]:
    """The cases of a topic, under each convention that the profile claims."""
    for case in topic["cases"]:
        if "micro_batches" in case["settings"] or case.get("kink") or case.get("may_refuse"):
            continue
        for alternative in case["expected"]:
            settings = {**case["settings"], **alternative["choices"]}
            try:
                require(adapter, {**settings, **needs, **case.get("needs", {})})
            except NotOffered:
                continue
            yield case["name"], (tables(case["inputs"]), settings)


def hold(method: str, relation: Relation, needs: dict[str, str], adapter: Any) -> float:
    """Check a relation on every case; return the largest relative error."""
    require(adapter, needs)
    topic, worst, tried = vectors.read(method), 0.0, False
    for name, case in claimed(adapter, topic, needs):
        # A single row is complete, and has no order.
        if len(next(iter(case[0].values()))) < 2 and relation not in (scaled, shifted, divided):
            continue
        # Where there is a slot after the last token depends on the padding.
        if case[1].get("score_at") == "after_last" or (related := relation(method, case)) is None:
            continue
        (inputs, settings), back = related
        try:
            before = call(adapter, method, *case)
            after = back(call(adapter, method, inputs, settings))
        except NotOffered:
            continue
        tried = True
        worst = max(
            worst, compare(counted(method, before, case[0]), after, tolerance_of(adapter, topic), f"in case {name}")
        )
    if not tried:
        raise NotOffered(f"{method} is not offered in a case of this kind")
    return worst


def tables(numbers: dict[str, Any]) -> Arrays:
    """Nested lists as arrays, by name."""
    return {name: table(x) for name, x in numbers.items()}


def counted(method: str, outputs: Arrays, inputs: Arrays) -> Arrays:
    """Outputs with NaN at masked positions, which are not compared, except in gradients, which are 0 there."""
    mask = inputs.get("mask", inputs.get("valid"))
    if mask is None or method == "reward_loss":
        return outputs
    return {
        name: np.where(mask == 1, x, np.nan) if x.shape == mask.shape and name != "gradient" else x
        for name, x in outputs.items()
    }


def differ(one: Arrays, other: Arrays) -> bool:
    """True if some number differs by more than any rounding."""
    return any(bool((np.abs(x - other[name]) > 1e-3 * np.maximum(np.abs(x), 1e-3)).any()) for name, x in one.items())


def choice_has_effect(method: str, name: str, adapter: Any) -> None:
    """Check that every two values of a choice that the profile claims give two results, where the oracle's differ."""
    topic, tried = vectors.read(method), False
    for case in topic["cases"]:
        if case.get("may_refuse"):
            continue
        for one, other in itertools.combinations(case["expected"], 2):
            changed = [key for key in one["choices"] if one["choices"][key] != other["choices"][key]]
            expected = [tables({key: each[key] for key in METHODS[method].outputs}) for each in (one, other)]
            if changed != [name] or not differ(*expected):
                continue
            pair = [{**case["settings"], **each["choices"]} for each in (one, other)]
            try:
                require(adapter, case.get("needs", {}))
                results = [counted_call(adapter, method, case, settings) for settings in pair]
            except NotOffered:
                continue
            tried = True
            if not differ(*results):
                values = " and ".join(str(settings[name]) for settings in pair)
                raise Deviation(f"{name}: {values} give the same result in case {case['name']}")
    if not tried:
        raise NotOffered(f"no two values of {name} are offered; the profile claims {' '.join(offered(adapter, name))}")


def counted_call(adapter: Any, method: str, case: dict[str, Any], settings: dict[str, Any]) -> Arrays:
    """The outputs for a case, NaN where they are not compared."""
    return counted(method, call(adapter, method, case["inputs"], settings), tables(case["inputs"]))


def number_has_effect(method: str, name: str, other: dict[str, Any], adapter: Any) -> None:
    """Check that another value of a number gives another result, under the conventions where the oracle's differs."""
    [case] = [case for case in vectors.read(method)["cases"] if case["name"] == name]
    tried = False
    for alternative in case["expected"]:
        settings = {**case["settings"], **alternative["choices"]}
        pair = (settings, {**settings, **other})
        if not differ(*(tables(values_of(method, case["inputs"], each)) for each in pair)):
            continue
        try:
            results = [counted_call(adapter, method, case, each) for each in pair]
        except NotOffered:
            continue
        tried = True
        if not differ(*results):
            raise Deviation(f"{other} has no effect in case {name}")
    if not tried:
        raise NotOffered(f"{method} is not offered where this has an effect")
