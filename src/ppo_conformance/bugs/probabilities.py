"""Bugs of log probabilities, temperature and KL: most of them another value of a setting."""

from ppo_conformance.bugs import bug
from ppo_conformance.oracle.formulas import Formulas
from ppo_conformance.reference.trainer import Trainer


@bug(
    Formulas.log_softmax,
    "update/ppo update/grpo_rejected metamorphic/temperature",
    "20 huggingface/trl/issues/3029",
    "21 OpenRLHF/OpenRLHF/pull/853",
    "23 unslothai/unsloth-zoo/pull/832",
)
def no_temperature(log_softmax, logits, settings):
    """Responses were sampled with a temperature that the log probabilities of the update did not have."""
    return log_softmax(logits, {**settings, "temperature": 1.0})


@bug(Trainer.values, "update/ppo", "22 THUDM/slime/pull/1928")
def temperature_of_values(values, reading, settings):
    """The temperature divided the critic's values as well."""
    return values(reading, settings) / settings["temperature"]


@bug(Formulas.kl_estimate, "update/ppo metamorphic/option_has_effect", "12 areal-project/AReaL/pull/408")
def always_k3(kl_estimate, kind, *token):
    """Every choice of the estimator fell through to k3."""
    return kl_estimate("k3", *token)


@bug(Formulas.kl_loss, "update/grpo vector/kl_loss", "15 Unakar/Logic-RL/issues/58")
def kl_maximized(kl_loss, *given):
    """The KL was subtracted from the loss, which drove the policy away from the reference."""
    *arrays, settings = given
    return kl_loss(*arrays, {**settings, "coef": -settings["coef"]})


@bug(Formulas.shaped_rewards, "update/ppo vector/shaped_rewards", "16 marin-community/marin/issues/1708")
def kl_rewarded(shaped_rewards, *given):
    """The penalty had the other sign: divergence from the reference was rewarded."""
    *arrays, settings = given
    return shaped_rewards(*arrays, {**settings, "coef": -settings["coef"]})


@bug(Formulas.kl_estimate, "vector/kl", "17 verl-project/verl/issues/6058")
def gradient_of_k3(kl_estimate, kind, *token):
    """The estimate of the KL was differentiated, which is not an estimate of the KL's gradient."""
    return kl_estimate(kind.removesuffix("_with_kl_gradient"), *token)
