"""An update's learning: PPO's epochs or TRPO's step, with the settings of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kedge.algorithm.masking import masked_whiten
from kedge.algorithm.policy_losses import named_surrogate
from kedge.config import Config
from kedge.gym.experience import ControlExperience
from kedge.stages.control.parts import Parts
from kedge.training.guard.guard import refuse_nonfinite
from kedge.training.guard.nonfinite import BadValue
from kedge.training.objective import Objective
from kedge.training.optimizer import learning_rate_at, set_learning_rate
from kedge.training.runtime import stream
from kedge.training.trpo import TrustRegion, trpo_update
from kedge.training.update import UpdateResult, distance_moved, ppo_update

__all__ = ["improve"]


def improve(
    config: Config,
    parts: Parts,
    experience: ControlExperience,
    update: int,
    *,
    before_changes: Callable[[], None],
) -> tuple[UpdateResult, dict[str, float]]:
    """Train policy and critic on an update's experience.

    Args:
        config: The configuration.
        parts: The run's.
        experience: The update's.
        update: Its number, from 1.
        before_changes: Called before the weights change.

    Returns:
        The result, and metrics: the learning rate, and how far the policy moved where a controller needs it.

    Raises:
        NumericsError: A loss or gradient is not finite; the step was not taken.
    """
    loop, use = config.control, config.control
    rate = learning_rate_at(
        update - 1, config.control.num_updates, learning_rate=loop.learning_rate, schedule=loop.schedule
    )
    set_learning_rate(parts.optimizer, rate)
    objective = objective_of(config, parts, remaining=rate / loop.learning_rate if loop.learning_rate else 1.0)
    if use.whiten_advantages == "batch":
        experience = experience.with_advantages(masked_whiten(experience.advantages, experience.action_mask))

    def check(step: int, figures: Mapping[str, float], search: Callable[[], BadValue]) -> bool:
        allowed = refuse_nonfinite(step, figures, search)
        before_changes()
        return allowed

    learner = parts.learner
    epochs = {
        "num_epochs": loop.num_epochs,
        "num_minibatches": loop.num_minibatches,
        "generator": stream(config.runtime.seed, "minibatches", update),
        "max_grad_norm": loop.max_grad_norm,
        "check_step": check,
    }
    if loop.algorithm == "trpo":
        region = TrustRegion(max_kl=use.trpo_kl, damping=use.trpo_damping, iterations=use.trpo_iterations)
        result = trpo_update(learner, parts.optimizer, experience, objective, region=region, **epochs)
    elif parts.compiled is not None:
        before_changes()
        result = parts.compiled(experience, objective, **epochs)
    else:
        result = ppo_update(
            learner,
            parts.optimizer,
            experience,
            objective,
            early_stop_kl=loop.early_stop_kl,
            repeated=learner.repeated,
            **epochs,
        )
    parts.optimizer.zero_grad(set_to_none=True)
    # What an adaptive penalty is adapted to, and what shows that an update went too far; one more pass.
    distance = distance_moved(learner, experience, repeated=learner.repeated)
    moved = {"policy/distance_moved": distance, "policy/learning_rate": rate}
    return result, moved


def objective_of(config: Config, parts: Parts, *, remaining: float = 1.0) -> Objective:
    """The total loss of an update.

    Args:
        config: The configuration.
        parts: The run's.
        remaining: Share of the learning rate that its schedule has left, which the clip range may follow.
    """
    use = config.control
    is_ppo = config.control.algorithm == "ppo"
    surrogate = named_surrogate(
        use.policy_loss if is_ppo else "unclipped",
        clip_range=use.clip_range * (remaining if use.anneal_clip_range else 1.0),
        kl_coef=parts.coefficients.surrogate_kl_coef,
    )
    return Objective(
        surrogate=surrogate,
        value_clip_range=use.value_clip_range,
        value_coef=use.value_coef,
        entropy_coef=parts.coefficients.entropy_coef if is_ppo else 0.0,
        whitens_minibatches=use.whiten_advantages == "minibatch",
    )
