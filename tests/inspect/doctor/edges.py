"""Both sides of each threshold: values slightly beyond it and slightly short of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from kedge_inspect.record import RunRecord
from tests.inspect.doctor.cases import (
    AHEAD,
    DAMAGED,
    FUNCTION,
    GROUPS,
    JUDGED,
    TOOLS,
    fitted_critic,
    held_out,
    nothing_held_out,
    reward_model,
    supervised,
)
from tests.inspect.doctor.synthetic import Series, synthetic_run, towards

SERIOUS, WARNING, NOTE, SILENT = "serious", "warning", "note", ""
MANY = {"rollout.num_prompts": 1024}
SCORES = {"reward/score_std": [1.0] * 16}
BONUS = {"ppo.entropy_coef": 0.01}
CONTROLLED = {"ppo.kl_controller": {"ziegler": {"target": 5.0}}}
IN_SCORES = {"ppo.value_unit": "score"}
HISTOGRAM = {
    "ppo.value_loss": {"hl_gauss": [-10.0, 10.0, 100]},
    "ppo.value_clip_range": None,
    **IN_SCORES,
}
FLAT = {"reward/score_mean": [1.0] * 16, **SCORES}
ALIKE: dict[str, Series] = {"reward/score_mean": 0.0, "reward/score_std": 0.0}
FROZEN = {**FLAT, "policy/clip_fraction": [0.0] * 16, "policy/approx_kl": [0.0] * 16, "objective/kl": [0.0] * 16}


class Edge(NamedTuple):
    """A rule, and the severity that it gives a run; empty if it finds nothing."""

    rule: str
    severity: str
    run: RunRecord


def step(before: float, after: float) -> list[float]:
    """A value that changes once, after the fourth of sixteen updates."""
    return [before] * 4 + [after] * 12


def noisy(values: list[float], height: float) -> list[float]:
    """Noise that leaves the first value and the medians of the first three and the last four as they are."""
    return [value + (0.0, height, -height)[update % 3] for update, value in enumerate(values)]


def first(name: str, value: float) -> dict[str, Series]:
    """A metric that is out of the ordinary in the first update alone."""
    return {name: [value] + [0.01] * 15}


def of_16(count: int, odd: float, usual: float) -> list[float]:
    return [odd] * count + [usual] * (16 - count)


def metrics(rule: str, *pairs: tuple[str, Mapping[str, Series]], **settings: Any) -> Iterator[Edge]:
    for severity, changed in pairs:
        yield Edge(rule, severity, synthetic_run(metrics=changed, settings=settings))


BY_FUNCTIONS: dict[str, Any] = {"policy": {}, "reference": {}}
BY_A_MODEL: dict[str, Any] = {**BY_FUNCTIONS, "reward: model": {}}


def responses(nats: list[float]) -> dict[str, Series]:
    """The entropy of whole responses, of ten tokens each."""
    return {"policy/entropy": [each / 10 for each in nats], "response/length": [10.0] * 16}


LENGTHENED: dict[str, Series] = {"response/length": step(20.0, 35.1), "reward/length_correlation": [0.51] * 16}


def episodes(changed: Mapping[str, Series] | None = None) -> dict[str, Series]:
    """Episodes that never run out of tokens, with turns that hardly ever stop: they are cut off and answered."""
    ended = {"episode/turns": [3.0] * 16, "episode/max_tokens": [0.0] * 16, "episode/context_overflow": [0.0] * 16}
    return {**ended, "response/eos_rate": [0.05] * 16, **(changed or {})}


def leak(start: float, grown: float, steps_up: int = 13) -> dict[str, Series]:
    """Memory that grows over fourteen updates, after two updates of warm-up."""
    ups = [grown / steps_up * ((number + 1) * steps_up // 13 - number * steps_up // 13) for number in range(13)]
    return {"memory/process": [0.01, 0.05] + [start + sum(ups[:number]) for number in range(14)]}


def filling(first_half: float, second_half: float) -> dict[str, Series]:
    """Memory that grows by one amount over seven updates and by another over the next six."""
    early = [1.0 + first_half * number / 7 for number in range(8)]
    return {"memory/process": [0.01, 0.05, *early, *(early[-1] + second_half * number / 6 for number in range(1, 7))]}


def spikes(updates: int, *places: int) -> RunRecord:
    return synthetic_run(
        updates, {"policy/grad_norm": [9.0 if update in places else 0.35 for update in range(updates)]}
    )


def without_spread(last: float) -> dict[str, Series]:
    """Every other update has no group with spread, so that the KL's small gradient is all that is left."""
    return {"group/constant": [1.0, 0.9] * 8, "policy/grad_norm": [0.01, 0.35] * 7 + [0.01, last]}


def incidents(count: int) -> RunRecord:
    return synthetic_run(20, incidents=[{**DAMAGED, "update": update + 1} for update in range(count)])


def overfitted(last: float) -> RunRecord:
    return supervised("sft", loss=towards(4.0, 1.0), eval_loss=held_out(1.5, 1.2, 1.0, 1.0, last))


def sparse(spread: float) -> dict[str, Series]:
    """A reward that every other batch earns once and the next one never, where the returns have this spread."""
    return {
        "value/explained_variance": [0.3, -600.0] * 8,
        "value/returns_std": [1.0, spread] * 8,
        "reward/score_std": [1.0, spread] * 8,
    }


def critic(updates: int) -> RunRecord:
    return synthetic_run(updates, {"value/explained_variance": [-0.01] * updates})


