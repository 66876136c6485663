"""`ppo`: the section, composed of groups. Users see it flat: `ppo.kl_coef`."""

from typing import Literal

from pydantic import model_validator

from kedge.config.schema.optimizer import OptimizerConfig
from kedge.config.schema.ppo.advantages import AdvantagesConfig
from kedge.config.schema.ppo.evaluation import EvaluationConfig
from kedge.config.schema.ppo.groups import GroupsConfig
from kedge.config.schema.ppo.guard import GuardConfig
from kedge.config.schema.ppo.kl import KlConfig
from kedge.config.schema.ppo.loop import LoopConfig
from kedge.config.schema.ppo.objective import ObjectiveConfig
from kedge.config.schema.ppo.value import ValueConfig
from kedge.config.schema.section import Section

__all__ = ["PpoConfig"]


class PpoConfig(Section):
    """The PPO update: loop, policy loss, KL to the reference, critic, advantages, groups, guard, evaluation."""

    optimization: OptimizerConfig = OptimizerConfig()
    loop: LoopConfig = LoopConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    kl: KlConfig = KlConfig()
    value: ValueConfig = ValueConfig()
    advantages: AdvantagesConfig = AdvantagesConfig()
    grouping: GroupsConfig = GroupsConfig()
    guard: GuardConfig = GuardConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @property
    def num_policy_updates(self) -> int:
        """Updates that train the policy, at least: those after the critic's warm-up."""
        return self.loop.num_updates - self.value.value_warmup_updates

    @property
    def resolved_critic(self) -> Literal["shared", "separate", "none"]:
        """The kind of critic, `auto` resolved."""
        if self.value.critic != "auto":
            return self.value.critic
        return "shared" if self.advantages.needs_values else "none"

    @model_validator(mode="after")
    def _check_critic(self) -> "PpoConfig":
        advantage, warmup = self.advantages.advantage, self.value.value_warmup_updates
        if self.resolved_critic == "none" and self.advantages.needs_values:
            raise ValueError(
                f"ppo.advantage={advantage} needs a critic's values, but ppo.critic=none; use ppo.critic=shared, or an "
                "advantage without a critic, e.g. ppo.advantage=to_go"
            )
        if self.resolved_critic == "none" and warmup:
            raise ValueError(
                f"ppo.value_warmup_updates={warmup} warms up a critic, and ppo.advantage={advantage} has none; use 0"
            )
        if self.value.num_critic_epochs > 1 and self.resolved_critic == "none":
            raise ValueError(
                f"ppo.num_critic_epochs={self.value.num_critic_epochs} trains a critic, and ppo.advantage={advantage} "
                "has none; use 1"
            )
        if self.value.value_gradient == "head" and self.resolved_critic != "shared":
            raise ValueError(
                "ppo.value_gradient=head needs ppo.critic=shared; here no trunk is shared "
                f"(ppo.critic={self.resolved_critic})"
            )
        if self.value.critic_learning_rate is not None and self.resolved_critic != "separate":
            raise ValueError(
                "ppo.critic_learning_rate needs ppo.critic=separate; the rate of a shared value head is "
                "ppo.value_head_rate"
            )
        return self

    @model_validator(mode="after")
    def _check_kl_in_groups(self) -> "PpoConfig":
        if self.advantages.advantage == "grpo" and self.kl.kl_in == "reward" and self.kl.kl_coef > 0:
            raise ValueError(
                "ppo.advantage=grpo divides by the standard deviation of a group's rewards, so where all scores are "
                "equal, a KL in the reward weighs as much as the score elsewhere, whatever ppo.kl_coef is; use "
                "ppo.kl_in=loss, as GRPO, or ppo.kl_coef=0"
            )
        return self

    @model_validator(mode="after")
    def _check_critic_check(self) -> "PpoConfig":
        if self.evaluation.critic_check is not None and self.resolved_critic == "none":
            raise ValueError(
                f"ppo.critic_check={self.evaluation.critic_check} checks a critic, and this run has none "
                f"(ppo.advantage={self.advantages.advantage}); remove it, or train a critic with ppo.critic=shared"
            )
        return self

    @model_validator(mode="after")
    def _check_warmup(self) -> "PpoConfig":
        if self.value.value_warmup_until is not None and not self.value.value_warmup_updates:
            raise ValueError(
                "ppo.value_warmup_until ends a warm-up early, and ppo.value_warmup_updates=0 is none; set it to the "
                "most updates that the warm-up may take"
            )
        if 0 < self.loop.num_updates <= self.value.value_warmup_updates:
            raise ValueError(
                f"ppo.value_warmup_updates={self.value.value_warmup_updates} leaves no update for the policy; "
                f"it must be below ppo.num_updates={self.loop.num_updates}"
            )
        return self
