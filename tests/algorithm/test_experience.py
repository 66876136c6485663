from dataclasses import FrozenInstanceError, fields, replace

import jaxtyping
import pytest
import torch

from kedge.algorithm import Experience, Rollout, masked_mean, sequence_kl


@pytest.fixture
def experience(ragged) -> Experience:
    batch = ragged(1)
    rollout = Rollout(
        prompt_ids=torch.arange(15).reshape(5, 3),
        prompt_mask=torch.ones(5, 3, dtype=torch.bool),
        response_ids=torch.arange(35).reshape(5, 7),
        response_mask=batch.mask,
        logprobs=batch.old_logprobs,
        stopped=torch.tensor([True, False, True, True, False]),
        policy_version=4,
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
    assert selected.rollout.policy_version == 4


def test_slices_select_too_and_an_absent_reference_stays_absent(experience):
    selected = replace(experience, ref_logprobs=None).select(slice(1, 3))
    assert torch.equal(selected.scores, experience.scores[1:3])
    assert selected.ref_logprobs is None


def test_the_kl_is_the_log_ratio_of_counted_tokens(experience):
    rollout = experience.rollout
    expected = sequence_kl(experience.old_logprobs, experience.ref_logprobs, rollout.response_mask)
    torch.testing.assert_close(experience.kl.sum(-1), expected)
    assert (experience.kl[~rollout.response_mask] == 0).all()
    assert (replace(experience, ref_logprobs=None).kl == 0).all()


def test_counts(experience):
    rollout = experience.rollout
    assert rollout.num_tokens == sum(rollout.response_lengths.tolist()) == int(rollout.response_mask.sum())


def test_it_is_frozen(experience):
    with pytest.raises(FrozenInstanceError):
        experience.scores = torch.zeros(5)


def test_shapes_are_checked_at_every_call_of_the_tests(experience):
    with pytest.raises(jaxtyping.TypeCheckError):
        replace(experience, scores=torch.zeros(4))
    with pytest.raises(jaxtyping.TypeCheckError):
        masked_mean(torch.zeros(2, 3), torch.ones(2, 4, dtype=torch.bool))