EDGES: list[Edge] = [
    Edge("not_finite", SERIOUS, incidents(3)),
    Edge("not_finite", WARNING, incidents(2)),
    *metrics(
        "reward_function_failing",
        (SERIOUS, {"reward/mine_given_up": [13.0] * 16}),
        (WARNING, {"reward/mine_given_up": [12.0] * 16}),
        (SILENT, {"reward/unscored": [127.0] * 16}),
    ),
    # A function's None is documented; only failed calls are failures, whether they cost the score or not.
    *metrics(
        "responses_unscored",
        (NOTE, {"reward/unscored": [13.0] * 16}),
        (SILENT, {"reward/unscored": [12.0] * 16}),
        (WARNING, {"reward/unscored": [65.0] * 16}),
        (NOTE, {"reward/unscored": [63.0] * 16}),
        (SILENT, {"reward/unscored": [40.0] * 16, "reward/mine_given_up": [28.0] * 16}),
        (NOTE, {"reward/unscored": [41.0] * 16, "reward/mine_given_up": [28.0] * 16}),
    ),
    *metrics(
        "responses_unscored",
        (NOTE, {"reward/unscored": [40.0] * 16, "reward/mine_given_up": [40.0] * 16}),
        **{"reward_functions.on_error": 0.0},
    ),
    *metrics(
        "responses_unscored",
        (NOTE, {"reward/unscored": [40.0] * 16, "score/gold": 0.5, "reward/gold_given_up": [40.0] * 16}),
        reward=JUDGED,
    ),
    *metrics(
        "first_update_too_large",
        (NOTE, first("policy/clip_fraction", 0.151)),
        (SILENT, first("policy/clip_fraction", 0.149)),
        (NOTE, first("policy/approx_kl", 0.0501)),
        (SILENT, first("policy/approx_kl", 0.0499)),
        (NOTE, first("policy/ratio_max", 50.1)),
        (SILENT, first("policy/ratio_max", 49.9)),
        (NOTE, {"value/explained_variance": [0.0, -1.01] + [0.03] * 14}),
        (SILENT, {"value/explained_variance": [0.0, -0.99] + [0.03] * 14}),
        (SILENT, {"policy/clip_fraction": [0.4] * 16}),  # steps_too_large says it of more updates
    ),
    *metrics(
        "first_update_too_large",
        (NOTE, {"policy/clip_fraction": [0.0, 0.0, 0.3] + [0.01] * 13}),
        **{"ppo.value_warmup_updates": 2},
    ),
    Edge("first_update_too_large", WARNING, synthetic_run(1, {"policy/clip_fraction": [0.3]})),
    # Whitened rewards have a standard deviation of 1, whatever the unit of the score.
    # Until the policy is trained, it can neither move nor score better.
    *metrics("steps_too_small", (SILENT, FROZEN), **{"ppo.value_warmup_updates": 9}),
    *metrics("steps_too_small", (SERIOUS, FROZEN), **{"ppo.value_warmup_updates": 8}),
    # The ratios of an update's only step are 1, so that neither figure can be anything but 0.
    # The KL to the reference then tells: at most 1e-5 nats per token, here of 25.6.
    *metrics(
        "steps_too_small",
        (SERIOUS, FROZEN),
        (SERIOUS, {**FROZEN, "response/length": [25.6] * 16, "objective/kl": [0.0] * 15 + [-2.5e-4]}),
        (SILENT, {**FROZEN, "response/length": [25.6] * 16, "objective/kl": [0.0] * 15 + [-2.6e-4]}),
        (SILENT, {**FROZEN, "objective/kl": [math.nan] * 16}),
        **{"ppo.num_epochs": 1, "ppo.num_minibatches": 1},
    ),
    *metrics("steps_too_small", (SERIOUS, FROZEN), **{"ppo.num_epochs": 1, "ppo.num_minibatches": 2}),
    *metrics("reward_flat", (SILENT, FLAT), **{"ppo.value_warmup_updates": 5}),
    *metrics("reward_flat", (WARNING, FLAT), **{"ppo.value_warmup_updates": 4}),
    *metrics(
        "reward_flat",
        (WARNING, {**SCORES, "reward/score_mean": step(1.0, 1.145)}),
        (SILENT, {**SCORES, "reward/score_mean": step(1.0, 1.155)}),
        **MANY,
    ),
    # The error of a mean of 128 scores is 0.088 of their spread; that of a rise under noise of 1.05 h is 1.00 h.
    *metrics(
        "reward_flat",
        (WARNING, {**SCORES, "reward/score_mean": noisy(step(1.0, 1.26), 0.1)}),
        (SILENT, {**SCORES, "reward/score_mean": noisy(step(1.0, 1.27), 0.1)}),
        (WARNING, {**SCORES, "reward/score_mean": noisy(step(1.0, 1.175), 0.06)}),
        (SILENT, {**SCORES, "reward/score_mean": noisy(step(1.0, 1.185), 0.06)}),
    ),
    *metrics(
        "score_falling",
        (SERIOUS, {**SCORES, "reward/score_mean": step(1.0, 0.49)}),
        (SILENT, {**SCORES, "reward/score_mean": step(1.0, 0.51)}),
        # The first update's scores are all the best one, by chance
        (SERIOUS, {"reward/score_std": [0.0] + [0.5] * 15, "reward/score_mean": [1.0] + [0.7] * 15}),
        (SILENT, {"reward/score_std": [0.0] + [0.5] * 15, "reward/score_mean": [1.0] + [0.8] * 15}),
    ),
    *metrics(
        "groups_without_spread",
        (WARNING, {"group/constant": [0.91] * 16}),
        (NOTE, {"group/constant": [0.89] * 16}),
        (NOTE, {"group/constant": [0.51] * 16}),
        (SILENT, {"group/constant": [0.49] * 16}),
        (SERIOUS, {"group/constant": [1.0] * 16}),
        (WARNING, {"group/constant": [1.0] * 7 + [0.99] + [1.0] * 8}),
        **GROUPS,
    ),
    *(
        Edge("groups_without_spread", severity, synthetic_run(updates, {"group/constant": 1.0}, settings=GROUPS))
        for updates, severity in ((4, SERIOUS), (3, SILENT))
    ),
    *metrics(
        "groups_of_one",
        (WARNING, {"group/single": [1.0] * 15 + [0.99]}),
        (WARNING, {"group/single": [0.51] * 16}),
        (SILENT, {"group/single": [0.49] * 16}),
        **GROUPS,
    ),
    Edge("groups_of_one", SERIOUS, synthetic_run(1, {"group/single": 1.0}, settings=GROUPS)),
    Edge("groups_of_one", SILENT, synthetic_run(metrics={"group/single": 1.0})),
    *(
        Edge("reward_flat", severity, synthetic_run(updates, {**ALIKE, **more}, settings=settings))
        for updates, severity, more, settings in (
            (1, WARNING, {}, {}),
            (3, WARNING, {}, {}),
            (4, SERIOUS, {}, {}),
            (1, SILENT, {"reward/score_std": [0.01]}, {}),
            (1, NOTE, {}, {"rollout.num_prompts": 7}),
            (1, WARNING, {}, {"rollout.num_prompts": 8}),
            (2, WARNING, {}, {"rollout.num_prompts": 4}),
            (1, NOTE, {"episode/turns": 2.0}, {}),
            (11, NOTE, {"episode/turns": 2.0}, {}),
            (12, SERIOUS, {"episode/turns": 2.0}, {}),
            (1, SILENT, {"response/eos_rate": 0.0}, {}),
            (1, WARNING, {"response/eos_rate": 0.0}, {"rollout.missing_eos_score": None}),
        )
    ),
    *metrics("group_std_blows_up", (SILENT, {"group/small_spread": [0.5] * 16}), **GROUPS | {"ppo.advantage": "rloo"}),
    *metrics(
        "length_bias",
        (WARNING, {"group/length_below": step(10.0, 13.1), "group/length_above": step(10.0, 11.3)}),
        (SILENT, {"group/length_below": step(10.0, 12.9), "group/length_above": step(10.0, 11.0)}),
        (SILENT, {"group/length_below": step(10.0, 13.1), "group/length_above": step(10.0, 11.5)}),
        **GROUPS,
    ),
    *metrics(
        "length_bias",
        (SILENT, {"group/length_below": step(10.0, 20.0), "group/length_above": [10.0] * 16}),
        **GROUPS | {"ppo.aggregation": "token"},
    ),
    *metrics(
        "no_exploration",
        (SERIOUS, responses([0.69] * 16) | FLAT),
        (SILENT, responses([0.70] * 16) | FLAT),
        (SILENT, responses([0.69] * 16)),  # the score rises
    ),
    *metrics(
        "duplicated_prompts",
        (WARNING, {"prompt/distinct": [0.79] * 16}),
        (SILENT, {"prompt/distinct": [0.81] * 16}),
        (SERIOUS, {"prompt/distinct": [0.39] * 16}),
        (WARNING, {"prompt/distinct": [0.41] * 16}),
    ),
    *metrics(
        "hacking_by_length",
        (SERIOUS, {"response/length": step(20.0, 35.1), "reward/length_correlation": [0.51] * 16}),
        (WARNING, {"response/length": step(20.0, 34.9), "reward/length_correlation": [0.51] * 16}),
        (WARNING, {"response/length": step(20.0, 28.1), "reward/length_correlation": [0.51] * 16}),
        (SILENT, {"response/length": step(20.0, 27.9), "reward/length_correlation": [0.51] * 16}),
        (SILENT, {"response/length": step(20.0, 35.1), "reward/length_correlation": [0.49] * 16}),
        (SERIOUS, {"response/length": step(20.0, 9.9), "reward/length_correlation": [-0.51] * 16}),
        (SILENT, {"response/length": step(20.0, 10.1), "reward/length_correlation": [-0.51] * 16}),
    ),
    *(
        Edge("hacking_by_length", severity, replace(synthetic_run(metrics=changed), roles=roles))
        for severity, roles, changed in (
            (NOTE, BY_FUNCTIONS, {"response/length": step(20.0, 9.9), "reward/length_correlation": [-0.89] * 16}),
            (SERIOUS, BY_FUNCTIONS, {"response/length": step(20.0, 9.9), "reward/length_correlation": [-0.91] * 16}),
            (SERIOUS, BY_FUNCTIONS, {"response/length": step(20.0, 35.1), "reward/length_correlation": [0.51] * 16}),
            (SERIOUS, BY_A_MODEL, {"response/length": step(20.0, 9.9), "reward/length_correlation": [-0.89] * 16}),
        )
    ),
    *metrics(
        "hacking_by_repetition",
        (SERIOUS, {"response/repetition": step(0.02, 0.221)}),
        (WARNING, {"response/repetition": step(0.02, 0.219)}),
        (WARNING, {"response/repetition": step(0.02, 0.121)}),
        (SILENT, {"response/repetition": step(0.02, 0.119)}),
    ),
    *metrics(
        "hacking_by_not_stopping",
        (SERIOUS, {"response/eos_rate": step(1.0, 0.74)}),
        (SILENT, {"response/eos_rate": step(1.0, 0.76)}),
    ),
    *metrics(
        "hacking_by_not_stopping",
        (WARNING, {"response/eos_rate": step(1.0, 0.3), "reward/length_correlation": [0.51] * 16}),
        (SERIOUS, {"response/eos_rate": step(1.0, 0.3), "reward/length_correlation": [0.49] * 16}),
        reward=FUNCTION,
    ),
    *metrics(
        "hacking_by_not_stopping",
        (SERIOUS, {"response/eos_rate": step(1.0, 0.3), "reward/length_correlation": [0.51] * 16}),
    ),
    *metrics(
        "entropy_rising",
        (SERIOUS, {"policy/entropy": step(0.2, 0.41)}),
        (WARNING, {"policy/entropy": step(0.2, 0.39)}),
        (WARNING, {"policy/entropy": step(0.5, 0.66)}),
        (SILENT, {"policy/entropy": step(0.5, 0.64)}),
        (WARNING, {"policy/entropy": step(0.2, 0.305)}),
        (SILENT, {"policy/entropy": step(0.2, 0.295)}),
        **BONUS,
    ),
    *metrics("entropy_rising", (WARNING, {"policy/entropy": step(0.2, 0.9)})),
    *metrics(
        "entropy_collapse",
        (WARNING, responses(step(30.0, 5.9))),
        (SILENT, responses(step(30.0, 6.1))),
        (SERIOUS, responses(step(30.0, 2.95))),
        (WARNING, responses(step(30.0, 3.05))),
        (SERIOUS, responses(step(6.0, 1.09))),
        (WARNING, responses(step(6.0, 1.11))),
        (WARNING, responses(step(2.15, 1.05))),
        (SILENT, responses(step(2.05, 1.05))),
    ),
    *metrics(
        "beta_too_large",
        (SERIOUS, {**SCORES, "objective/kl_coef": [2.02] * 16, "reward/score_mean": step(1.0, 1.1)}),
        (SILENT, {**SCORES, "objective/kl_coef": [1.98] * 16, "reward/score_mean": step(1.0, 1.1)}),
        (SERIOUS, {**SCORES, "objective/kl_coef": [9.0] * 16, "reward/score_mean": step(1.0, 1.49)}),
        (SILENT, {**SCORES, "objective/kl_coef": [9.0] * 16, "reward/score_mean": step(1.0, 1.51)}),
    ),
    *metrics(
        "steps_too_small",
        *(
            (
                severity,
                {
                    "policy/clip_fraction": [clipped] * 16,
                    "policy/approx_kl": [moved] * 16,
                    "objective/kl": [away] * 16,
                    "reward/score_mean": 1.0,
                },
            )
            for severity, clipped, moved, away in [
                (SERIOUS, 9.8e-4, 9.8e-6, 0.098),
                (SILENT, 1.02e-3, 9e-6, 0.05),
                (SILENT, 9e-4, 1.02e-5, 0.05),
                (SILENT, 9e-4, 9e-6, 0.102),
            ]
        ),
    ),
    *metrics(
        "steps_too_large",
        (SILENT, {"policy/clip_fraction": [0.5] * 16}),
        (WARNING, {"policy/clip_fraction": [0.5] * 16, "policy/approx_kl": [0.051] * 16}),
        **{"ppo.ratio": "sequence"},
    ),
    *metrics(
        "first_update_too_large",
        (SILENT, first("policy/clip_fraction", 0.5)),
        **{"ppo.ratio": "sequence"},
    ),
    *metrics(
        "steps_too_large",
        (SERIOUS, {"policy/clip_fraction": [0.355] * 16}),
        (WARNING, {"policy/clip_fraction": [0.345] * 16}),
        (WARNING, {"policy/clip_fraction": [0.205] * 16}),
        (SILENT, {"policy/clip_fraction": [0.195] * 16}),
        (SERIOUS, {"policy/approx_kl": [0.205] * 16}),
        (WARNING, {"policy/approx_kl": [0.195] * 16}),
        (WARNING, {"policy/approx_kl": [0.051] * 16}),
        (SILENT, {"policy/approx_kl": [0.049] * 16}),
        (SERIOUS, {"policy/clip_fraction": of_16(2, 0.4, 0.01)}),
        (SILENT, {"policy/clip_fraction": of_16(1, 0.4, 0.01)}),
        (WARNING, {"policy/clip_fraction": [0.01] * 8 + [0.4, 0.25, 0.25] + [0.01] * 5}),
    ),
    *metrics(
        "kl_exploding",
        (WARNING, {"objective/kl": step(0.0, 10.2), "response/length": [20.0] * 16}),
        (SILENT, {"objective/kl": step(0.0, 9.8), "response/length": [10.0] * 16}),
        (SILENT, {"objective/kl": step(0.0, 10.2), "response/length": [21.0] * 16}),
        (SERIOUS, {"objective/kl": step(0.0, 20.4), "response/length": [20.0] * 16}),
        (WARNING, {"objective/kl": step(0.0, 19.6), "response/length": [10.0] * 16}),
        (WARNING, {"objective/kl": step(0.0, 20.4), "response/length": [21.0] * 16}),
    ),
    *metrics(
        "kl_exploding",
        (WARNING, {"objective/kl": step(0.0, 15.2), "response/length": [99.0] * 16}),
        (  # the first update's scores are all the best one, by chance
            WARNING,
            {
                "objective/kl": step(0.0, 15.2),
                "reward/total": [1.0] + [0.6] * 15,
                "reward/score_std": [0.0] + [0.5] * 15,
            },
        ),
        (SILENT, {"objective/kl": step(0.0, 14.8), "response/length": [99.0] * 16}),
        **CONTROLLED,
    ),
    *metrics(
        "too_few_eos",
        (WARNING, {"response/eos_rate": [0.49] * 16}),
        (SILENT, {"response/eos_rate": [0.51] * 16}),
        (SERIOUS, {"response/eos_rate": [0.098] * 16}),
        (WARNING, {"response/eos_rate": [0.102] * 16}),
    ),
    *metrics(
        "too_few_eos",
        (NOTE, {"response/eos_rate": [0.098] * 16}),
        (WARNING, {"response/eos_rate": [0.102] * 16}),
        reward=FUNCTION,
    ),
    *metrics(
        "truncated_at_cap", (WARNING, {"response/eos_rate": [0.89] * 16}), (SILENT, {"response/eos_rate": [0.91] * 16})
    ),
    *metrics(
        "truncated_at_cap",
        (SERIOUS, {"response/eos_rate": step(0.49, 0.3)}),
        (WARNING, {"response/eos_rate": step(0.51, 0.3)}),
        (WARNING, {"response/eos_rate": step(0.3, 0.51)}),
        (NOTE, {"response/eos_rate": step(0.49, 0.95)}),
        (SILENT, {"response/eos_rate": step(0.51, 0.95)}),
    ),
    *metrics("truncated_at_cap", (SILENT, {"response/eos_rate": step(0.49, 0.95)}), reward=FUNCTION),
    *metrics(
        "truncated_at_cap",
        (WARNING, {"response/eos_rate": [0.102] * 16}),
        (NOTE, {"response/eos_rate": [0.098] * 16}),
        reward=FUNCTION,
    ),
    *metrics(
        "truncated_at_cap",
        (SILENT, episodes()),
        (SILENT, episodes({"episode/max_tokens": [0.06] * 16, "episode/context_overflow": [0.039] * 16})),
        (WARNING, episodes({"episode/max_tokens": [0.06] * 16, "episode/context_overflow": [0.041] * 16})),
    ),
    *metrics(
        "tools_fail",
        (SILENT, TOOLS | {"tools/failed": [0.49] * 16}),
        (WARNING, TOOLS | {"tools/failed": [0.51] * 16}),
        (WARNING, TOOLS | {"tools/failed": [0.94] * 16}),
        (SERIOUS, TOOLS | {"tools/failed": [0.96] * 16}),
        (SILENT, TOOLS | {"tools/failed": step(0.99, 0.94)}),
        (SERIOUS, TOOLS | {"tools/failed": step(1.0, 0.96)}),
    ),
    *metrics(
        "tools_unused",
        (WARNING, FLAT | TOOLS | {"tools/calls": [0.049] * 16}),
        (SILENT, FLAT | TOOLS | {"tools/calls": [0.051] * 16}),
        (WARNING, FLAT | TOOLS | {"tools/calls": step(2.0, 0.0)}),
        (NOTE, TOOLS | {"tools/calls": [0.0] * 16}),
        (SILENT, FLAT | episodes()),  # a game without tools
        (SILENT, FLAT | TOOLS | {"tools/calls": [0.0] * 16, "episode/timeout": [0.3] * 16}),  # calls that are late
    ),
    *metrics(
        "episodes_time_out",
        (SILENT, episodes({"episode/timeout": [0.099] * 16})),
        (WARNING, episodes({"episode/timeout": [0.101] * 16})),
    ),
    *metrics(
        "answers_changed",
        (SILENT, episodes({"episode/changed": [0.29] * 16})),
        (NOTE, episodes({"episode/changed": [0.31] * 16})),
        (NOTE, episodes({"episode/changed": [1.49] * 16})),
        (WARNING, episodes({"episode/changed": [1.51] * 16})),
    ),
    *metrics(
        "too_few_eos",
        (SILENT, episodes()),
        (SILENT, episodes({"episode/max_tokens": [0.49] * 16})),
        (WARNING, episodes({"episode/max_tokens": [0.51] * 16})),
    ),
    *metrics(
        "hacking_by_not_stopping",
        (SILENT, episodes({"response/eos_rate": step(0.9, 0.1)})),
        (SILENT, episodes({"episode/max_tokens": step(0.1, 0.34)})),
        (SERIOUS, episodes({"episode/max_tokens": step(0.1, 0.36)})),
    ),
    *metrics(
        "hacking_by_length",
        (SILENT, LENGTHENED | episodes({"episode/turns": step(2.0, 4.0)})),
        (SERIOUS, LENGTHENED | episodes({"episode/turns": [2.0] * 16})),
    ),
    *metrics(
        "stops_at_once",
        (SILENT, {"response/length": step(12.0, 2.9)} | episodes({"episode/turns": step(4.0, 1.0)})),
        (SERIOUS, {"response/length": step(12.0, 2.9)} | episodes({"episode/turns": [1.0] * 16})),
    ),
    *metrics(
        "stops_at_once", (SERIOUS, {"response/length": step(8.0, 1.95)}), (SILENT, {"response/length": step(8.0, 2.05)})
    ),
    *metrics(
        "value_scale_mismatch",
        (SERIOUS, {"value/std": [3.05] * 16, "value/returns_std": [1.0] * 16}),
        (SILENT, {"value/std": [2.95] * 16, "value/returns_std": [1.0] * 16}),
    ),
    *metrics(
        "value_scale_mismatch",
        (SERIOUS, {"value/returns_std": [5.1] * 16}),
        (SILENT, {"value/returns_std": [4.9] * 16}),
        (WARNING, {"value/returns_std": [0.049] * 16, "value/std": 0.01}),
        (SILENT, {"value/returns_std": [0.051] * 16, "value/std": 0.01}),
        **IN_SCORES,
    ),
    *metrics(
        "value_scale_mismatch",
        (WARNING, {"value/outside_support": [0.051] * 16}),
        (SILENT, {"value/outside_support": [0.049] * 16}),
        (SERIOUS, {"value/outside_support": [0.51] * 16}),
        (SERIOUS, {"value/outside_support": 0.0, "value/std": 3.1, "value/returns_std": [1.0] * 16}),
        (SILENT, {"value/outside_support": 0.0, "value/returns_std": [6.0] * 16}),
        (NOTE, {"value/outside_support": 0.0, "value/returns_std": [0.098] * 16}),
        (SILENT, {"value/outside_support": 0.0, "value/returns_std": [0.101] * 16}),
        **HISTOGRAM,
    ),
    *metrics(
        "value_clip_binding",
        *(
            (
                severity,
                {
                    "value/clip_fraction": [0.51] * 16,
                    "value/mean": 0.0,
                    "value/returns_mean": [bias] * 16,
                    "value/returns_std": [1.0] * 16,
                },
            )
            for severity, bias in [(SERIOUS, 1.02), (WARNING, 0.98)]
        ),
    ),
    *metrics(
        "dead_critic",
        (SERIOUS, {"value/explained_variance": [-1.02] * 16}),
        (NOTE, {"value/explained_variance": [-0.98] * 16}),
        (SERIOUS, {"value/explained_variance": 0.0, "value/std": [0.0098] * 16, "value/returns_std": [1.0] * 16}),
        (NOTE, {"value/explained_variance": 0.0, "value/std": [0.0102] * 16, "value/returns_std": [1.0] * 16}),
    ),
    *metrics(
        "dead_critic",
        (SERIOUS, {"value/explained_variance": [-5.0] * 16, "reward/score_std": step(1.0, 0.102)}),
        (SILENT, {"value/explained_variance": [-5.0] * 16, "reward/score_std": step(1.0, 0.098)}),
    ),
    # Every other batch has no success: its returns have 0.09 or 0.11 of the usual spread
    *metrics(
        "dead_critic",
        (SILENT, sparse(0.09)),
        (SERIOUS, sparse(0.11)),
    ),
    *metrics(
        "first_update_too_large",
        (SILENT, {"value/explained_variance": [0.0, -600.0, 0.3, 0.3] * 4, "value/returns_std": [1.0, 0.09] * 8}),
        (NOTE, {"value/explained_variance": [0.0, -600.0, 0.3, 0.3] * 4, "value/returns_std": [1.0, 0.11] * 8}),
    ),
    *metrics(
        "reward_flat",
        (SERIOUS, {"reward/score_std": 0.0, "reward/score_mean": -1.0, "response/eos_rate": step(0.11, 0.0)}),
        (SILENT, {"reward/score_std": 0.0, "reward/score_mean": -1.0, "response/eos_rate": step(0.09, 0.0)}),
    ),
    Edge("dead_critic", NOTE, critic(7)),
    Edge("dead_critic", NOTE, critic(3)),
    Edge("dead_critic", SILENT, critic(2)),
    Edge("dead_critic", SILENT, synthetic_run(7, {"value/explained_variance": [-0.5] * 4 + [0.0] * 3})),
    Edge("dead_critic", SILENT, synthetic_run(7, {"value/explained_variance": [-0.5] * 7}, state="running")),
    Edge("dead_critic", WARNING, critic(50)),
    Edge("dead_critic", NOTE, synthetic_run(50, {"value/explained_variance": [0.049] * 50})),
    Edge("dead_critic", SILENT, synthetic_run(50, {"value/explained_variance": [0.051] * 50})),
    Edge("dead_critic", NOTE, critic(49)),
    *metrics(
        "reward_saturated",
        (WARNING, {"reward/score_std": step(1.0, 0.098)}),
        (SILENT, {"reward/score_std": step(1.0, 0.102)}),
    ),
    *metrics(  # the training prompts gain 1
        "prompts_memorized",
        (WARNING, {"reward/score_mean": step(1.0, 2.0), "eval/score": step(1.0, 1.49)}),
        (SILENT, {"reward/score_mean": step(1.0, 2.0), "eval/score": step(1.0, 1.51)}),
        (WARNING, {"reward/score_mean": step(1.0, 2.0), "eval/score": step(1.0, 1.01)}),
        (SERIOUS, {"reward/score_mean": step(1.0, 2.0), "eval/score": step(1.0, 0.99)}),
        (SILENT, {"reward/score_mean": step(1.0, 1.0), "eval/score": step(1.0, 0.9)}),
        # Three standard errors of the difference are 3.0 times the noise's height
        (SERIOUS, {"reward/score_mean": step(1.0, 2.0), "eval/score": noisy(step(1.0, 1.0), 0.33)}),
        (SILENT, {"reward/score_mean": step(1.0, 2.0), "eval/score": noisy(step(1.0, 1.0), 0.35)}),
        **{"ppo.eval_every": 1},
    ),
    *metrics("prompts_memorized", (SILENT, {"eval/score": 0.9}), **{"ppo.eval_every": 1, "data.draw": {"evenly": 3}}),
    *metrics(
        "steps_skipped",
        (SERIOUS, {"guard/skipped_steps": of_16(2, 1.0, 0.0)}),
        (WARNING, {"guard/skipped_steps": of_16(1, 1.0, 0.0)}),
    ),
    Edge("gradient_spikes", WARNING, spikes(150, 70, 100)),
    Edge("gradient_spikes", NOTE, spikes(150, 70)),
    Edge("gradient_spikes", SILENT, spikes(150, 2)),
    *metrics(
        "gradient_spikes",
        (WARNING, {"policy/grad_norm": [0.35] * 8 + [2.85] + [0.35] * 7}),
        (SILENT, {"policy/grad_norm": [0.35] * 8 + [2.75] + [0.35] * 7}),
        (WARNING, {"value/grad_norm": [0.35] * 8 + [2.85] + [0.35] * 7}),
        (SILENT, {"value/grad_norm": [0.35] * 8 + [2.75] + [0.35] * 7}),
        (SILENT, {"value/grad_norm": [8.0 * 0.7**update for update in range(16)]}),  # falls as the critic is fitted
        (WARNING, {"value/grad_norm": [0.3 * 1.22**update for update in range(16)]}),
    ),
    *metrics("gradient_spikes", (SILENT, without_spread(0.35)), (WARNING, without_spread(9.0)), **GROUPS),
    *metrics("gradient_spikes", (WARNING, without_spread(0.35)), **GROUPS | {"ppo.advantage": "gae"}),
    Edge("loss_rising", SERIOUS, supervised("sft", loss=[1.0] * 10 + [1.21] * 30)),
    Edge("loss_rising", SILENT, supervised("sft", loss=[1.0] * 10 + [1.19] * 30)),
    # The error of the rise above a single batch is 1.13 times the noise's height; the first batch's loss is low
    Edge("loss_rising", SERIOUS, supervised("sft", loss=noisy([1.0] + [1.35] * 39, 0.1))),
    Edge("loss_rising", SILENT, supervised("sft", loss=noisy([1.0] + [1.33] * 39, 0.1))),
    Edge("reward_model_at_chance", SERIOUS, reward_model(0.549, 0.4)),
    Edge("reward_model_at_chance", SILENT, reward_model(0.551, 0.4)),
    Edge("reward_model_at_chance", SERIOUS, reward_model(0.5, 0.4, error=0.129)),
    Edge("reward_model_at_chance", WARNING, reward_model(0.5, 0.4, error=0.131)),
    Edge("reward_model_at_chance", SERIOUS, nothing_held_out(0.549, 0.68)),
    Edge("reward_model_at_chance", SILENT, nothing_held_out(0.551, 0.68)),
    # Two standard errors of the last 10 of 40 steps: 0.079 with 16 pairs in a step, 0.111 with 8
    Edge("reward_model_at_chance", SERIOUS, nothing_held_out(0.549, 0.68, batch_size=16)),
    Edge("reward_model_at_chance", WARNING, nothing_held_out(0.549, 0.68, batch_size=8)),
    # Equal scores have a loss of ln 2 = 0.6931
    Edge("reward_model_at_chance", WARNING, nothing_held_out(0.6, 0.6932)),
    Edge("reward_model_at_chance", SILENT, nothing_held_out(0.6, 0.6931)),
    Edge("reward_model_at_chance", SERIOUS, nothing_held_out(0.5, 0.69, steps=4)),
    Edge("reward_model_at_chance", SILENT, nothing_held_out(0.5, 0.69, steps=3)),
    Edge("critic_explains_nothing", SERIOUS, fitted_critic(0.049, 0.0)),
    Edge("critic_explains_nothing", SILENT, fitted_critic(0.051, 0.0)),
    Edge("critic_explains_nothing", SERIOUS, fitted_critic(0.01, 0.039)),
    Edge("critic_explains_nothing", WARNING, fitted_critic(0.01, 0.041)),
    Edge("reward_model_barely_better_than_length", WARNING, reward_model(0.68, 0.651)),
    Edge("reward_model_barely_better_than_length", SILENT, reward_model(0.68, 0.649)),
    Edge("reward_model_barely_better_than_length", SERIOUS, reward_model(0.62, 0.671)),
    Edge("reward_model_barely_better_than_length", WARNING, reward_model(0.62, 0.669)),
    # The error of the difference is 0.05 · √2 = 0.0707
    Edge("reward_model_barely_better_than_length", SERIOUS, reward_model(0.62, 0.692, length_error=0.05)),
    Edge("reward_model_barely_better_than_length", WARNING, reward_model(0.62, 0.689, length_error=0.05)),
    Edge("overfitting", WARNING, overfitted(1.031)),
    Edge("overfitting", SILENT, overfitted(1.029)),
    Edge("overfitting", SERIOUS, overfitted(1.152)),
    Edge("overfitting", WARNING, overfitted(1.148)),
    *metrics(
        "memory_growing",
        (WARNING, leak(1.0, 0.152)),
        (SILENT, leak(1.0, 0.148)),
        (WARNING, leak(0.2, 0.102)),
        (SILENT, leak(0.2, 0.098)),
        (WARNING, leak(1.0, 0.5, 10)),
        (SILENT, leak(1.0, 0.5, 9)),
        (WARNING, filling(0.40, 0.27)),
        (SILENT, filling(0.40, 0.25)),
    ),
    *metrics(
        "reward_dominates_time",
        (WARNING, {"time/reward": [0.3] * 16, "time/update": [0.51] * 16}),
        (SILENT, {"time/reward": [0.3] * 16, "time/update": [0.49] * 16}),
        (WARNING, {"time/reward": [1.01] * 16, "time/update": [2.0] * 16}),
        (SILENT, {"time/reward": [0.99] * 16, "time/update": [2.0] * 16}),
    ),
    *metrics(
        "reward_dominates_time",
        (SILENT, {"time/reward": [1.5] * 16, "time/waiting_for_rollout": [0.0] * 16}),
        (SILENT, {"time/reward": [1.5] * 16, "time/waiting_for_rollout": [0.95] * 16}),
        (WARNING, {"time/reward": [1.5] * 16, "time/waiting_for_rollout": [1.05] * 16}),
        (SILENT, {"time/reward": [0.5] * 16, "time/waiting_for_rollout": [1.05] * 16}),
        **AHEAD,
    ),
]

