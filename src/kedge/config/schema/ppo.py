"""`ppo`: the PPO update."""

from string import Formatter
from typing import Any, Literal

from kedge.config.schema.field import Choice, choice_name
from kedge.config.schema.section import check, rewrite
from kedge.config.schema.update.advantages import Advantages
from kedge.config.schema.update.critic import CriticTraining
from kedge.config.schema.update.former import with_parts, without_former
from kedge.config.schema.update.guard import Guard
from kedge.config.schema.update.kl import KlControl, KlPenalty
from kedge.config.schema.update.loop import Loop
from kedge.config.schema.update.measurements import Measurements
from kedge.config.schema.update.policy_loss import ImportanceWeights, PolicyLoss, RatioOf
from kedge_base.estimators import CRITICS, Estimator, estimator_of

CLIPPED = ("clipped", "dual_clip", "cispo", "double_sided")
"""The policy losses with a clip range above 1."""

PENALIZED = ("kl_penalty_fixed", "kl_penalty_adaptive")
"""The policy losses with a KL penalty to the sampling policy."""


# pydantic orders the fields by the bases from the last to the first.
class PpoConfig(Measurements, Guard, Advantages, CriticTraining, KlPenalty, PolicyLoss, Loop):
    """The PPO update: loop, policy loss, KL to the reference, critic, advantages, groups, guard, evaluation."""

    @property
    def importance_cap(self) -> float | Literal["auto"] | None:
        """Cap of the importance weights; None for none, as with the sampler's log probabilities."""
        weights = self.old_logprobs.parameter or ImportanceWeights()
        return weights.cap if self.old_logprobs.name == "trainer" else None

    @property
    def importance_band(self) -> tuple[RatioOf, float, float] | None:
        """Kind of ratio in `importance_mask`, and the limits of its band; None for no mask."""
        if self.importance_mask is None:
            return None
        of = self.importance_mask.name
        return of, *(self.importance_mask.parameter or {"token": (0.5, 2.0), "sequence": (0.99, 1.01)}[of])

    @property
    def max_resamples(self) -> int:
        """Additional rounds of sampling with `constant_groups=resample`."""
        return self.constant_groups.parameter or 9

    @property
    def kl_estimator(self) -> Literal["k1", "k2", "k3"]:
        """The KL estimator. Unless `kl_in` names one, it is unbiased in the reward and has the right gradient in the
        loss.
        """
        return self.kl_in.parameter or ("k2" if self.kl_in.name == "loss" else "k1")

    @property
    def kl_control(self) -> KlControl:
        """The parameters of the controller of β."""
        return self.kl_controller.parameter or KlControl()

    @property
    def value_bins(self) -> tuple[float, float, int] | None:
        """Lower end, upper end, and number of bins of `value_loss=hl_gauss`; None for another loss."""
        return (self.value_loss.parameter or (-10.0, 10.0, 101)) if self.value_loss.name == "hl_gauss" else None

    @property
    def loss_name(self) -> str:
        """The policy loss, or the name of the user's function."""
        return str(self.policy_loss)

    @property
    def dual_clip(self) -> float | None:
        """Largest ratio that counts for tokens with negative advantages; None for no bound."""
        return self._loss_parameter(3.0) if self.loss_name == "dual_clip" else None

    @property
    def surrogate_kl_coef(self) -> float:
        """Weight of the KL to the sampling policy in the policy loss; unused without such a loss."""
        return self._loss_parameter(1.0) if self.loss_name in PENALIZED else 1.0

    def _loss_parameter(self, default: float) -> float:
        found = None if isinstance(self.policy_loss, str) else self.policy_loss.parameter
        return default if found is None else found

    @property
    def estimator(self) -> str:
        """The estimator of the advantages, or the name of the user's function."""
        return str(self.advantage)

    @property
    def estimator_facts(self) -> Estimator:
        """The properties of the estimator."""
        return estimator_of(self.estimator)

    @property
    def resolved_credit(self) -> Literal["token", "turn"]:
        """`credit`; a turn with `advantage=gigpo`, which compares turns."""
        return "turn" if self.estimator_facts.by_turn else self.credit

    @property
    def spike_sigma(self) -> float | None:
        """Standard deviations above the recent median that count as a spike; None without `on_spike`."""
        return None if self.on_spike is None else self.on_spike.parameter or 8.0

    @property
    def needs_reference(self) -> bool:
        """True if a reference model is needed: its KL is penalized, measured or bounded."""
        return self.kl_coef > 0 or self.measure_kl or self.max_kl is not None

    @property
    def charges_kl(self) -> bool:
        """True if the rewards contain the KL to the reference."""
        return self.kl_coef > 0 and self.kl_in.name != "loss"

    @property
    def names_critic(self) -> bool:
        """True if `critic_init` is the name of a trained critic."""
        return self.critic_init not in ("auto", "reward", "policy")

    @property
    def privileged(self) -> str | None:
        """The critic's privileged information: a text with columns in braces; None for a critic without it."""
        if self.critic.name != "privileged":
            return None
        columns = self.critic.parameter or ["answer"]
        return columns if isinstance(columns, str) else "".join(f"\n{name}: {{{name}}}" for name in columns) + "\n"

    @property
    def critic_passes(self) -> int:
        """Passes over the responses per epoch that train the critic; 0 if no loss trains it, or not at first."""
        return 0 if self.critic.name in ("readout", "frozen") else self.num_critic_epochs

    @property
    def readout_batches(self) -> int:
        """Number of batches that `critic=readout` is fitted to."""
        return (self.critic.parameter if self.critic.name == "readout" else None) or 8

    @property
    def value_weight(self) -> float:
        """The weight of the value loss, whose squares are halved: value_coef, or twice that for value_loss=mse."""
        return self.value_coef * (2.0 if self.value_loss.name == "mse" else 1.0)

    @property
    def needs_values(self) -> bool:
        """True if the estimator uses a critic."""
        return self.estimator_facts.critic == "needed"

    @property
    def needs_baseline(self) -> bool:
        """True if the estimator subtracts a score of the prompt."""
        return self.estimator_facts.baseline in ("greedy", "history")

    @property
    def needs_groups(self) -> bool:
        """True if the estimator compares the responses to a prompt."""
        return self.estimator_facts.baseline == "group"

    @property
    def whitens_advantages(self) -> bool:
        """`whiten_advantages`, with `auto` resolved."""
        if self.whiten_advantages == "auto":
            return self.estimator_facts.whitens
        return self.whiten_advantages

    @property
    def holds_out(self) -> bool:
        """True if anything is measured on held-out prompts."""
        return self.eval_every.updates is not None or self.critic_check.every is not None

    @property
    def num_held_out(self) -> int:
        """Maximum number of held-out prompts that are used."""
        evaluated = 0 if self.eval_every.updates is None else self.eval_every.num_prompts
        return max(evaluated, 0 if self.critic_check.every is None else self.critic_check.size[0])

    @property
    def num_policy_updates(self) -> int:
        """Minimum number of updates that train the policy: those after the critic's warm-up."""
        return self.num_updates - self.value_warmup_updates.at_most

    @property
    def resolved_critic(self) -> Literal["shared", "separate", "none"]:
        """The kind of critic, `auto` resolved."""
        if self.critic.name != "auto":
            return CRITICS[self.critic.name]
        return "none" if self.estimator_facts.critic == "unused" else "shared"

    @check
    def _check_clips(self) -> None:
        if self.clip_range_high is not None and self.loss_name not in CLIPPED:
            raise ValueError(
                f"ppo.clip_range_high={self.clip_range_high} needs ppo.policy_loss={' or '.join(CLIPPED)}, but "
                f"ppo.policy_loss={self.loss_name}; change or remove one"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"ppo.policy_loss={{dual_clip: {self.dual_clip:g}}} must be a ratio above 1, such as 3")
        if self.importance_band is not None and not self.importance_band[1] < 1 < self.importance_band[2]:
            of, low, high = self.importance_band
            raise ValueError(
                f"ppo.importance_mask={{{of}: [{low:g}, {high:g}]}} must name the ends of a band around 1, such as "
                "[0.5, 2]: at 1, sampler and trainer agree"
            )

    @check
    def _check_kl(self) -> None:
        if self.kl_controller.name != "fixed" and self.kl_coef == 0:
            raise ValueError(
                f"ppo.kl_controller={self.kl_controller} scales ppo.kl_coef, which is 0; start from e.g. 0.05"
            )
        if self.kl_controller.name == "schulman" and self.kl_control.horizon:
            raise ValueError("ppo.kl_controller=schulman has no horizon, which is ziegler's; leave it out")
        if self.kl_in == Choice("loss", "k1"):
            raise ValueError("ppo.kl_in={loss: k1} has no gradient on average; use k2 or k3")

    @rewrite
    @classmethod
    def _imply(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Set settings that others imply, unless they are set.

        A cross-entropy loss implies no `value_clip_range`, whose default is for squared errors, and an advantage that
        divides by a group's standard deviation a KL in the loss, as in the papers; GiGPO's is by turn.
        """
        settings = with_parts(cls, without_former(values), section="ppo")
        implied: dict[str, Any] = {}
        if choice_name(settings.get("value_loss")) == "hl_gauss":
            implied["value_clip_range"] = None
        facts = estimator_of(choice_name(settings.get("advantage")))
        if facts.divides and settings.get("kl_coef") != 0:
            implied["kl_in"] = "loss"
        if facts.by_turn:
            implied["credit"] = "turn"
        return {**implied, **settings}

    @check
    def _check_histogram(self) -> None:
        if self.value_bins is None:
            return
        if self.value_clip_range is not None:
            raise ValueError("ppo.value_loss=hl_gauss has no value clip; set ppo.value_clip_range=null")
        low, high, number = self.value_bins
        if low >= high or number < 2:
            raise ValueError(
                f"ppo.value_loss={{hl_gauss: {[low, high, number]}}} must name the lower end, the upper end and the "
                "number of bins, such as [-10, 10, 101]"
            )

    @check
    def _check_privileged(self) -> None:
        template = self.privileged
        if template is None:
            return
        try:
            fields = [(name, form or kind) for _, name, form, kind in Formatter().parse(template) if name is not None]
        except ValueError as error:
            raise ValueError(f"ppo.critic={{privileged: {template!r}}}: {error}") from None
        if not fields or not all(name and not more and not set(name) & set(".[") for name, more in fields):
            raise ValueError(
                f"ppo.critic={{privileged: {template!r}}} must be columns, such as [answer], or a text with "
                "columns in braces, such as 'The answer is {answer}.'"
            )

    @check
    def _check_init(self) -> None:
        if self.critic.name in ("auto", "shared", "detached", "readout") and self.critic_init == "reward":
            raise ValueError("ppo.critic_init=reward needs ppo.critic=separate")

    @check
    def _check_lambdas(self) -> None:
        if isinstance(self.gae_lambda, Choice) and not self.estimator_facts.decays_by_lambda:
            raise ValueError(f"ppo.gae_lambda=length_adaptive needs ppo.advantage=gae; it is {self.estimator}")
        if self.value_gae_lambda is not None and not self.needs_values:
            raise ValueError(
                f"ppo.value_gae_lambda has no effect with ppo.advantage={self.estimator}, whose returns contain no "
                "values; remove it"
            )

    @check
    def _check_rewards(self) -> None:
        if self.whiten_rewards and self.needs_groups:
            raise ValueError(
                f"ppo.whiten_rewards=true rescales the rewards that ppo.advantage={self.estimator} compares within "
                "groups; use false"
            )
        if self.needs_baseline and (self.whiten_rewards or self.gamma < 1):
            setting = "whiten_rewards=true" if self.whiten_rewards else f"gamma={self.gamma:g}"
            raise ValueError(
                f"ppo.{setting} scales the rewards, but not the score that ppo.advantage={self.estimator} subtracts; "
                "use ppo.whiten_rewards=false and ppo.gamma=1"
            )

    @check
    def _check_critic(self) -> None:
        critic = self.resolved_critic
        advantage, warmup = self.estimator, self.value_warmup_updates.at_most
        if critic == "none" and self.needs_values:
            raise ValueError(
                f"ppo.advantage={advantage} needs a critic's values, but ppo.critic=none; use ppo.critic=shared, or an "
                "advantage without a critic, e.g. ppo.advantage=to_go"
            )
        if critic == "none" and warmup:
            raise ValueError(
                f"ppo.value_warmup_updates={warmup} warms up a critic, and ppo.advantage={advantage} has none; use 0"
            )
        if self.num_critic_epochs > 1 and critic == "none":
            raise ValueError(
                f"ppo.num_critic_epochs={self.num_critic_epochs} trains a critic, and ppo.advantage={advantage} "
                "has none; use 1"
            )
        if self.critic_learning_rate is not None and critic != "separate":
            raise ValueError(
                "ppo.critic_learning_rate needs ppo.critic=separate; the rate of a shared value head is "
                "ppo.value_head_rate"
            )

    @check
    def _check_kl_in_groups(self) -> None:
        if self.estimator_facts.divides and self.charges_kl:
            raise ValueError(
                f"ppo.advantage={self.estimator} divides by the standard deviation of a group's rewards, so where all "
                "scores are equal, a KL in the reward weighs as much as the score elsewhere, at any ppo.kl_coef; use "
                "ppo.kl_in=loss, as in the paper, or ppo.kl_coef=0"
            )

    @check
    def _check_critic_check(self) -> None:
        if self.critic_check.every is not None and self.resolved_critic == "none":
            raise ValueError(
                f"ppo.critic_check={self.critic_check.every} checks a critic, and this run has none "
                f"(ppo.advantage={self.estimator}); remove it, or train a critic with ppo.critic=shared"
            )

    @check
    def _check_warmup(self) -> None:
        if 0 < self.num_updates <= self.value_warmup_updates.at_most:
            raise ValueError(
                f"ppo.value_warmup_updates={self.value_warmup_updates.at_most} leaves no update for the policy; "
                f"it must be below ppo.num_updates={self.num_updates}"
            )
