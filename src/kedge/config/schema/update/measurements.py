"""`ppo`: measurements during the run, and early stopping."""

from typing import Annotated

from annotated_types import Ge

from kedge.config.schema.field import field
from kedge.config.schema.section import Parameters, Section, check


class Evaluations(Parameters):
    """Evaluation on held-out prompts: how often, and on how many."""

    updates: int | None = field(..., ge=1)
    """Updates between two evaluations, as the value alone.

    Source: kedge: off
    """
    num_prompts: int = field(64, ge=1)
    """Held-out prompts per evaluation, at most; without data.eval_prompts also at most data.eval_fraction of
    data.prompts. Each gets one response, always with the same random numbers.

    Source: kedge: a mean over 64 responses has an eighth of their standard deviation
    Too high: evaluations are slow
    Too low: the figures are mostly noise, and so is the choice of the best checkpoint
    """


class CriticCheck(Parameters):
    """How often the critic is checked, and how closely."""

    every: int | None = field(None, ge=1)
    """Updates between two checks, as the value alone.

    Source: kedge: off
    """
    size: list[Annotated[int, Ge(1)]] = field([32, 4, 8])
    """Size of a check: held-out prompts, at most; prefixes per prompt, each of another response, cut at a uniformly
    random token; and continuations per prefix, which are also the further responses per prompt that make the baseline.
    The same prompts each time, with the same random numbers.

    Source: kedge: intervals resample prompts; 32 give about ±0.06 for the share of ordered pairs across prompts, and 4
        prefixes six pairs within a prompt. VinePPO estimates values with 9 continuations and the truth with 256
    Too high: checks are slow
    Too low: few prompts: the intervals are too wide to tell a critic from chance; few continuations: even a perfect
        critic orders few pairs right
    """

    @check
    def _check_size(self) -> None:
        match self.size:
            case [prompts, _, continuations] if min(prompts, continuations) >= 2:
                pass
            case _:
                raise ValueError(
                    f"size={self.size} must be the numbers of prompts, of prefixes of "
                    "each, and of continuations of each prefix, such as [32, 4, 8]; at least 2 of the first and last"
                )


class Measurements(Section):
    """Evaluation on held-out prompts, checks of the critic, and early ends."""

    eval_every: Evaluations = Evaluations(updates=None)
    """Updates between two evaluations on held-out prompts (data.eval_prompts, or a part of data.prompts), at the start
    and at the end as well: score, KL, length, and the win rate against the start's responses if evaluate.judge names a
    judge. Null: none. {updates: 20, num_prompts: 100} gives the number of prompts. It changes nothing that is trained,
    except that held-out prompts are not trained on.

    Source: kedge: off, because it takes prompts away from training. A tenth of ppo.num_updates costs about 1 % of a run
        of the default size
    Too high: the best policy lies between two evaluations
    Too low: sampling and scoring the held-out prompts takes a noticeable part of the run
    """
    eval_patience: int | None = field(None, ge=1)
    """Evaluations without a new best value of the metric in checkpoint.keep_best after which the run ends; those of the
    critic's warm-up are not counted. null: it does not end early.

    Source: kedge: off; 3 is common in supervised training
    Too high: the run continues although it only over-optimizes the reward
    Too low: noise ends the run before the policy has improved
    """
    max_kl: float | None = field(None, gt=0)
    """KL to the reference, in nats per response, above which the run ends after the update; null: no bound.

    Source: kedge: off; Gao and Stiennon see the gold score fall from about 10 nats on
    Too high: a policy far from the reference is trained on
    Too low: the run ends before the score has risen
    """
    critic_check: CriticCheck = CriticCheck()
    """Updates between two checks of the critic, at the start and at the end as well: responses to held-out prompts, as
    in ppo.eval_every, are cut at random places, each prefix is continued several times, and the critic's value of the
    prefix is compared with the mean return of the continuations. Null: none. {every: 10, size: [32, 4, 8]} gives their
    size, which is also that of a check in `kedge evaluate`.

    Source: VinePPO (arXiv 2410.01679), section 7; kedge: off, because a check samples several times as many responses
        as an update of the default size
    Too high: a critic that has gone wrong is noticed late
    Too low: the checks take longer than the training
    """