FREE = {"objective/kl_coef": 0.0}
EDGES += [
    *metrics(
        "beta_too_small",
        (WARNING, {"objective/kl": step(0.0, 5.1), **FREE}),
        (SILENT, {"objective/kl": step(0.0, 4.9), **FREE}),
        (SERIOUS, {"objective/kl": step(0.0, 10.1), "response/length": [20.0] * 16, **FREE}),
        (WARNING, {"objective/kl": step(0.0, 9.9), "response/length": [10.0] * 16, **FREE}),
        (WARNING, {"objective/kl": step(0.0, 10.1), "response/length": [21.0] * 16, **FREE}),
    ),
    # In the loss, β weighs the KL against advantages, which may have been divided by their spread.
    *(
        Edge(rule, severity if speaks else SILENT, synthetic_run(metrics=changed, settings=settings))
        for rule, severity, changed in (
            ("beta_too_small", WARNING, {"objective/kl": step(0.0, 8.0), "objective/kl_coef": 1e-3}),
            ("beta_too_large", SERIOUS, {**FLAT, "objective/kl_coef": [9.0] * 16}),
        )
        for speaks, settings in (
            (False, {"ppo.kl_in": "loss"}),
            (False, {"ppo.kl_in": {"loss": "k3"}, "ppo.whiten_advantages": "auto", "ppo.advantage": "gae"}),
            (False, {"ppo.kl_in": "loss", "ppo.whiten_advantages": False, "ppo.advantage": "grpo"}),
            (False, {"ppo.kl_in": "loss", "ppo.whiten_advantages": False, "ppo.whiten_rewards": True}),
            (True, {"ppo.kl_in": "loss", "ppo.whiten_advantages": "auto", "ppo.advantage": "rloo"}),
            (True, {"ppo.kl_in": "score", "ppo.whiten_advantages": True}),
        )
    ),
    # Without any β, the penalty is absent on every scale.
    Edge(
        "beta_too_small",
        WARNING,
        synthetic_run(
            metrics={"objective/kl": step(0.0, 8.0), "objective/kl_coef": 0.0}, settings={"ppo.kl_in": "loss"}
        ),
    ),
    # The gain is 1: the standard deviation, since the score has risen by less.
    *metrics(
        "beta_too_small",
        *(
            (
                severity,
                {
                    **SCORES,
                    "objective/kl": step(0.0, 8.0),
                    "objective/kl_coef": [beta] * 16,
                    "response/length": [40.0] * 16,
                    "reward/score_mean": step(1.0, 1.5),
                },
            )
            for severity, beta in [(WARNING, 0.0062), (SILENT, 0.0063)]
        ),
    ),
]

