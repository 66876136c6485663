"""`generate` and `evaluate`: what a finished policy writes, and how good it is."""

from typing import Literal

from kedge.config.schema.field import Section, StringList, knob

__all__ = ["Evaluate", "Generate"]


class Generate(Section):
    """How `kedge generate` and `kedge evaluate` sample."""

    num_responses: int = knob(
        1, ge=1, meaning="Responses per prompt (evaluate always takes one).", source="kedge: one answer to one question"
    )
    max_new_tokens: int | None = knob(
        None,
        ge=1,
        meaning="Longest response, in tokens; null takes rollout.max_new_tokens.",
        source="kedge: evaluated as trained",
        too_high="slow, where responses do not stop",
        too_low="responses are cut before they stop",
    )
    temperature: float = knob(
        0.01,
        gt=0,
        meaning="Divides the logits; 0.01 is greedy for all practical purposes.",
        source="N+ (evaluation)",
        too_high="responses are incoherent",
        too_low="all responses of a prompt are alike",
    )
    batch_size: int = knob(
        64,
        ge=1,
        meaning="Responses sampled at a time. Never changes the result.",
        source="kedge",
        too_high="out of memory",
        too_low="the device is not kept busy",
    )


class Evaluate(Section):
    """One policy against another, or against the references in the data."""

    against: str | None = knob(
        None,
        meaning="Folder or id of the policy to compare with; null: the references (`completion`) of the prompts.",
        source="kedge",
    )
    judge: str | None = knob(
        None,
        meaning="Who judges: a reward model's folder or id, or a function (`file.py:function`, `module:function`).",
        source="kedge: there is no judge to assume",
    )
    judge_mode: Literal["score", "pairwise"] = knob(
        "score",
        meaning="Whether the judge scores one response at a time, or names the better of two shown in both orders.",
        source="Stiennon's reward models score; judges that see two favour one position, hence both orders",
    )
    frontier: StringList = knob(
        [],
        meaning="Further policies (folders or ids) to place on the curve of score over KL from `against`.",
        source="Gao: proxy and gold score over √KL",
    )
    num_prompts: int | None = knob(
        None,
        ge=1,
        meaning="Prompts judged, the first ones; null takes all.",
        source="kedge: all that there are",
        too_high="slow",
        too_low="a wide confidence interval: ±7 points of win rate at 200 prompts",
    )
    num_bootstrap: int = knob(
        10_000,
        ge=100,
        meaning="Resamples of the prompts for the confidence interval.",
        source="kedge: the interval's ends settle to a tenth of a point",
        too_high="slow, without a sharper interval: only more prompts sharpen it",
        too_low="the interval's ends are noisy",
    )
    confidence: float = knob(
        0.95,
        gt=0,
        lt=1,
        meaning="Coverage of the confidence interval.",
        source="custom",
        too_high="the interval is wide",
        too_low="the interval misses the truth often",
    )
