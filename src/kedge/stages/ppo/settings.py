"""The settings of PPO's updates, resolved once per run from the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

from kedge.algorithm.advantages import (
    Advantage,
    GeneralizedAdvantage,
    LengthAdaptiveLambda,
    NStepAdvantage,
    RewardToGo,
    TotalReward,
)
from kedge.algorithm.control_variate import ControlVariateAdvantage
from kedge.algorithm.critic import Bins, spread_of_returns
from kedge.algorithm.experience import Experience
from kedge.algorithm.group_advantages import (
    BaselineAdvantage,
    GroupInGroupAdvantage,
    GroupMeanAdvantage,
    LeaveOneOutAdvantage,
    OptimalBaselineAdvantage,
    ProcessAdvantage,
)
from kedge.algorithm.own import OwnAdvantage, function_name, taken_names
from kedge.algorithm.policy_losses import Surrogate, clip_ranges, named_surrogate
from kedge.config import Choice, Config, PpoConfig, RolloutConfig, config_at, scheduled_values
from kedge.rollout import Estimation
from kedge.training.controllers import Coefficients, Controllers, ValueWarmup
from kedge.training.objective import Objective
from kedge.training.optimizer import learning_rate_at
from kedge.training.prompt_means import PromptMeans
from kedge_base.errors import ConfigError
from kedge_base.importing import find_named

IMPORTANCE_CAP = 2.0
"""Value of `ppo.old_logprobs.cap=auto` if the engine is not exact: the usual cap of truncated importance sampling."""
N_STEPS = 5
"""Number of tokens whose rewards precede the bootstrapped value in `ppo.advantage=n_step`, as in A3C."""
SPO_DECAY = 0.875
"""The smallest ρ of SPO's authors: a mean has the weight of eight responses."""
LENGTH_ADAPTIVE_ALPHA = 0.05
"""VAPO's α, the share of a response that GAE looks ahead."""
SURROGATE_KL_TARGET = 0.01
"""KL to the sampling policy in nats per token for `policy_loss=kl_penalty_adaptive`: the best adaptive value of PPO."""
GOOD_SCORE = 1.0
"""Score from which a response counts as good for `ppo.positive_nll_coef`: verifiers score 1 for correct."""


@dataclass(frozen=True)
class OwnFunctions:
    """The parts of the algorithm that the user supplies; None for kedge's.

    Attributes:
        advantage: Estimates advantages and returns; see `OwnAdvantage`.
        surrogate: The policy loss; see `own_policy_loss`.
    """

    advantage: Callable[..., object] | None
    surrogate: Callable[..., object] | None

    @classmethod
    def of(cls, config: Config, objects: Mapping[str, Any]) -> OwnFunctions:
        """Collect the functions that were passed from Python, by field, and load those that a configuration names.

        Raises:
            ConfigError: A named function cannot be loaded, or one does not take the arguments of kedge's calls.
        """
        return cls(
            _function("ppo.advantage", config.ppo.advantage, objects, "rewards, mask, values=…, group=…"),
            _function("ppo.policy_loss", config.ppo.policy_loss, objects, "log_ratios, advantages"),
        )


def _function(field: str, value: object, objects: Mapping[str, Any], arguments: str) -> Any:
    """The function that was passed, or that a field names, if it takes kedge's arguments; None for neither."""
    function = objects.get(field)
    if function is None and isinstance(value, str) and ":" in value:
        function = find_named(value, word=field, error=ConfigError)
    if function is not None:
        try:
            signature(function).bind(0, 0, **dict.fromkeys(taken_names(function)))
        except TypeError as error:
            raise ConfigError(f"{field}: {function_name(function)}: {error}; expected f({arguments})") from None
        except ValueError:  # functions in C may have no signature
            pass
    return function


