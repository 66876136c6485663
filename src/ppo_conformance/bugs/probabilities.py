"""Bugs of log probabilities, temperature and KL."""

from __future__ import annotations

from ppo_conformance.bugs import bug
from ppo_conformance.protocol import Array, Mask, Settings
from ppo_conformance.reference.formulas import Formulas
from ppo_conformance.reference.trainer import Reading, Trainer


@bug(
    Formulas.log_softmax,
    "update/ppo update/grpo_rejected",
    "20 huggingface/trl/issues/3029",
    "21 OpenRLHF/OpenRLHF/pull/853",
    "23 unslothai/unsloth-zoo/pull/832",
)
def no_temperature(self: Formulas, logits: Array, settings: Settings) -> Array:
    """Responses were sampled with a temperature that the log probabilities of the update did not have."""
    return Formulas.log_softmax(self, logits, {**settings, "temperature": 1.0})


@bug(Trainer.values, "update/ppo", "22 THUDM/slime/issues/1928")
def temperature_of_values(self: Trainer, reading: Reading, settings: Settings) -> Array:
    """The temperature divided the critic's values as well."""
    return reading.values / settings["temperature"]


@bug(Formulas.kl, "update/ppo", "12 areal-project/AReaL/pull/408")
def always_k3(self: Formulas, log_probs: Array, reference: Array, settings: Settings) -> tuple[Array, Array]:
    """Every choice of the estimator fell through to k3."""
    return Formulas.kl(self, log_probs, reference, {**settings, "kl": "k3"})


@bug(Formulas.kl_loss, "update/grpo", "15 Unakar/Logic-RL/issues/58")
def kl_maximized(
    self: Formulas, log_probs: Array, reference: Array, mask: Mask, settings: Settings
) -> tuple[float, Array]:
    """The KL was subtracted from the loss, which drove the policy away from the reference."""
    return Formulas.kl_loss(self, log_probs, reference, mask, {**settings, "coef": -settings["coef"]})


@bug(Formulas.shaped_rewards, "update/ppo", "16 marin-community/marin/issues/1708")
def kl_rewarded(
    self: Formulas, scores: Array, log_probs: Array, reference: Array, mask: Mask, settings: Settings
) -> Array:
    """The penalty had the other sign: divergence from the reference was rewarded."""
    return Formulas.shaped_rewards(self, scores, log_probs, reference, mask, {**settings, "coef": -settings["coef"]})


@bug(Formulas.kl, "vector/kl", "17 verl-project/verl/issues/6058")
def gradient_of_k3(self: Formulas, log_probs: Array, reference: Array, settings: Settings) -> tuple[Array, Array]:
    """The estimate of the KL was differentiated, which is not an estimate of the KL's gradient."""
    kind = "k3" if settings["kl"] == "k3_with_kl_gradient" else settings["kl"]
    return Formulas.kl(self, log_probs, reference, {**settings, "kl": kind})
