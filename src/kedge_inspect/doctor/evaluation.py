"""Evaluations and generated responses: misleading figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kedge_base.texts import counted
from kedge_inspect.doctor.rule import Symptom, adjust, rule, scale
from kedge_inspect.doctor.series import fmt
from kedge_inspect.page.changes import percent
from kedge_inspect.record import RunRecord

MOSTLY = 0.5
"""Share of ties from which they dominate the win rate."""

CONTRADICTED = 0.25
MOSTLY_CONTRADICTED = 0.5
"""Thresholds of a warning and of a serious finding: the share of pairs with a different winner in the other order. A
judge that flips a coin contradicts itself in half of them; GPT-4 does in about a third (Zheng et al., arXiv 2306.05685,
table 2).
"""

ENOUGH_PAIRS = 20
"""Number of pairs of different length below which a few better long answers look like a bias of the judge."""

LONGER_WINS = 0.7
"""Share of pairs won by the longer response; always preferring it agrees with people on about 0.6 (Stiennon)."""

UNJUDGED = 0.1
HALF_UNJUDGED = 0.5
"""Thresholds of a warning and of a serious finding: the share of responses without a score or decision."""

FEW_STOPPED = 0.5
"""Share of responses that end with a stop token, below which most judged responses are cut off."""

FEW_DISTINCT = 0.5
ENOUGH_PROMPTS = 8
"""Number of different responses, as a share of the prompts, and the smallest number of prompts for a verdict."""

STAGES = ("evaluate", "generate")


def _no_result(run: RunRecord) -> str:
    return "" if run.summary else "the run has no result yet" if run.state == "running" else "the run has no result"


def _has_responses(run: RunRecord) -> bool:
    """False for the check of a critic, which judges no responses."""
    return run.setting("evaluate.critic") is None


def _compares(run: RunRecord) -> bool:
    """True if the evaluation compares responses, unlike one of pass@k."""
    return _has_responses(run) and (run.setting("generate.num_responses") or 1) == 1


JUDGED: dict[str, Any] = {"updates": 0, "stages": STAGES, "fits": _has_responses, "lacks": _no_result}
RESULT: dict[str, Any] = {**JUDGED, "stages": ("evaluate",), "fits": _compares}
"""The arguments of rules about responses, and of rules about comparisons."""


@rule(
    "The interval includes 50%: on these prompts the two cannot be told apart. It does not prove that they are equal.",
    figures=("win_rate", "num_judged"),
    **RESULT,
)
def win_rate_undecided(run: RunRecord, rate: Mapping[str, Any], judged: float) -> Symptom | None:
    """Seen: The win rate with its interval.

    Try: Judge more prompts (the finding estimates how many), or report that no difference was found.

    Threshold: The 95% interval includes 50%: a note.
    """
    if not rate["low"] <= 0.5 <= rate["high"]:
        return None
    distance = abs(rate["value"] - 0.5)
    reach = (rate["high"] - rate["low"]) / 2
    # The interval narrows with the square root of the number of prompts.
    needed = f"about {judged * (reach / distance) ** 2:,.0f} prompts" if distance > 0.01 else "many more prompts"
    return Symptom(
        "note",
        f"the win rate is {percent(rate)} on {counted(round(judged), 'prompt')}",
        () if run.setting("evaluate.num_prompts") is None else (scale("evaluate.num_prompts", 4.0),),
        f"judge {needed} to tell a difference of this size, or report that none was found",
    )


@rule(
    "Ties count half, so the win rate is close to 50% whichever policy is better.",
    figures=("tied", "num_judged"),
    **RESULT,
)
def mostly_ties(run: RunRecord, tied: float, judged: float) -> Symptom | None:
    """Seen: The number of ties, and of ties with equal texts.

    Try: A judge with a finer scale; if the texts are equal, policies that differ or a higher temperature.

    Threshold: Half of the decided pairs: a warning.
    """
    if not judged or tied / judged < MOSTLY:
        return None
    equal = run.summary.get("num_equal") or 0
    texts = f", {equal:,.0f} of them with equal texts" if equal else ""
    return Symptom(
        "warning",
        f"{tied:,.0f} of {counted(round(judged), 'pair')} tied{texts}",
        advice="compare policies that differ, or sample at a temperature at which their responses differ"
        if equal >= MOSTLY * tied
        else "use a judge with a finer scale",
    )


@rule(
    "The judge looks at the position of a response rather than at its text. The pairs on which it contradicts itself "
    "say nothing about the policies.",
    figures=("position_bias",),
    **{**RESULT, "fits": lambda run: run.setting("evaluate.judge_mode") == "pairwise"},
)
def judge_contradicts_itself(run: RunRecord, bias: Mapping[str, float]) -> Symptom | None:
    """Seen: The share of pairs with a different winner in the other order (a tie is not a winner), and how often the
    response shown first wins.

    Try: A stronger judge, or different instructions for it. The report shows these pairs.

    Threshold: 25% of the pairs is a warning, 50%, the share of a coin, is serious. Only for
    `evaluate.judge_mode=pairwise`.
    """
    if bias["contradicted"] < CONTRADICTED:
        return None
    place = "first" if bias["first_rate"] >= 0.5 else "second"
    rate = max(bias["first_rate"], 1 - bias["first_rate"])
    return Symptom(
        "serious" if bias["contradicted"] >= MOSTLY_CONTRADICTED else "warning",
        f"the judge names another winner in the other order for {bias['contradicted']:.0%} of the pairs, which count "
        f"as ties; the response shown {place} wins {rate:.0%} of the time",
        (),
        "use a stronger judge, or change its instructions; report.html shows these pairs",
    )


@rule(
    "The win rate may measure length: a policy can win it by writing more.",
    figures=("longer_wins", "num_unequal_lengths"),
    **RESULT,
)
def judge_prefers_length(run: RunRecord, longer: Mapping[str, Any], pairs: float) -> Symptom | None:
    """Seen: The share of pairs that the longer response wins, and the mean lengths of both sides.

    Try: Look at the win rate controlled for length, compare responses of similar length, or use a second judge that
    ignores length.

    Threshold: The longer response wins 70% of the pairs of different length, with an interval above 50%, and there are
    at least 20 of them: a note.
    """
    if longer["value"] < LONGER_WINS or longer["low"] <= 0.5 or pairs < ENOUGH_PAIRS:
        return None
    lengths = [run.summary.get(name) for name in ("length", "length_against")]
    means = f"; mean lengths are {fmt(lengths[0])} and {fmt(lengths[1])} tokens" if None not in lengths else ""
    return Symptom(
        "note",
        f"the longer response wins {percent(longer)} of the {pairs:,.0f} pairs whose lengths differ{means}",
        (),
        "look at the win rate controlled for length, compare responses of similar length, or use a second judge that "
        "ignores it",
    )


@rule(
    "The figures leave out part of the responses, and those may differ from the rest.",
    **JUDGED,
)
def unjudged_responses(run: RunRecord) -> Symptom | None:
    """Seen: The number of pairs that the judge did not decide, or of responses that the reward did not score.

    Try: Let the judge decide them, or state what the figures leave out.

    Threshold: A tenth is a warning, half is serious.
    """
    names = ("num_prompts", "num_judged") if "num_judged" in run.summary else ("num_responses", "num_scored")
    total, judged = (run.summary.get(name) for name in names)
    if not total or judged is None or (share := (total - judged) / total) < UNJUDGED:
        return None
    what, lacks = ("pair", "decision") if "num_judged" in run.summary else ("response", "score")
    return Symptom(
        "serious" if share >= HALF_UNJUDGED else "warning",
        f"{total - judged:,.0f} of {counted(round(total), what)} had no {lacks}",
        (),
        "let the judge decide them, or say what the figures leave out",
    )


@rule(
    "Most responses end in the middle. Their scores are those of fragments.",
    figures=("eos_rate", "length"),
    **JUDGED,
)
def responses_cut_off(run: RunRecord, rate: float, length: float) -> Symptom | None:
    """Seen: The share of the policy's responses, or of its episodes, that reach the token limit.

    Try: Raise `generate.max_new_tokens`; check that the model ends its responses with a token of `rollout.stop_token`.

    Threshold: Fewer than half of the responses end with a stop token: a warning.
    """
    endings = run.summary.get("endings")
    if endings:  # episodes, in which a turn without a stop token is still answered
        rate = 1 - endings.get("max_tokens", 0.0) - endings.get("context_overflow", 0.0)
    if rate >= FEW_STOPPED:
        return None
    return Symptom(
        "warning",
        f"{1 - rate:.0%} of the policy's responses are cut off at the token limit",
        (adjust("generate.max_new_tokens", "too_low"),),
        "check that the model ends its responses with a token of rollout.stop_token",
    )


@rule(
    "Different prompts get the same response: the policy has collapsed, or the prompts are the same.",
    figures=("num_distinct", "num_prompts"),
    **{**JUDGED, "stages": ("generate",)},
)
def responses_alike(run: RunRecord, distinct: float, prompts: float) -> Symptom | None:
    """Seen: The number of different responses to the prompts.

    Try: Check the prompts; raise `generate.temperature` if it is responses to one prompt that are to differ.

    Threshold: Fewer different responses than half of the prompts, from 8 prompts on: a warning.
    """
    if prompts < ENOUGH_PROMPTS or distinct >= FEW_DISTINCT * prompts:
        return None
    return Symptom(
        "warning",
        f"{prompts:,.0f} prompts have only {counted(round(distinct), 'different response')}",
        (adjust("generate.temperature", "too_low"),),
        "check that prompts differ; if they do, the policy answers without reading them",
    )