@dataclass(frozen=True, kw_only=True)
class PpoSettings:
    """The settings of an update; `at` returns another update's.

    Values that are used as configured are read from `ppo` and `rollout`. The others are resolved once, so that updates
    run no configuration code.

    Attributes:
        config: The run's configuration, with the update's values of the scheduled fields.
        ppo: Its section `ppo`.
        rollout: Its section `rollout`.
        seed: The run's seed, from which every random stream is derived.
        scheduled: The scheduled fields with their values in this update.
        exact: The engine's log probabilities equal the trainer's.
        own: The parts of the algorithm that the user supplies.
        estimation: Settings that turn scores into advantages.
        loss: The total loss, given the current coefficients and the unit of the returns.
        surrogate: The policy loss, given the coefficient of its KL penalty.
        clip: The limits (ε, ε_high) of single tokens' ratios; None if no token has such limits.
        masks_truncated: No step is taken on responses without a stop token.
        max_grad_norm: Largest gradient norm; None or 0 for no clipping.
        warmup_fraction: Share of the updates during which the learning rate rises.
        learns_in_returns_std: The value loss is measured in standard deviations of the returns.
        measures_distance: A controller needs the distance that each update moves the policy.
        samples_greedy: The advantages need the score of a greedy response to each prompt.
        compares_groups: The advantages compare the responses to a prompt.
        recomputes: Activations are recomputed in the backward pass.
    """

    config: Config
    ppo: PpoConfig
    rollout: RolloutConfig
    seed: int
    scheduled: Mapping[str, float]
    exact: bool
    own: OwnFunctions
    estimation: Estimation
    loss: partial[Objective]
    surrogate: partial[Surrogate]
    clip: tuple[float, float] | None
    masks_truncated: bool
    max_grad_norm: float | None
    warmup_fraction: float
    learns_in_returns_std: bool
    measures_distance: bool
    samples_greedy: bool
    compares_groups: bool
    recomputes: bool

    @classmethod
    def of(
        cls,
        config: Config,
        *,
        exact: bool,
        scheduled: Mapping[str, float] | None = None,
        own: OwnFunctions | None = None,
    ) -> PpoSettings:
        """Resolve the settings of a configuration.

        Args:
            config: The configuration, with an update's values of the scheduled fields.
            exact: The engine's log probabilities equal the trainer's.
            scheduled: The scheduled fields' values.
            own: The parts of the algorithm that the user supplies; None for those that the configuration names.
        """
        ppo = config.ppo
        own = OwnFunctions.of(config, {}) if own is None else own
        clip = clip_ranges(ppo.clip_range, ppo.clip_range_high)
        name = "clipped" if ppo.loss_name == "dual_clip" else ppo.loss_name
        surrogate = partial(named_surrogate, name, clip=clip, dual_clip=ppo.dual_clip, own=own.surrogate)
        return cls(
            config=config,
            ppo=ppo,
            rollout=config.rollout,
            seed=config.runtime.seed,
            scheduled=scheduled or {},
            exact=exact,
            own=own,
            estimation=_estimation_of(config, own, exact=exact),
            loss=partial(
                Objective,
                ratio=ppo.ratio,
                value_clip_range=ppo.value_clip_range,
                value_coef=ppo.value_weight,
                value_bins=value_bins_of(config),
                kl_estimator=ppo.kl_estimator,
                positive_nll_coef=ppo.positive_nll_coef,
                aggregation=ppo.aggregation,
                constant_length=config.rollout.max_new_tokens,
            ),
            surrogate=surrogate,
            clip=clip if name == "clipped" and ppo.ratio == "token" else None,
            masks_truncated=config.rollout.masks_truncated,
            max_grad_norm=config.optimization.of("ppo").max_grad_norm,
            warmup_fraction=ppo.warmup_fraction,
            learns_in_returns_std=learns_in_returns_std(config),
            measures_distance=ppo.loss_name == "kl_penalty_adaptive",
            samples_greedy=ppo.estimator_facts.baseline == "greedy",
            compares_groups=ppo.needs_groups,
            recomputes=config.runtime.recomputes,
        )

    def at(self, update: int) -> PpoSettings:
        """Return the settings of an update, which differ from the run's only if settings are scheduled."""
        if not self.config.schedules:
            return self
        values = scheduled_values(self.config, update)
        return PpoSettings.of(config_at(self.config, update), exact=self.exact, scheduled=values, own=self.own)

    def inexact(self) -> PpoSettings:
        """Return these settings for responses whose log probabilities are not the trainer's."""
        if not self.exact:
            return self
        return PpoSettings.of(self.config, exact=False, scheduled=self.scheduled, own=self.own)

    def reward_kl_coef(self, coefficients: Coefficients) -> float:
        """β of the KL in the reward; 0 if the KL is in the loss."""
        return 0.0 if self.ppo.kl_in.name == "loss" else coefficients.kl_coef

    def objective(self, experience: Experience, coefficients: Coefficients, *, train_policy: bool = True) -> Objective:
        """Build the total loss of an update.

        Args:
            experience: The update's experience; the unit of the value loss can be the spread of its returns.
            coefficients: The update's coefficients.
            train_policy: False while the critic warms up.
        """
        return self.loss(
            surrogate=self.surrogate(kl_coef=coefficients.surrogate_kl_coef),
            value_unit=_returns_unit(experience) if self.learns_in_returns_std else 1.0,
            entropy_coef=coefficients.entropy_coef,
            kl_coef=coefficients.kl_coef if self.ppo.kl_in.name == "loss" else 0.0,
            train_policy=train_policy,
        )

    def learning_rates(self, update: int, *, warmup_updates: int, train_policy: bool) -> dict[str, float]:
        """Compute the learning rates of an update's steps, as arguments of `set_learning_rate`.

        The schedule covers the updates of the policy. The critic's warm-up uses the peak rate, after a separate ramp.

        Args:
            update: Its number, from 1.
            warmup_updates: Length of the critic's warm-up.
            train_policy: False while the critic warms up.
        """
        ppo = self.ppo
        num_policy_updates = ppo.num_updates - warmup_updates
        peaks = {"learning_rate": ppo.learning_rate}
        if ppo.critic_learning_rate is not None:
            peaks["critic"] = ppo.critic_learning_rate
        return {
            name: learning_rate_at(
                update - 1 - (warmup_updates if train_policy else 0),
                num_policy_updates,
                learning_rate=peak,
                schedule=ppo.schedule.name if train_policy else "constant",
                warmup_steps=round(self.warmup_fraction * num_policy_updates),
            )
            for name, peak in peaks.items()
        }


