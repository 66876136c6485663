"""The FLOPs of an update, and the sizes of the models."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from kedge.algorithm.experience import Rollout
from kedge.models import LanguageModel, ScalarModel
from kedge.models.adapters import is_frozen
from kedge.models.frozen import num_weights
from kedge.rewards.source import ScoringModel
from kedge.rollout import Evaluated
from kedge.runs.run import Run
from kedge.stages.ppo.roles import Roles
from kedge.system.output import ROLES_FILE, replace_file
from kedge.training.host_state import unwrapped
from kedge.training.optimizer_kinds import state_bytes

__all__ = ["Costs", "write_roles"]


@dataclass(frozen=True)
class ForwardCost:
    """The FLOPs of a model's passes: 2 per weight and token, without the attention products.

    A backward pass costs as much for the gradient of the inputs, and again for that of the weights that are trained.

    Attributes:
        per_token: Weights used for every token: all except the embeddings, which are looked up.
        per_action: Weights of the output layer, which is only computed at actions.
        frozen_per_token: Those of them that no training changes, under an adapter.
        frozen_per_action: The same of the output layer.

    Source: Kaplan et al. 2020 (arXiv 2001.08361), section 2.1.
    """

    per_token: int = 0
    per_action: int = 0
    frozen_per_token: int = 0
    frozen_per_action: int = 0

    @classmethod
    def of(cls, model: LanguageModel | ScalarModel | None) -> ForwardCost:
        """The cost of a model; 0 for None."""
        if model is None:
            return cls()
        pretrained = model.causal if isinstance(model, LanguageModel) else model.classifier
        output = pretrained.get_output_embeddings()
        layer = list(output.parameters()) if isinstance(output, nn.Linear) else []
        looked_up = [each.weight for each in pretrained.modules() if isinstance(each, nn.Embedding)]
        excluded = {id(each) for each in (*layer, *looked_up)}  # a tied output layer is both
        inner = [each for each in pretrained.parameters() if id(each) not in excluded]
        return cls(*(num_weights(each) for each in (inner, layer, filter(is_frozen, inner), filter(is_frozen, layer))))

    def flops(self, num_tokens: int, num_actions: int) -> float:
        """The FLOPs of a forward pass."""
        return 2.0 * (self.per_token * num_tokens + self.per_action * num_actions)

    def backward_flops(self, num_tokens: int, num_actions: int) -> float:
        """The FLOPs of a backward pass."""
        frozen = 2.0 * (self.frozen_per_token * num_tokens + self.frozen_per_action * num_actions)
        return 2 * self.flops(num_tokens, num_actions) - frozen


@dataclass(frozen=True)
class Costs:
    """The forward costs of a run's models.

    Attributes:
        policy: Policy and shared critic.
        critic: A separate critic.
        reference: The reference.
        rewards: The sum of the reward models.
        recomputes: Activations are recomputed in the backward pass.
        judges: The sum of the reward models of weight 0; not part of the update's cost. None if there are none.
    """

    policy: ForwardCost
    critic: ForwardCost
    reference: ForwardCost
    rewards: ForwardCost
    recomputes: bool = False
    judges: ForwardCost | None = None

    @classmethod
    def of(cls, roles: Roles, *, recomputes: bool) -> Costs:
        """The costs of a run's models."""
        learned_from, judges = (_scoring(each) for each in (roles.reward.weighted_models, roles.reward.judges))
        return cls(
            policy=ForwardCost.of(roles.actor_critic.policy),
            critic=ForwardCost.of(roles.actor_critic.critic),
            reference=ForwardCost.of(roles.reference),
            rewards=learned_from,
            recomputes=recomputes,
            judges=judges if roles.reward.judges else None,
        )

    def metrics(
        self,
        rollout: Rollout,
        *,
        sampled: Sequence[Rollout] = (),
        evaluated: Evaluated,
        num_passes: float,
        train_policy: bool,
        num_critic_passes: float = 0.0,
        num_readings: int = 0,
    ) -> dict[str, float]:
        """`flops/PHASE`, their sum in steps of supervised fine-tuning on the same tokens, and the judges' FLOPs.

        Args:
            rollout: The responses that the update trains on.
            sampled: Everything that was sampled and scored; empty for the same responses.
            evaluated: What needed a separate forward pass for old log probabilities and values.
            num_passes: Epochs of gradients of the total loss; can be a fraction.
            train_policy: False if only the critic was trained.
            num_critic_passes: Further epochs of the critic alone; can be a fraction. For a shared head they are forward
                passes through the trunk.
            num_readings: Forward passes after the epochs.
        """
        tokens, actions = rollout.num_tokens, rollout.num_actions
        everything = sampled or [rollout]
        all_tokens, all_actions = (sum(counts) for counts in zip(*map(_size_of, everything), strict=True))
        policy, critic, reference = (each.flops(tokens, actions) for each in (self.policy, self.critic, self.reference))
        again = 1 + self.recomputes
        policy_trained, critic_trained = (
            again * each.flops(tokens, actions) + each.backward_flops(tokens, actions)
            for each in (self.policy, self.critic)
        )
        phases = {
            "rollout": self.policy.flops(all_tokens, all_actions),
            "reward": self.rewards.flops(all_tokens, all_actions),
            "experience": reference + {"nothing": 0.0, "critic": critic, "all": policy + critic}[evaluated],
            "train": num_passes * ((policy_trained if train_policy else policy) + critic_trained)
            + num_readings * (policy + critic)
            + num_critic_passes * (critic_trained if critic else self.policy.flops(tokens, 0)),
        }
        sft_step = policy + self.policy.backward_flops(tokens, actions)
        total = sum(phases.values()) / sft_step
        if self.judges is not None:
            phases["judge"] = self.judges.flops(all_tokens, all_actions)
        return {**{f"flops/{name}": flops for name, flops in phases.items()}, "cost/sft_steps": total}


