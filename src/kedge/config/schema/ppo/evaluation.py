"""Evaluation during PPO on held-out prompts, and early ends."""

from kedge.config.schema.field import field
from kedge.config.schema.section import Group

__all__ = ["EvaluationConfig"]


class EvaluationConfig(Group):
    """How often the policy answers prompts that it is not trained on, and what ends the run before its last update."""

    eval_every: int | None = field(
        None,
        ge=1,
        meaning="Updates between two evaluations on held-out prompts, at the start and at the end as well: score, KL, "
        "length, and the win rate against the start's responses if evaluate.judge names a judge. The prompts are "
        "data.eval_prompts, or held out of data.prompts. Null: none. It never changes what is trained, except that "
        "held-out prompts are not trained on.",
        source="kedge: off, because it takes prompts away from training. A tenth of ppo.num_updates costs about 1 % of "
        "a run of the default size",
        too_high="the best policy lies between two evaluations",
        too_low="sampling and scoring the held-out prompts takes a noticeable part of the run",
    )
    eval_num_prompts: int = field(
        64,
        ge=1,
        meaning="Held-out prompts per evaluation, at most; without data.eval_prompts also at most data.eval_fraction "
        "of data.prompts. Each gets one response, always with the same random numbers.",
        source="kedge: a mean over 64 responses has an eighth of their standard deviation",
        too_high="evaluations are slow",
        too_low="the figures are mostly noise, and so is the choice of the best checkpoint",
    )
    eval_patience: int | None = field(
        None,
        ge=1,
        meaning="Evaluations without a new best value of the metric in checkpoint.keep_best after which the run ends; "
        "null: it does not end early.",
        source="kedge: off; 3 is common in supervised training",
        too_high="the run goes on although it only over-optimizes the reward",
        too_low="noise ends the run before the policy has improved",
    )
    max_kl: float | None = field(
        None,
        gt=0,
        meaning="KL to the reference, in nats per response, above which the run ends after the update; null: no bound.",
        source="kedge: off; Gao and Stiennon see the gold score fall from about 10 nats on",
        too_high="a policy far from the reference is trained on",
        too_low="the run ends before the score has risen",
    )
