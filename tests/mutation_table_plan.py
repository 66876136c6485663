"""Mutations of the cost model of clusters."""

from __future__ import annotations

from tests.mutation import Mutation

__all__ = ["PLAN"]

COSTS = "tests/plan/test_costs.py"

PLAN = (
    Mutation(
        "weights-always-sent-over-the-network",
        "plan/passes.py",
        "layout.between(layout.cards) * practice.sync",
        "layout.card.network * practice.sync",
        f"{COSTS}::test_a_weight_sync_by_hand",
    ),
    Mutation(
        "one-step-off-without-overlap",
        "plan/update.py",
        "busy = max(sampling, rest) if layout.staleness else sampling + rest",
        "busy = sampling + rest",
        f"{COSTS}::test_an_update_is_the_sum_of_its_phases",
    ),
    Mutation(
        "separate-critic-without-memory",
        "plan/memory.py",
        "state = TRAINED_BYTES * policy.parameters * models / cards",
        "state = TRAINED_BYTES * policy.parameters / cards",
        f"{COSTS}::test_memory_by_hand",
    ),
    Mutation(
        "cheapest-layout-need-not-fit",
        "plan/layouts.py",
        "fitting = [each for each in updates if each.problem is None]",
        "fitting = list(updates)",
        "tests/plan/test_command.py::test_a_policy_that_is_too_large_is_told_how_many_cards_are_enough",
    ),
)