MIN_UPDATES: dict[str, tuple[int, dict[str, float]]] = {
    "steps_too_large": (4, {"policy/clip_fraction": 0.5}),
    "no_exploration": (8, {"policy/entropy": 0.01, "reward/score_mean": 1.0}),
    "duplicated_prompts": (4, {"prompt/distinct": 0.5}),
    "truncated_at_cap": (4, {"response/eos_rate": 0.8}),
    "tools_fail": (4, {**TOOLS, "tools/failed": 1.0}),
    "tools_unused": (4, {**TOOLS, "tools/calls": 0.0}),
    "episodes_time_out": (4, {"episode/turns": 3.0, "episode/timeout": 0.5}),
    "answers_changed": (4, {"episode/turns": 3.0, "episode/changed": 3.0}),
    "reward_dominates_time": (4, {"time/reward": 1.5}),
    "kl_exploding": (4, {"objective/kl": 50.0}),
    "steps_too_small": (
        8,
        {"policy/clip_fraction": 0.0, "policy/approx_kl": 0.0, "objective/kl": 0.0, "reward/score_mean": 1.0},
    ),
    "dead_critic": (3, {"value/explained_variance": -0.5}),
    "first_update_too_large": (1, {"policy/clip_fraction": 0.3}),
    "responses_unscored": (1, {"reward/unscored": 40.0}),
    "value_clip_binding": (8, {"value/clip_fraction": 0.9}),
    "beta_too_large": (8, {"objective/kl_coef": 9.0, "reward/score_mean": 1.0}),
    "reward_flat": (12, {"reward/score_mean": 1.0}),
    "sampler_trainer_mismatch": (1, {"policy/first_ratio_max": 2.0}),
}
"""The fewest updates that a rule needs."""