def _size_of(rollout: Rollout) -> tuple[int, int]:
    """Tokens and actions."""
    return rollout.num_tokens, rollout.num_actions


def _scoring(models: Mapping[str, ScoringModel]) -> ForwardCost:
    return ForwardCost(sum(ForwardCost.of(each.model).per_token for each in models.values()))


def write_roles(run: Run, roles: Roles) -> None:
    """Write `roles.json`: the parameters and bytes of each model, and apart from them those of bases under adapters."""
    trained = {"policy": roles.actor_critic.policy, "critic": roles.actor_critic.critic}
    frozen = {"reference": roles.reference, **{f"reward: {name}": e.model for name, e in roles.reward.models.items()}}
    models = {name: list(model.parameters()) for name, model in {**trained, **frozen}.items() if model is not None}
    kept = state_bytes(unwrapped(roles.optimizer))
    bases = {weight for weights in models.values() for weight in weights if is_frozen(weight)}
    sizes = {"base": _role(bases, trained=False)} if bases else {}
    for name, weights in models.items():
        own = [weight for weight in weights if weight not in bases]
        sizes[name] = _role(own, trained=name in trained, kept=kept)
    for name, each in roles.reward.models.items():
        if (error := each.model.rounding_error) is not None:
            sizes[f"reward: {name}"]["rounding_error"] = error
    replace_file(run.folder / ROLES_FILE, [json.dumps(sizes, indent=2).encode()])


def _role(
    weights: Collection[Tensor], *, trained: bool, kept: Mapping[nn.Parameter, int] | None = None
) -> dict[str, Any]:
    return {
        "parameters": num_weights(weights),
        "weights_bytes": sum(each.nbytes for each in weights),
        "optimizer_bytes": sum((kept or {}).get(cast(nn.Parameter, each), 0) for each in weights) if trained else 0,
        "trained": trained,
    }
