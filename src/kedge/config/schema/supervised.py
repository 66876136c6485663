"""`sft`, `reward_model` and `critic`: the models that are trained before PPO."""

from typing import Literal

from kedge.config.schema.field import field, same
from kedge.config.schema.optimizer import Schedule, TrainedSection
from kedge.config.schema.rollout import check_responses
from kedge.config.schema.section import check


class SftConfig(TrainedSection):
    """Supervised fine-tuning on demonstrations: cross-entropy of the completion, EOS included."""

    learning_rate: float = field(3e-6, ge=0)
    """Peak learning rate of Adam.

    Source: N+ (1B to 6.9B); small models use 10 to 1000 times as much
    Too high: the loss jumps or diverges, and pretrained knowledge is lost
    Too low: the loss has hardly moved by the end of the data
    """
    schedule: Schedule = field("cosine")
    """How the learning rate decays to 0 over the run; constant: not at all. {cosine: 0.1}: after a linear rise from 0
    over a tenth of all optimizer steps.

    Source: N+, for SFT and reward models, and without a rise
    Too high: with a long rise, much of the run trains at a fraction of the learning rate
    Too low: without one, the first steps may be too large, because Adam's moment estimates are still poor
    """
    num_epochs: int = field(1, ge=1)
    """Passes over the demonstrations.

    Source: N+
    Too high: overfitting: the training loss falls while the held-out loss rises
    Too low: the loss is still falling at the end
    """
    batch_size: int = field(128, ge=1)
    """Sequences per optimizer step.

    Source: N+
    Too high: few steps per epoch
    Too low: noisy steps, which need a lower learning rate
    """


class RewardModelConfig(TrainedSection):
    """Reward-model training: pairwise or K-wise ranking loss on comparisons."""

    base: str | None = None
    """Folder or id of the model to start from; null uses `model` (in rlhf, the SFT model).

    Source: Stiennon: the reward model starts from the SFT model
    Text: a folder, a hub id or a run
    """
    learning_rate: float = same(SftConfig, "learning_rate")
    schedule: Schedule = same(SftConfig, "schedule")
    num_epochs: int = field(1, ge=1)
    """Passes over the comparisons.

    Source: N+ and InstructGPT, whose reward models overfit in a second epoch
    Too high: overfitting: held-out accuracy falls and the scores become overconfident
    Too low: the loss is still falling at the end
    """
    batch_size: int = field(64, ge=1)
    """Comparisons per optimizer step: pairs, or whole ranked lists.

    Source: N+
    Too high: few steps per epoch
    Too low: noisy steps, which need a lower learning rate
    """
    normalize: Literal["demonstrations", "comparisons", "none"] | None = None
    """Texts whose mean score is shifted to 0: the demonstrations, or the chosen responses of the comparisons; null uses
    the demonstrations if there are any, else the comparisons. 512 of them, evenly spread, if there are more.

    Source: Stiennon and N+: a mean of 0 on the reference summaries
    """
    normalize_scale: bool = False
    """Also divide the scores by their standard deviation on those texts.

    Source: off in Stiennon and N+, on in Ziegler
    """
    ties: Literal["drop", "davidson", "rao_kupper"] = "drop"
    """Equal ranks: drop them, or learn from them as a third outcome, by Davidson's model of ties or by Rao and
    Kupper's. Both learn one more number, which scoring does not need.

    Source: drop in Stiennon and InstructGPT; Davidson 1970, Rao and Kupper 1967
    """


class CriticConfig(TrainedSection):
    """A critic fitted to the Monte Carlo returns of the policy's responses, before PPO."""

    kind: Literal["separate", "shared"] = "separate"
    """A separate model, all of it trained; or a value head on the policy's trunk, which stays as it is.

    Source: VC-PPO and VAPO pretrain a separate one; kedge for the head
    """
    base: Literal["auto", "reward", "policy"] | str = "auto"
    """What a separate critic starts from, as ppo.critic_init; a reward model can also be named. Its head is fitted
    again.

    Source: Stiennon, N+: the reward model
    Text: a folder, a hub id or a run
    """
    num_prompts: int | None = field(None, ge=1)
    """Prompts to sample responses to, besides the held-out ones; null takes each prompt of the data once.

    Source: kedge
    Too high: sampling takes longer than it helps
    Too low: the critic learns the prompts by heart
    """
    num_responses: int = field(4, ge=1)
    """Responses per prompt, held-out prompts included.

    Source: kedge: further prompts teach more than further responses to the same ones, where there are any
    Too high: sampling takes longer than it helps
    Too low: with few prompts, the returns are too few to fit a critic
    """
    learning_rate: float = field(9e-6, ge=0)
    """Peak learning rate of Adam, for a separate critic.

    Source: the default of OpenRLHF's critic; small models use 10 to 1000 times as much
    Too high: the held-out loss rises from the first evaluation on
    Too low: the critic stays the least-squares fit that it starts as
    """
    schedule: Schedule = same(SftConfig, "schedule")
    num_epochs: int = field(1, ge=1)
    """Passes over the sampled responses, for a separate critic.

    Source: kedge: as the reward model, which overfits in a second pass
    Too high: overfitting: the held-out explained variance falls
    Too low: the loss is still falling at the end
    """
    batch_size: int = field(64, ge=1)
    """Responses per optimizer step.

    Source: N+, reward model
    Too high: few steps per epoch
    Too low: noisy steps, which need a lower learning rate
    """

    @check
    def _check_base(self) -> None:
        if self.kind == "shared" and self.base not in ("auto", "policy"):
            raise ValueError(
                "critic.base is what a separate critic starts from; critic.kind=shared has the policy's trunk"
            )
        check_responses("critic", self.num_prompts or 1, self.num_responses)

    @property
    def names_base(self) -> bool:
        """True if `base` is the name of a model."""
        return self.base not in ("auto", "reward", "policy")
