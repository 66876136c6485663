"""Mutations of what trains policies on environments."""

from __future__ import annotations

from tests.mutation import Mutation

__all__ = ["CONTROL"]

GRADIENT = "tests/algorithm/test_natural_gradient.py"
TRPO = "tests/training/test_trpo.py"
COMPILED = "tests/training/test_compiled.py"
BY_HAND = "tests/gym/test_experience.py::test_five_steps_by_hand"

CONTROL = (
    Mutation(
        "natural-step-of-half-the-kl",
        "algorithm/natural_gradient.py",
        "math.sqrt(2.0 * max_kl / curvature)",
        "math.sqrt(max_kl / curvature)",
        f"{GRADIENT}::test_the_natural_step_solves_the_damped_system_and_spends_the_kl",
    ),
    Mutation(
        "conjugate-gradient-without-the-conjugate",
        "algorithm/natural_gradient.py",
        "direction = residual + squared / before * direction",
        "direction = residual.clone()",
        f"{GRADIENT}::test_k_iterations_are_the_best_solution_in_the_krylov_space",
    ),
    Mutation(
        "line-search-on-the-surrogate-alone",
        "algorithm/natural_gradient.py",
        "improvement > 0.0 and kl <= max_kl",
        "improvement > 0.0 and kl <= 1.0",
        f"{TRPO}::test_every_accepted_update_stays_within_the_kl_and_improves_the_surrogate",
    ),
    Mutation(
        "weights-of-the-last-try-kept",
        "training/trpo.py",
        "        _assign(parameters, old)\n",
        "        pass\n",
        f"{TRPO}::test_a_search_that_finds_nothing_leaves_the_weights_to_the_bit",
    ),
    Mutation(
        "policy-steps-down-the-surrogate",
        "training/trpo.py",
        "        -gradient,\n",
        "        gradient,\n",
        f"{TRPO}::test_the_step_is_that_of_an_explicit_fisher_matrix",
    ),
    Mutation(
        "cut-episodes-taken-for-ended-ones",
        "gym/experience.py",
        "behind = torch.where(steps.terminated, 0.0, behind)",
        "behind = torch.where(steps.terminated | steps.truncated, 0.0, behind)",
        BY_HAND,
    ),
    Mutation(
        "cut-episodes-valued-by-the-next-ones-first-state",
        "gym/vectorized.py",
        "        if self._mode != AutoresetMode.SAME_STEP:\n            return self.observations[number].copy()",
        "        if True:\n            return self.observations[number].copy()",
        BY_HAND,
    ),
    Mutation(
        "steps-without-an-action-trained-on",
        "gym/vectorized.py",
        "record.valid[step] = ~self._over",
        "record.valid[step] = True",
        BY_HAND,
    ),
    Mutation(
        "memory-kept-beyond-the-episode",
        "gym/rollout.py",
        "state = blank_where(environments.starts, state)",
        "state = state.clone()",
        "tests/gym/test_memory.py::test_sequences_equal_one_step_at_a_time",
    ),
    Mutation(
        "squashed-density-without-the-slope",
        "gym/distributions.py",
        "self._base.log_prob(actions) - _log_slope(actions).sum(-1)",
        "self._base.log_prob(actions)",
        "tests/gym/test_distributions.py::test_a_squashed_gaussian_has_the_density_of_its_tanh",
    ),
    Mutation(
        "environments-with-the-same-episodes",
        "gym/replay.py",
        "[seed, environment, episode]",
        "[seed, episode]",
        "tests/gym/test_rollout.py::test_a_restored_environment_goes_on_to_the_bit",
    ),
    Mutation(
        "compiled-steps-clipped-at-twice-the-norm",
        "training/compiled_step.py",
        "_clip(gradients, each, max_grad_norm) for each",
        "_clip(gradients, each, max_grad_norm and 2 * max_grad_norm) for each",
        f"{COMPILED}::test_the_step_is_the_updates_own",
    ),
    Mutation(
        "compiled-second-moment-with-the-firsts-rate",
        "training/compiled_step.py",
        "value=1.0 - group.betas[1])",
        "value=1.0 - group.betas[0])",
        f"{COMPILED}::test_the_step_is_the_updates_own",
    ),
    Mutation(
        "compiled-update-that-failed-not-taken-back",
        "training/compiled.py",
        "tensor.copy_(old)",
        "tensor.copy_(tensor)",
        f"{COMPILED}::test_a_value_that_is_not_finite_is_found_by_the_repeated_update",
    ),
    Mutation(
        "repeated-update-shuffled-differently",
        "training/compiled.py",
        "        generator.set_state(before_shuffles)\n",
        "        assert before_shuffles is not None\n",
        f"{COMPILED}::test_a_value_that_is_not_finite_is_found_by_the_repeated_update",
    ),
    Mutation(
        "acting-without-biases",
        "gym/acting.py",
        "out += bias",
        "out += 0 * bias",
        "tests/gym/test_acting.py::test_numpy_and_torch_give_the_policys_outputs",
    ),
)