def advantage_of(config: Config) -> Advantage:
    """Return the estimator that `ppo.advantage` selects."""
    use = config.ppo
    gae_lambda = use.gae_lambda
    if isinstance(gae_lambda, Choice):
        gae_lambda = LengthAdaptiveLambda(gae_lambda.parameter or LENGTH_ADAPTIVE_ALPHA)
    parameter = None if isinstance(use.advantage, str) else use.advantage.parameter
    gae = GeneralizedAdvantage(use.gamma, gae_lambda, use.value_gae_lambda)
    estimates: dict[str, Advantage] = {
        "gae": gae,
        "monte_carlo": GeneralizedAdvantage(use.gamma, 1.0, use.value_gae_lambda),
        "td": GeneralizedAdvantage(use.gamma, 0.0, use.value_gae_lambda),
        "n_step": NStepAdvantage(use.gamma, int(parameter or N_STEPS), use.value_gae_lambda),
        "to_go": RewardToGo(use.gamma),
        "total": TotalReward(use.gamma),
        "rloo": LeaveOneOutAdvantage(use.gamma),
        "grpo": GroupMeanAdvantage(use.gamma, scale_by_std=True),
        "dr_grpo": GroupMeanAdvantage(use.gamma),
        "reinforce++": RewardToGo(use.gamma),  # whitened over the batch, like the next one
        "reinforce++_baseline": GroupMeanAdvantage(use.gamma),
        "remax": BaselineAdvantage(use.gamma),
        "spo": BaselineAdvantage(use.gamma),
        "opo": OptimalBaselineAdvantage(use.gamma),
        "gigpo": GroupInGroupAdvantage(use.gamma, 1.0 if parameter is None else parameter),
        "rloo_critic": ControlVariateAdvantage(LeaveOneOutAdvantage(use.gamma), gae),
        "reinforce++_critic": ControlVariateAdvantage(RewardToGo(use.gamma), gae),
    }
    return estimates[use.estimator]


def coefficients_of(config: Config) -> Coefficients:
    """Create the first update's coefficients and their controllers."""
    ppo = config.ppo
    adaptive = ppo.loss_name == "kl_penalty_adaptive"
    controllers = Controllers(
        kl=ppo.kl_controller.name,
        kl_target=ppo.kl_control.target,
        horizon=ppo.kl_control.horizon,
        wait_fraction=ppo.kl_control.wait,
        num_policy_updates=ppo.num_policy_updates,
        responses_per_update=config.responses_per_update,
        entropy_target=ppo.entropy_target,
        surrogate_kl_target=SURROGATE_KL_TARGET if adaptive else None,
    )
    return Coefficients(controllers, ppo.kl_coef, ppo.entropy_coef, ppo.surrogate_kl_coef)


