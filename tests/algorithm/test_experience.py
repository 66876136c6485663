from dataclasses import FrozenInstanceError, fields, replace
from importlib import import_module
from typing import Literal

import jaxtyping
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from kedge.algorithm import Experience, Rollout, check_masks, masked_mean, sequence_kl
from kedge_base.errors import ShapeError


@pytest.fixture
def experience(ragged) -> Experience:
    batch = ragged(1)
    rollout = Rollout(
        prompt_ids=torch.arange(15).reshape(5, 3),
        prompt_mask=torch.ones(5, 3, dtype=torch.bool),
        response_ids=torch.arange(35).reshape(5, 7),
        token_mask=batch.mask,
        action_mask=batch.mask,
        logprobs=batch.old_logprobs,
        stopped=torch.tensor([True, False, True, True, False]),
        group=torch.tensor([0, 0, 1, 1, 2]),
        policy_version=torch.tensor([4, 4, 4, 3, 3]),
    )
    return Experience(
        rollout=rollout,
        scores=batch.scores,
        old_logprobs=batch.old_logprobs,
        ref_logprobs=batch.ref_logprobs,
        values=batch.values,
        rewards=batch.rewards,
        reward_mask=batch.mask,
        advantages=batch.advantages,
        returns=batch.returns,
    )


def test_rows_are_selected_in_their_order_from_every_tensor(experience):
    selected = experience.select(torch.tensor([3, 0]))
    assert selected.rollout.num_responses == 2
    for whole, part in ((experience.rollout, selected.rollout), (experience, selected)):
        for field in fields(whole):
            if isinstance(getattr(whole, field.name), torch.Tensor):
                assert torch.equal(getattr(part, field.name), getattr(whole, field.name)[[3, 0]]), field.name
    assert selected.rollout.group.tolist() == [1, 0]  # numbers stay, also where neighbors are gone
    assert selected.rollout.policy_version.tolist() == [3, 4]


def test_slices_select_too_and_an_absent_reference_stays_absent(experience):
    selected = replace(experience, ref_logprobs=None).select(slice(1, 3))
    assert torch.equal(selected.scores, experience.scores[1:3])
    assert selected.ref_logprobs is None


def test_the_kl_is_the_log_ratio_of_counted_tokens(experience):
    rollout = experience.rollout
    expected = sequence_kl(experience.old_logprobs, experience.ref_logprobs, rollout.action_mask)
    torch.testing.assert_close(experience.kl.sum(-1), expected)
    assert (experience.kl[~rollout.action_mask] == 0).all()
    assert (replace(experience, ref_logprobs=None).kl == 0).all()


def test_counts(experience):
    rollout = experience.rollout
    assert rollout.num_actions == sum(rollout.response_lengths.tolist()) == int(rollout.action_mask.sum())
    assert rollout.num_tokens == sum(rollout.row_lengths) == 15 + int(rollout.token_mask.sum())


def test_tokens_that_are_read_and_not_chosen_count_as_read_alone(experience):
    read = replace(experience.rollout, token_mask=torch.ones(5, 7, dtype=torch.bool))
    assert read.num_actions == experience.rollout.num_actions
    assert read.row_lengths == [10] * 5


@pytest.mark.usefixtures("unchecked")
def test_masks_that_break_their_contract_are_refused(experience):
    rollout = experience.rollout
    check_masks(rollout)
    check_masks(replace(rollout, token_mask=torch.ones_like(rollout.token_mask)))
    empty, unread = rollout.action_mask.clone(), rollout.token_mask.clone()
    empty[3], unread[2, 0] = False, False
    with pytest.raises(ShapeError, match="row 3 of the rollout has no action"):
        check_masks(replace(rollout, action_mask=empty))
    with pytest.raises(ShapeError, match="row 2 of the rollout has an action outside token_mask"):
        check_masks(replace(rollout, token_mask=unread))
    with pytest.raises(ShapeError, match="shapes must be equal"):
        check_masks(replace(rollout, token_mask=unread[:, :3]))


def test_all_that_a_response_scored(experience):
    assert torch.equal(experience.total_scores, experience.scores)
    per_token = torch.zeros(5, 7, dtype=torch.float64)
    per_token[1, 0], per_token[4, 0] = 0.5, -2.0
    total = replace(experience, token_scores=per_token).total_scores
    assert (total - experience.scores).tolist() == pytest.approx([0.0, 0.5, 0.0, 0.0, -2.0])


def test_it_is_frozen(experience):
    with pytest.raises(FrozenInstanceError):
        experience.scores = torch.zeros(5)


def test_shapes_are_checked_at_every_call_of_the_tests(experience):
    with pytest.raises(jaxtyping.TypeCheckError):
        replace(experience, scores=torch.zeros(4))
    with pytest.raises(jaxtyping.TypeCheckError):
        masked_mean(torch.zeros(2, 3), torch.ones(2, 4, dtype=torch.bool))


def test_a_call_that_passed_is_checked_again_with_any_other_shape_or_type():
    @jaxtyping.jaxtyped(typechecker=import_module("kedge_typechecker").check)
    def repeated(row: Float[Tensor, " n"], times: int, to: Literal["rows", "batch"] = "rows") -> Float[Tensor, "_ n"]:
        return row.repeat(times, 1) if times else row

    for _ in range(2):
        repeated(torch.zeros(3), 2)
        repeated(torch.zeros(3), times=2, to="batch")
    for wrong in (
        lambda: repeated(torch.zeros(3), 0),
        lambda: repeated(torch.zeros(3, dtype=torch.long), 2),
        lambda: repeated(torch.zeros(3, 1), 2),
        lambda: repeated(torch.zeros(3), times=2, to="entries"),
        lambda: repeated(torch.zeros(3), [2]),
    ):
        with pytest.raises(jaxtyping.TypeCheckError):
            wrong()
