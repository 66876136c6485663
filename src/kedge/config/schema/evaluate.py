"""`generate` and `evaluate`: how a finished policy is sampled, how two are compared, and how a critic is checked."""

from typing import Literal

from kedge.config.schema.field import field
from kedge.config.schema.section import Section, StringList, check


class GenerateConfig(Section):
    """Sampling from a finished policy, in `kedge generate` and `kedge evaluate`."""

    num_responses: int = field(1, ge=1)
    """Responses per prompt. With several, evaluate measures pass@k and maj@k instead of a win rate.

    Source: kedge: one response per prompt
    Too high: slow
    Too low: no pass@k for larger k
    """
    best_of: int | None = field(None, ge=2)
    """Sample this many responses per prompt, and write only the one that scores best (`--best-of`), the first of equal
    ones; needs a reward. Null: write all.

    Source: off; Stiennon and Gao compare with it: best-of-n reaches PPO's scores at a far smaller KL
    Too high: n times the sampling for scores that rise with log n; the reward's errors are selected as well
    Too low: hardly better than a single response
    """
    max_new_tokens: int | None = field(None, ge=1)
    """Maximum response length, in tokens; null uses rollout.max_new_tokens.

    Source: kedge: the length of the training rollouts
    Too high: slow if responses do not stop
    Too low: responses are cut off before they end
    """
    temperature: float | None = field(None, ge=0)
    """Divides the logits; 0 takes the most likely token at each step, with any seed. null is 0 for one response per
    prompt, and rollout.temperature for several, which are to differ.

    Source: kedge: an answer that no seed changes; N+ evaluates at 0.01
    Too high: responses become incoherent
    Too low: all responses to a prompt are identical
    """
    batch_size: int = field(64, ge=1)
    """Responses sampled at once. Does not change the result.

    Source: kedge
    Too high: out of memory
    Too low: the device is underused
    """

    @check
    def _check_best_of(self) -> None:
        if self.best_of is not None and self.num_responses > 1:
            raise ValueError(
                f"generate.best_of={self.best_of} samples {self.best_of} responses to each prompt and keeps one; leave "
                f"out generate.num_responses={self.num_responses}"
            )


class EvaluateConfig(Section):
    """Comparison of a policy with another one, or with the references in the data; or a check of a critic."""

    against: str | None = None
    """Folder or id of the policy to compare with; null uses the references (`completion`) in the prompts.

    Source: kedge
    Text: a folder, a hub id or a run
    """
    judge: str | None = None
    """The judge: a reward model's folder or id, a function (`file.py:function`, `module:function`), or a model behind
    an API (`openai:MODEL@URL`).

    Source: kedge: no judge is assumed
    Text: a folder, a hub id or a function
    """
    judge_mode: Literal["score", "pairwise"] = "score"
    """The judge scores each response on its own, or picks the better of two shown in both orders.

    Source: Stiennon's reward models score; pairwise judges favor a position, so both orders are shown
    """
    frontier: StringList = field([])
    """Further policies (folders or ids) to place on the curve of score over KL from `against`.

    Source: Gao: proxy and gold score over √KL
    """
    num_prompts: int | None = field(None, ge=1)
    """Number of prompts to judge, from the first on; null uses all.

    Source: kedge: all prompts, for the narrowest interval
    Too high: slow
    Too low: the confidence interval is wide: ±7 points of win rate at 200 prompts
    """
    labeled_prompts: bool = False
    """Accept prompts of which people's labels were trained on: by the reward model, or by the policy.

    Source: kedge: a policy is judged on prompts that nothing was fitted to
    """
    critic: str | None = None
    """A critic to check instead, as ppo.critic_check does: that of a run of PPO (`runs/ppo`, `runs/ppo@8`), with its
    own policy, rewards and settings, or a trained critic (a run of `kedge critic`, a folder or an id).

    Source: VinePPO (arXiv 2410.01679), section 7
    Text: a run, a folder or a hub id
    """

    @check
    def _check_critic(self) -> None:
        if self.critic is not None and (self.against is not None or self.judge is not None):
            other = "against" if self.against is not None else "judge"
            raise ValueError(
                f"evaluate.critic checks a critic instead of comparing policies; leave out evaluate.{other}"
            )