def prompt_means_of(config: Config) -> PromptMeans | None:
    """Create the running means of the prompts' scores; None unless they are the baseline."""
    advantage = config.ppo.advantage
    if config.ppo.estimator_facts.baseline != "history":
        return None
    assert isinstance(advantage, Choice), "it is the name of an estimator"
    return PromptMeans(advantage.parameter or SPO_DECAY)


def value_warmup_of(config: Config) -> ValueWarmup | None:
    """Create the critic's warm-up; None for no warm-up."""
    warmup = config.ppo.value_warmup_updates
    if not warmup.at_most:
        return None
    return ValueWarmup(most=warmup.at_most, until=warmup.until, num_updates=config.ppo.num_updates)


def learns_in_returns_std(config: Config) -> bool:
    """True if the critic's start, loss and steps are in standard deviations of the returns (`ppo.value_unit`)."""
    return config.ppo.value_unit == "returns_std" and value_bins_of(config) is None


def value_bins_of(config: Config) -> Bins | None:
    """Return the bins of the critic's histogram; None if its output is a scalar, as a read-out's is."""
    bins = None if config.ppo.critic.name == "readout" else config.ppo.value_bins
    return None if bins is None else Bins(*bins)


def _estimation_of(config: Config, own: OwnFunctions, *, exact: bool) -> Estimation:
    ppo = config.ppo
    advantage = advantage_of(config) if own.advantage is None else OwnAdvantage(own.advantage, ppo.gamma)
    cap = ppo.importance_cap
    if cap == "auto":
        cap = None if exact else IMPORTANCE_CAP
    kind = ppo.estimator_facts.process if own.advantage is None else "reward"
    process = ProcessAdvantage(leave_one_out=kind == "others", scale_by_std=kind == "std")
    return Estimation(
        advantage=advantage,
        process_advantage=None if kind == "reward" else process,
        positive_min_score=GOOD_SCORE if ppo.positive_nll_coef else None,
        old_from=ppo.old_logprobs.name,
        importance_cap=cap,
        importance_band=ppo.importance_band,
        gamma=ppo.gamma,
        credit=ppo.resolved_credit,
        kl_estimator=ppo.kl_estimator,
        kl_scope="sequence" if ppo.kl_in.name == "score" else "token",
        score_at=ppo.score_at,
        whiten_rewards=ppo.whiten_rewards,
        whiten_advantages=ppo.whitens_advantages,
    )


def _returns_unit(experience: Experience) -> float:
    """The standard deviation of the returns or the RMS of R − V, whichever is larger; 1 if both are 0.

    It scales with the reward, and the value loss of a batch starts at ½ or below. The standard deviation alone would
    multiply it without limit where returns hardly differ, as in a batch whose responses all fail, and the gradient of a
    shared trunk with it.
    """
    returns = experience.returns[experience.reward_mask]
    error = 0.0
    if experience.values is not None:
        error = float((returns - experience.values[experience.reward_mask]).square().mean().sqrt())
    return max(spread_of_returns(returns), error) or 1.0


def check_own_loop(config: Config, *, has_prompts: bool, has_reward: bool) -> None:
    """Reject settings that cannot take effect in a custom loop.

    Raises:
        ConfigError: One line with the setting and the reason.
    """
    ppo = config.ppo
    if config.rollout.max_staleness:
        raise ConfigError(
            "rollout.max_staleness samples the next prompts ahead, which only the loop knows; use 0, or train on "
            "batches of earlier updates"
        )
    if ppo.constant_groups.name == "resample":
        raise ConfigError("ppo.constant_groups=resample draws further prompts; use drop, or sample more in the loop")
    if ppo.holds_out and not (has_prompts and has_reward):
        name = "eval_every" if ppo.eval_every.updates is not None else "critic_check"
        raise ConfigError(f"ppo.{name} samples and scores held-out prompts: give the trainer prompts= and reward=")
    if ppo.estimator_facts.baseline == "greedy" and not has_reward:
        raise ConfigError(
            f"ppo.advantage={ppo.estimator} scores a greedy response to each prompt: give the trainer reward="
        )
    if chosen := config.data.choice_by_scores:
        raise ConfigError(f"{chosen[0]} chooses among prompts that the run draws; choose them in the loop")
    for name, value in {"curriculum": config.data.curriculum, "mix": config.data.mix}.items():
        if value and not has_prompts:
            raise ConfigError(f"data.{name} orders the run's prompts: give the trainer prompts=")
