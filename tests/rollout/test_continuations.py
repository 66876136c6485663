"""Continuations of cut responses: what is kept, what is sampled, and where they end."""

import pytest
import torch

from kedge.models import response_logprobs
from kedge.rollout.continuations import sample_continuations
from tests.rollout.test_sampler import PROMPTS, STOP, make_model, make_sampler, speaker

LIMIT = 12
ROWS, CUTS = [0, 0, 1, 2, 3, 3], [0, 3, 7, 11, 1, 4]
SEEDS = [10, 11, 12, 13, 14, 15]


def continued(sampler, sources, cuts):
    return sample_continuations(
        sampler, sources, ROWS, cuts, seeds=SEEDS, max_new_tokens=LIMIT, temperature=sampler.temperature
    )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_whole_responses_have_the_logprobs_and_masks_of_a_second_pass(family):
    model = make_model(family)
    sampler = make_sampler(model, temperature=0.7)
    sources = sampler.generate(PROMPTS, seeds=range(4))
    whole = continued(sampler, sources, CUTS)
    assert whole.group.tolist() == ROWS
    again = response_logprobs(model, whole, temperature=0.7)
    assert torch.allclose(again, whole.logprobs, atol=1e-5)
    for place, (row, cut) in enumerate(zip(ROWS, CUTS, strict=True)):
        assert torch.equal(whole.response_ids[place, :cut], sources.response_ids[row, :cut])
        assert torch.equal(whole.logprobs[place, :cut], sources.logprobs[row, :cut])


def test_each_is_a_sample_with_prompt_and_prefix_as_the_prompt():
    sampler = make_sampler(speaker(), stop_tokens=[STOP], max_new_tokens=LIMIT)
    sources = sampler.generate(PROMPTS, seeds=[3, 5, 7, 9])
    cuts = [min(cut, int(sources.response_lengths[row]) - 1) for row, cut in zip(ROWS, CUTS, strict=True)]
    whole = continued(sampler, sources, cuts)
    for place, (row, cut) in enumerate(zip(ROWS, cuts, strict=True)):
        prefix = [*PROMPTS[row], *sources.response_ids[row, :cut].tolist()]
        alone = make_sampler(sampler.model, stop_tokens=[STOP], max_new_tokens=LIMIT - cut).generate(
            [prefix], seeds=[SEEDS[place]]
        )
        length = cut + int(alone.action_mask.sum())
        assert torch.equal(whole.response_ids[place, cut:length], alone.response_ids[0, : length - cut])
        assert int(whole.action_mask[place].sum()) == length
        assert bool(whole.stopped[place]) is bool(alone.stopped[0])
    assert 0 < int(whole.stopped.sum()) < len(ROWS)
    assert torch.equal(whole.action_mask, whole.token_mask)


def test_no_row_reads_more_tokens_than_there_is_room_for():
    # GPT-2 has 256 positions. Finished rows are still computed, so no batch may run further than its longest row.
    sampler = make_sampler(make_model("gpt2"), max_new_tokens=20)
    sources = sampler.generate([list(range(3, 239)), [5]], seeds=[1, 2])
    lengths = sources.response_lengths.tolist()
    cuts = [0, min(lengths) - 1, lengths[0] - 1, 2]
    whole = sample_continuations(
        sampler, sources, [0, 1, 0, 0], cuts, seeds=SEEDS[:4], max_new_tokens=20, temperature=1.0, room=256
    )
    assert int(whole.response_lengths.max()) <= 20
