"""The built-in sampler: the distribution it draws from, where it stops, and that rows never influence each other."""

import math

import pytest
import torch

from kedge.models import LanguageModel, response_logprobs
from kedge.rollout import Sampler
from kedge.rollout.sampler import _inverse_cdf
from tests.tiny import FAMILIES, tiny_causal_lm, tiny_tokenizer

PROMPTS = [[5, 6, 7, 8, 9], [20, 21], [30], [40, 41, 42]]


def make_model(family="llama", extra_rows=0):
    tokenizer = tiny_tokenizer()
    return LanguageModel(tiny_causal_lm(family, len(tokenizer) + extra_rows), tokenizer)


def make_sampler(model, **settings):
    return Sampler(model, **{"pad_id": 0, "stop_token": 2, "max_new_tokens": 12, **settings})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_sampling_time_logprobs_are_those_of_a_second_pass_at_the_same_temperature(family, temperature):
    model = make_model(family)
    rollout = make_sampler(model, temperature=temperature).generate(PROMPTS, seeds=range(4))
    again = response_logprobs(model, rollout, temperature=temperature)
    ratio = (again - rollout.logprobs).exp()[rollout.response_mask]
    assert (ratio - 1).abs().max() < 1e-4


def test_a_row_samples_the_same_tokens_whatever_batch_it_is_in():
    model = make_model()
    together = make_sampler(model).generate(PROMPTS, seeds=[3, 1, 4, 1])
    split = make_sampler(model, batch_size=3).generate(PROMPTS, seeds=[3, 1, 4, 1])
    assert torch.equal(together.response_ids, split.response_ids)
    for row, (prompt, seed) in enumerate(zip(PROMPTS, [3, 1, 4, 1], strict=True)):
        alone = make_sampler(model).generate([prompt], seeds=[seed])
        length = int(alone.response_mask.sum())
        assert int(together.response_mask[row].sum()) == length
        assert torch.equal(together.response_ids[row, :length], alone.response_ids[0, :length])


def test_everything_after_the_first_stop_token_is_padding():
    # The likeliest token as the stop token, so that most rows stop early.
    model = make_model()
    first = make_sampler(model, max_new_tokens=1).generate([[5]] * 64, seeds=range(64)).response_ids[:, 0]
    stop = int(first.mode().values)
    rollout = make_sampler(model, stop_token=stop, max_new_tokens=30).generate([[5]] * 64, seeds=range(64))
    assert rollout.stopped.any()
    columns = (rollout.response_ids, rollout.response_mask, rollout.logprobs, rollout.stopped)
    for ids, mask, logprobs, stopped in zip(*(column.tolist() for column in columns), strict=True):
        length = ids.index(stop) + 1 if stop in ids else 30
        assert mask == [True] * length + [False] * (30 - length)
        assert ids[length:] == [0] * (30 - length)
        assert logprobs[length:] == [0.0] * (30 - length)
        assert stopped == (stop in ids)


def test_padding_and_ids_beyond_the_tokenizer_are_never_sampled():
    model = make_model(extra_rows=40)
    forbidden = set(torch.nonzero(model.forbidden).flatten().tolist())
    # Hot enough that every allowed token is about as likely as any other: 40 of 340 would show.
    rollout = make_sampler(model, temperature=50.0, max_new_tokens=40).generate([[5]] * 16, seeds=range(16))
    assert len(forbidden) == 41
    assert not forbidden & set(rollout.response_ids[rollout.response_mask].tolist())


def test_the_draw_inverts_the_cumulative_distribution():
    # By hand: p = (0, 0.5, 0, 0.3, 0.2), cumulative (0, 0.5, 0.5, 0.8, 1).
    logits = torch.tensor([0.5, 0.0, 0.3, 0.2])
    logits = torch.cat([torch.tensor([-1e9]), torch.tensor([math.log(0.5), -1e9, math.log(0.3), math.log(0.2)])])
    draws = torch.tensor([0.0, 0.25, 0.4999, 0.5001, 0.79, 0.81, 0.999999], dtype=torch.float64)
    assert _inverse_cdf(logits.repeat(7, 1), draws).tolist() == [1, 1, 1, 3, 3, 4, 4]


def test_sampled_frequencies_are_the_models_probabilities():
    model = make_model()
    prompt, count, temperature = [5, 6, 7], 4000, 0.5
    with torch.no_grad():
        logits = model.logits(model.hidden(torch.tensor([prompt]), torch.ones(1, 3)))[0, -1]
    expected = (logits / temperature).softmax(-1)
    sampler = make_sampler(model, max_new_tokens=1, temperature=temperature)
    drawn = sampler.generate([prompt] * count, seeds=range(count)).response_ids[:, 0]
    observed = torch.bincount(drawn, minlength=len(expected)) / count
    top = expected.topk(5).indices
    for token in top.tolist():
        p = expected[token].item()
        # Five standard errors of a binomial share.
        assert observed[token].item() == pytest.approx(p, abs=5 * (p * (1 - p) / count) ** 0.5)
