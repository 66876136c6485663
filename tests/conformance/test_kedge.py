"""kedge in the conformance suite: whatever it offers conforms, and nothing that it offers is left out."""

from __future__ import annotations

import pytest

from ppo_conformance.results import load_adapter, run, select

NOT_OFFERED = {
    "vector/optimizer_steps:other_betas",
    "vector/policy_loss:episodes",
    "vector/policy_loss:short_episodes",
    "metamorphic/option_has_effect:optimizer_steps_betas",
    # kedge has one convention.
    "metamorphic/option_has_effect:gae_gae_whitening",
    "metamorphic/option_has_effect:group_advantages_single_response",
    "metamorphic/option_has_effect:policy_loss_empty_rows",
    "metamorphic/option_has_effect:policy_loss_sequence_gradient",
    "metamorphic/option_has_effect:reward_loss_ranking_weight",
    "metamorphic/option_has_effect:value_loss_empty_rows",
    "metamorphic/option_has_effect:value_loss_value_clip_form",
    "metamorphic/option_has_effect:value_loss_value_loss_scale",
}


@pytest.mark.parametrize("kind", ["vector", "metamorphic", "tokens"])
def test_kedge_conforms(kind: str) -> None:
    report = run(load_adapter("kedge"), "kedge", select([f"{kind}/*"]))
    assert [result for result in report.results if result.status in ("deviates", "error")] == []
    left_out = {f"{each.check}:{each.case}" for each in report.results if each.status == "not offered"}
    assert left_out == {name for name in NOT_OFFERED if name.startswith(kind)}
