"""Evaluation during PPO on held-out prompts, checks of the critic, and early ends."""

from kedge.config.schema.field import field
from kedge.config.schema.section import Group

__all__ = ["EvaluationConfig"]


class EvaluationConfig(Group):
    """How often policy and critic are tested on held-out prompts, and what ends the run before its last update."""

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
    critic_check: int | None = field(
        None,
        ge=1,
        meaning="Updates between two checks of the critic, at the start and at the end as well: responses to held-out "
        "prompts are cut at random places, each prefix is continued afresh several times, and the critic's value of "
        "the prefix is compared with the mean return of the continuations. The prompts are data.eval_prompts, or held "
        "out of data.prompts. Null: none. It never changes what is trained, except that held-out prompts are not "
        "trained on.",
        source="VinePPO (arXiv 2410.01679), section 7; kedge: off, because a check samples several times as many "
        "responses as an update of the default size",
        too_high="a critic that has gone wrong is noticed late",
        too_low="the checks take longer than the training",
    )
    critic_check_prompts: int = field(
        32,
        ge=2,
        meaning="Held-out prompts per check of the critic, at most; without data.eval_prompts also at most "
        "data.eval_fraction of data.prompts. The same ones each time, with the same random numbers.",
        source="kedge: intervals resample prompts; 32 give about ±0.06 for the share of ordered pairs across prompts",
        too_high="checks are slow",
        too_low="the intervals are too wide to tell a critic from chance",
    )
    critic_check_prefixes: int = field(
        4,
        ge=1,
        meaning="Prefixes per prompt in a check of the critic, each of another response, cut at a uniformly random "
        "token.",
        source="kedge: six pairs per prompt for the order within a prompt",
        too_high="checks are slow",
        too_low="there are few pairs within a prompt, and with 1 none",
    )
    critic_check_continuations: int = field(
        8,
        ge=2,
        meaning="Continuations per prefix in a check of the critic, and further responses per prompt, whose mean "
        "return is the baseline that the critic is compared with.",
        source="kedge; VinePPO estimates values with 9 and the truth with 256",
        too_high="checks are slow",
        too_low="the mean returns are noisy, and even a perfect critic orders few pairs right",
    )

    @property
    def holds_out(self) -> bool:
        """Whether anything is measured on held-out prompts."""
        return self.eval_every is not None or self.critic_check is not None

    @property
    def num_held_out(self) -> int:
        """Held-out prompts that are used, at most."""
        evaluated = 0 if self.eval_every is None else self.eval_num_prompts
        return max(evaluated, 0 if self.critic_check is None else self.critic_check_prompts)
