"""The critic by its own test: values of prefixes against the returns of fresh continuations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kedge.inspect.doctor.finding import Remedy, Rule, Symptom
from kedge.inspect.doctor.needs import Needs
from kedge.inspect.doctor.remedies import scale, set_to
from kedge.inspect.doctor.trends import MIN_TREND
from kedge.inspect.record import RunRecord

__all__ = ["CRITIC_BLIND_WITHIN_PROMPTS", "CRITIC_WORSE_THAN_PROMPT_MEAN"]

CHANCE = 0.5
"""Share of pairs that values without any information order right."""

TELLING = 0.6
"""Share of ordered pairs of a perfect critic, below which the continuations are too noisy to tell one from chance."""

METRICS = (
    "critic/pairs_within",
    "critic/pairs_within_ceiling",
    "critic/pairs_across",
    "critic/explained_variance",
    "critic/explained_variance_prompt_mean",
)


def _last_check(run: RunRecord) -> Mapping[str, Any] | None:
    """The last check of a critic that has been trained for some updates, or of a finished one."""
    checks = [row for row in run.critic_checks if run.stage == "evaluate" or row["update"] >= MIN_TREND]
    return checks[-1] if checks else None


def _worse(run: RunRecord) -> Symptom | None:
    check = _last_check(run)
    gain = check and check.get("gain")
    if check is None or gain is None or gain["high"] is None or gain["high"] >= 0:
        return None
    explained, prompt, across = (
        check[name] for name in ("explained_variance", "prompt_explained_variance", "pairs_across")
    )
    seen = (
        f"of the mean returns of continuations the critic explains {_share(explained)}, the mean return of "
        f"{check['num_continuations']:.3g} other responses to the prompt {_share(prompt)}"
        f"{_place(check)}"
    )
    if across is not None:
        seen += f"; its values order {_share(across)} of the pairs of different prompts right, where chance is 50%"
    is_chance = across is not None and across["low"] <= CHANCE
    severity = "serious" if is_chance else "warning" if explained["low"] <= 0 else "note"
    return Symptom(severity, seen, _remedies(run), "or compare with groups of that size (--preset rloo)")


def _remedies(run: RunRecord) -> tuple[Remedy, ...]:
    if run.stage == "evaluate":
        return ()
    train = scale(run, "ppo.value_coef", 3.0)
    if run.setting("ppo.value_warmup_updates"):
        return (train,)
    return (train, set_to(run, "ppo.value_warmup_updates", 5, why="to train the critic alone first"))


def _blind(run: RunRecord) -> Symptom | None:
    check = _last_check(run)
    within = check and check.get("pairs_within")
    if check is None or within is None or within["low"] > CHANCE or (check.get("ceiling_within") or 0.0) < TELLING:
        return None
    return Symptom(
        "note",
        f"its values order {_share(within)} of the pairs of prefixes of one prompt right, where chance is 50% and a "
        f"perfect critic would reach about {check['ceiling_within']:.0%}{_place(check)}",
        (),
        "train the critic for longer, or compare with an advantage from groups of responses (--preset rloo)",
    )


def _place(check: Mapping[str, Any]) -> str:
    """When the critic was checked; one that `kedge critic` trained has no update."""
    return f" (after update {check['update']})" if check["update"] else ""


def _share(interval: Mapping[str, float]) -> str:
    return f"{interval['value']:.0%} ({interval['low']:.0%} to {interval['high']:.0%})"


def _is_checked(run: RunRecord) -> bool:
    return bool(run.critic_checks)


def _too_early(run: RunRecord) -> str:
    return "" if _last_check(run) else f"the critic was not checked after update {MIN_TREND} or later"


NEEDS = Needs(updates=0, stages=("ppo", "evaluate"), fits=_is_checked, lacks=_too_early)

CRITIC_WORSE_THAN_PROMPT_MEAN = Rule(
    "critic_worse_than_prompt_mean",
    "The mean return of a few other responses to the prompt, which is the baseline of RLOO and GRPO, is closer to what "
    "the policy earns from a prefix than the critic's value is. With groups of that size, a run without a critic would "
    "have less noisy advantages.",
    METRICS,
    _worse,
    NEEDS,
)

CRITIC_BLIND_WITHIN_PROMPTS = Rule(
    "critic_blind_within_prompts",
    "The critic cannot tell a good beginning of a response from a bad one, only one prompt from another. It gives no "
    "credit to single tokens.",
    METRICS,
    _blind,
    NEEDS,
)
