"""The runs of TRL's trainers: each with an injected fault, and whether the log can show it; decided before judging.

Imports nothing of kedge: the environments with TRL read it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        trainer: TRL's trainer.
        name: The fault; healthy runs begin with `healthy`.
        rules: The rules that name it; the first is the best. Empty for a healthy run, and for a fault that the log
            does not show.
        why: Why the log shows it, or not.
    """

    trainer: str
    name: str
    rules: tuple[str, ...] = ()
    why: str = ""

    @property
    def is_healthy(self) -> bool:
        """True for a run without a fault."""
        return self.name.startswith("healthy")

    @property
    def is_visible(self) -> bool:
        """True if the log shows the fault."""
        return bool(self.rules)


BROKEN = ("steps_too_large", "first_update_too_large", "kl_exploding", "entropy_collapse", "entropy_rising",
          "score_falling", "gradient_spikes", "stops_at_once", "too_few_eos")  # fmt: skip
"""What steps that are far too large do to a policy; all of these say to lower the learning rate."""

GROUPS = (
    ("healthy", (), ""),
    ("healthy_kl", (), "beta 0.04"),
    ("healthy_exact", (), "a score of 0 or 1"),
    ("healthy_epochs", (), "num_iterations 2"),
    ("lr1000", BROKEN, "entropy, score and gradient norm"),
    ("lr10", BROKEN, "entropy, score and gradient norm"),
    ("lr001", ("reward_flat", "steps_too_small"), "the score stays"),
    ("sign", (), "no: the log has the score that is optimized, which rises"),
    ("sign_judged", ("proxy_up_judge_down",), "a second reward with weight 0 falls"),
    ("gradient_sign", ("score_falling",), "the score falls"),
    ("length", ("hacking_by_not_stopping", "hacking_by_length"), "fewer responses stop as the score rises"),
    ("truncated", ("truncated_at_cap", "too_few_eos"), "completions/clipped_ratio"),
    ("constant", ("groups_without_spread", "reward_flat"), "reward_std, frac_reward_zero_std"),
    ("template", (), "no: only a score that starts lower, as with a harder task"),
    ("beta0", (), "no: a policy far from the reference is no fault in itself, and without beta no KL is logged"),
    ("beta10", ("beta_too_large", "reward_flat"), "the score stays, beta is in training_args.bin"),
    ("equal", ("groups_without_spread", "no_exploration"), "frac_reward_zero_std, entropy"),
    ("no_eos", ("too_few_eos", "truncated_at_cap"), "completions/clipped_ratio"),
    ("one_token", ("groups_without_spread", "reward_flat", "no_exploration"), "frac_reward_zero_std"),
)
ACTOR_CRITIC = (
    ("healthy", (), "with missing_eos_penalty"),
    ("healthy_plain", (), "without"),
    ("healthy_exact", (), "a score of 0 or 1"),
    ("healthy_epochs", (), "num_ppo_epochs 2"),
    ("lr1000", BROKEN, "policy/approxkl_avg, policy/clipfrac_avg"),
    ("lr10", BROKEN, "policy/approxkl_avg, policy/clipfrac_avg"),
    ("lr001", ("steps_too_small", "reward_flat"), "policy/approxkl_avg, policy/clipfrac_avg"),
    ("sign", (), "no: the log has the score that is optimized, which rises"),
    ("gradient_sign", ("score_falling",), "the score falls"),
    ("length", ("hacking_by_not_stopping", "hacking_by_length"), "fewer stop tokens as the score rises"),
    ("truncated", ("too_few_eos", "truncated_at_cap"), "val/num_eos_tokens is 0"),
    ("constant", ("reward_flat",), "objective/scores never changes"),
    ("template", (), "no: only a score that starts lower, as with a harder task"),
    ("beta0", (), "no: a policy far from the reference is no fault in itself, and the score rises"),
    ("beta10", ("beta_too_large", "reward_flat", "steps_too_small"), "the score stays, kl_coef"),
    ("equal", ("no_exploration", "entropy_collapse", "reward_flat"), "objective/entropy"),
    ("no_eos", ("too_few_eos", "truncated_at_cap"), "val/num_eos_tokens is 0"),
    ("one_token", ("reward_flat", "no_exploration", "too_few_eos"), "the score stays, val/num_eos_tokens is 0"),
)
TUNING = (
    ("healthy", (), ""),
    ("healthy_no_eval", (), "nothing held out"),
    ("lr1000", ("loss_rising", "gradient_spikes", "overfitting"), "the loss rises"),
    ("lr10", (), "no: on this task ten times the rate still learns"),
    ("lr001", (), "no: a loss that falls slowly is also that of a model near its best"),
    ("overfit", ("overfitting",), "eval_loss rises"),
    ("truncated", (), "no: the log has no lengths"),
    ("template", (), "no: only a loss that starts higher, as with other data"),
    ("no_eos", (), "no: the log does not say which tokens are learned"),
    ("one_token", (), "no: a loss of nearly 0 is also that of data that the model knows"),
)
PREFERENCES = (
    ("healthy", (), ""),
    ("healthy_no_eval", (), "nothing held out"),
    ("lr1000", ("reward_model_at_chance", "loss_rising", "gradient_spikes", "overfitting"), "eval_accuracy, loss"),
    ("lr10", (), "no: on this task ten times the rate still learns"),
    ("lr001", (), "no: the pairs are ranked correctly all the same"),
    ("sign", (), "no: the held-out pairs are swapped as well"),
    ("random_labels", ("reward_model_at_chance", "overfitting"), "eval_accuracy"),
    ("constant", ("reward_model_at_chance",), "eval_accuracy is 0"),
    ("length", (), "no: the log has no lengths"),
    ("template", (), "no: pairs are told apart under any template"),
)
TRAINERS = {"grpo": GROUPS, "rloo": GROUPS, "ppo": ACTOR_CRITIC, "sft": TUNING, "reward": PREFERENCES}
CASES = tuple(Case(trainer, name, rules, why) for trainer, rows in TRAINERS.items() for name, rules, why in rows)
