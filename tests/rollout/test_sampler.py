"""The built-in sampler: its distribution, where it stops, and the independence of rows."""

import math
from itertools import accumulate

import pytest
import torch

from kedge.models import ActorCritic, LanguageModel, TokenRows, language, response_logprobs
from kedge.models.packing.trunk import Trunk
from kedge.rollout import Sampler
from kedge.rollout import sampler as sampler_module
from kedge.rollout.sampler import SPAN, _inverse_cdf
from tests.models.families import ARCHITECTURES, language_model
from tests.tiny import FAMILIES, tiny_causal_lm, tiny_tokenizer

PROMPTS = [[5, 6, 7, 8, 9], [20, 21], [30], [40, 41, 42]]
STOP = 50


def make_model(family="llama", extra_rows=0):
    tokenizer = tiny_tokenizer()
    return LanguageModel(tiny_causal_lm(family, len(tokenizer) + extra_rows), tokenizer)


def make_sampler(model, **settings):
    return Sampler(model, **{"pad_id": 0, "stop_tokens": [2], "max_new_tokens": 12, **settings})


def speaker(name="llama", **settings):
    """A model of few words, one of which is the stop token, so that responses stop early and at different steps."""
    model = language_model(name, **settings)
    model.forbidden[:] = True
    model.forbidden[STOP : STOP + 12] = False
    model.forbidden_ids = model.forbidden.nonzero().squeeze(1)
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_sampling_time_logprobs_are_those_of_a_second_pass_at_the_same_temperature(family, temperature):
    model = make_model(family)
    rollout = make_sampler(model, temperature=temperature).generate(PROMPTS, seeds=range(4))
    again = response_logprobs(model, rollout, temperature=temperature)
    ratio = (again - rollout.logprobs).exp()[rollout.action_mask]
    assert (ratio - 1).abs().max() < 1e-5


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_temperature_0_takes_the_most_likely_tokens_whatever_the_seeds(family):
    """The slow loop: the whole text is read again for each token, one row at a time, without padding."""
    model = language_model(family)
    sampler = make_sampler(model, stop_tokens=[], temperature=0.0)
    rollout = sampler.generate(PROMPTS, seeds=range(4))
    again = sampler.generate(PROMPTS, seeds=[9, 9, 8, 8])
    assert torch.equal(rollout.response_ids, again.response_ids)
    for row, prompt in enumerate(PROMPTS):
        text = list(prompt)
        for place in range(12):
            with torch.no_grad():
                logits = model.causal(torch.tensor([text])).logits[0, -1].double()
            logits[0] = -torch.inf  # padding is never sampled
            text.append(int(logits.argmax()))
            # Those at temperature 1: at 0 all of them would be 0.
            assert rollout.logprobs[row, place].item() == pytest.approx(logits.log_softmax(-1).max().item(), abs=1e-4)
        assert rollout.response_ids[row].tolist() == text[len(prompt) :]


def test_of_equally_likely_tokens_the_first_is_taken():
    model = make_model()
    with torch.no_grad():
        model.causal.get_output_embeddings().weight.zero_()  # so all logits are 0
    rollout = make_sampler(model, temperature=0.0, max_new_tokens=3).generate(PROMPTS, seeds=range(4))
    assert rollout.response_ids.tolist() == [[1, 1, 1]] * 4  # 0 is the padding


def test_a_row_samples_the_same_tokens_whatever_batch_it_is_in():
    model = make_model()
    together = make_sampler(model).generate(PROMPTS, seeds=[3, 1, 4, 1])
    split = make_sampler(model, batch_size=3).generate(PROMPTS, seeds=[3, 1, 4, 1])
    assert torch.equal(together.response_ids, split.response_ids)
    for row, (prompt, seed) in enumerate(zip(PROMPTS, [3, 1, 4, 1], strict=True)):
        alone = make_sampler(model).generate([prompt], seeds=[seed])
        length = int(alone.action_mask.sum())
        assert int(together.action_mask[row].sum()) == length
        assert torch.equal(together.response_ids[row, :length], alone.response_ids[0, :length])


def test_everything_after_the_first_stop_token_is_padding():
    rollout = make_sampler(speaker(), stop_tokens=[STOP], max_new_tokens=30).generate([[5]] * 64, seeds=range(64))
    assert rollout.stopped.any()
    columns = (rollout.response_ids, rollout.action_mask, rollout.logprobs, rollout.stopped)
    for ids, mask, logprobs, stopped in zip(*(column.tolist() for column in columns), strict=True):
        length = ids.index(STOP) + 1 if STOP in ids else 30
        assert mask == [True] * length + [False] * (30 - length)
        assert ids[length:] == [0] * (30 - length)
        assert logprobs[length:] == [0.0] * (30 - length)
        assert stopped == (STOP in ids)


def test_with_several_stop_tokens_a_response_ends_at_the_first_of_them():
    stops, settings = [STOP, STOP + 3, STOP + 7], {"max_new_tokens": 30, "temperature": 2.0}
    prompts, seeds = [[5]] * 64, range(64)
    endless = make_sampler(speaker(), stop_tokens=[], **settings).generate(prompts, seeds=seeds)
    assert not endless.stopped.any()
    assert endless.action_mask.all()
    rollout = make_sampler(speaker(), stop_tokens=stops, **settings).generate(prompts, seeds=seeds)
    ends = []
    for row, whole in enumerate(endless.response_ids.tolist()):
        length = next((step + 1 for step, token in enumerate(whole) if token in stops), 30)
        ends.append(whole[length - 1])
        assert rollout.response_ids[row].tolist() == whole[:length] + [0] * (30 - length)
        assert rollout.action_mask[row].tolist() == [True] * length + [False] * (30 - length)
        assert rollout.stopped[row] == (ends[-1] in stops)
    assert set(stops) <= set(ends)


def test_padding_and_ids_beyond_the_tokenizer_are_never_sampled():
    model = make_model(extra_rows=40)
    forbidden = set(torch.nonzero(model.forbidden).flatten().tolist())
    # Hot enough that every allowed token is about as likely as any other: 40 of 340 would show.
    rollout = make_sampler(model, temperature=50.0, max_new_tokens=40).generate([[5]] * 16, seeds=range(16))
    assert len(forbidden) == 41
    assert not forbidden & set(rollout.response_ids[rollout.action_mask].tolist())


def test_the_draw_inverts_the_cumulative_distribution():
    # By hand: p = (0, 0.5, 0, 0.3, 0.2), cumulative (0, 0.5, 0.5, 0.8, 1).
    logits = torch.tensor([0.5, 0.0, 0.3, 0.2])
    logits = torch.cat([torch.tensor([-1e9]), torch.tensor([math.log(0.5), -1e9, math.log(0.3), math.log(0.2)])])
    draws = torch.tensor([0.0, 0.25, 0.4999, 0.5001, 0.79, 0.81, 0.999999], dtype=torch.float64)
    assert _inverse_cdf(logits.repeat(7, 1), draws).tolist() == [1, 1, 1, 3, 3, 4, 4]
    # In single precision, as on Apple GPUs, the largest draws are rounded to 1.
    largest = torch.tensor([1 - 2**-40, 1 - 2**-53], dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        for end in (-torch.inf, -1e9):
            cut = torch.tensor([0.1, 0.3, end]).repeat(2, 1)
            assert _inverse_cdf(cut, largest.to(dtype)).tolist() == [1, 1]


@pytest.mark.parametrize("vocab", [1, 7, SPAN, SPAN + 1, 5 * SPAN])
def test_a_draw_by_spans_is_a_draw_from_the_cumulative_sum_of_all(vocab):
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn(200, vocab, generator=generator).mul_(4).log_softmax(-1)
    draws = torch.rand(200, generator=generator, dtype=torch.float64)
    expected = []
    for row, draw in zip(logprobs.double().exp().tolist(), draws.tolist(), strict=True):
        ends = list(accumulate(row))
        expected.append(next(token for token, end in enumerate(ends) if end > draw * ends[-1]))
    assert _inverse_cdf(logprobs, draws).tolist() == expected


def test_sampled_frequencies_are_the_models_probabilities():
    model = make_model()
    prompt, count, temperature = [5, 6, 7], 4000, 0.5
    with torch.no_grad():
        logits = model.logits(model.hidden(TokenRows.of([prompt])))[-1]
    expected = (logits / temperature).softmax(-1)
    sampler = make_sampler(model, max_new_tokens=1, temperature=temperature)
    drawn = sampler.generate([prompt] * count, seeds=range(count)).response_ids[:, 0]
    observed = torch.bincount(drawn, minlength=len(expected)) / count
    top = expected.topk(5).indices
    for token in top.tolist():
        p = expected[token].item()
        # Five standard errors of a binomial share.
        assert observed[token].item() == pytest.approx(p, abs=5 * (p * (1 - p) / count) ** 0.5)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_noted_while_sampling_is_what_the_trainer_computes(name, padded, monkeypatch):
    if padded:
        monkeypatch.setattr(Trunk, "packs", lambda self, longest: False)
    model = speaker(name, value_head=True)
    rollout = make_sampler(model, stop_tokens=[STOP], temperature=2.0).generate(PROMPTS * 3, seeds=range(12))
    assert len(set(rollout.response_lengths.tolist())) > 3
    with torch.no_grad():
        outputs = ActorCritic(model)(rollout, temperature=2.0)
    torch.testing.assert_close(rollout.logprobs, outputs.logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rollout.values, outputs.values, atol=1e-5, rtol=1e-5)
    assert outputs.values.abs().max() > 0.1


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "mistral", "mamba"])
def test_batch_order_company_and_compaction_change_no_token(name, monkeypatch):
    model = speaker(name)
    prompts, seeds, settings = PROMPTS * 3, list(range(12)), {"stop_tokens": [STOP], "max_new_tokens": 20}
    whole = make_sampler(model, **settings).generate(prompts, seeds=seeds)
    assert len(set(whole.response_lengths.tolist())) > 3
    others = {
        "small batches": make_sampler(model, **settings, batch_size=5).generate(prompts, seeds=seeds),
        "one by one": make_sampler(model, **settings, batch_size=1).generate(prompts, seeds=seeds),
        "in reverse": reverse(make_sampler(model, **settings).generate(prompts[::-1], seeds=seeds[::-1])),
    }
    for name, share in (("rows dropped at once", 0.0), ("no row dropped", 2.0)):
        monkeypatch.setattr(sampler_module, "COMPACTION_SHARE", share)
        others[name] = make_sampler(model, **settings).generate(prompts, seeds=seeds)
    monkeypatch.setattr(Trunk, "packs", lambda self, longest: False)
    others["padded"] = make_sampler(model, **settings).generate(prompts, seeds=seeds)
    for name, other in others.items():
        assert torch.equal(other.response_ids, whole.response_ids), name
        assert torch.equal(other.action_mask, whole.action_mask), name
        assert torch.equal(other.stopped, whole.stopped), name
        torch.testing.assert_close(other.logprobs, whole.logprobs, atol=1e-5, rtol=1e-5)


def reverse(rollout):
    return rollout.select(torch.arange(rollout.num_responses - 1, -1, -1))


def test_finished_rows_cost_nothing():
    model, rows_read = speaker(), []
    model.trunk.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: rows_read.append(len(output)))
    rollout = make_sampler(model, stop_tokens=[99, STOP], max_new_tokens=30).generate([[5]] * 64, seeds=range(64))
    lengths = rollout.response_lengths.tolist()
    running = [sum(length > step for length in lengths) for step in range(1, max(lengths))]
    # The prompt, which all share, is read once; then never more than a third beyond those that still run.
    assert rows_read[0] == 1
    assert len(rows_read) == 1 + len(running)
    assert all(need <= read < need / 0.75 + 1 for need, read in zip(running, rows_read[1:], strict=True))
    assert rows_read[-1] < 16


def test_values_are_noted_only_of_a_shared_trunk_and_only_in_fp32_are_the_figures_exact():
    assert make_sampler(make_model()).generate(PROMPTS, seeds=range(4)).values is None
    rollout = make_sampler(language_model("llama", value_head=True)).generate(PROMPTS, seeds=range(4))
    assert rollout.values.shape == rollout.logprobs.shape
    assert not rollout.values[~rollout.action_mask].any()
    assert make_sampler(make_model()).is_exact
    assert not make_sampler(make_model(), precision="bf16").is_exact


def test_activation_checkpointing_changes_no_token():
    model = language_model("llama")
    plain = make_sampler(model).generate(PROMPTS, seeds=range(4))
    model.trunk.checkpoint_activations()
    assert torch.equal(make_sampler(model).generate(PROMPTS, seeds=range(4)).response_ids, plain.response_ids)


def test_sampling_in_chunks_of_the_vocabulary_draws_the_same_tokens(monkeypatch):
    model = make_model()
    whole = make_sampler(model).generate(PROMPTS, seeds=range(4))
    monkeypatch.setattr(language, "MAX_LOGITS", 300)
    chunked = make_sampler(model).generate(PROMPTS, seeds=range(4))
    assert torch.equal(chunked.response_ids, whole.response_ids)
    torch.testing.assert_close(chunked.logprobs, whole.logprobs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("padded", [False, True])
def test_in_bf16_what_is_noted_is_near_what_the_trainer_computes(padded, monkeypatch):
    if padded:
        monkeypatch.setattr(Trunk, "packs", lambda self, longest: False)
    model = speaker(value_head=True)
    rollout = make_sampler(model, stop_tokens=[STOP], precision="bf16").generate(PROMPTS * 3, seeds=range(12))
    with torch.no_grad():
        rough, exact = (ActorCritic(model)(rollout, temperature=1.0, precision=each) for each in ("bf16", "fp32"))
    # Products keep 8 bits: a logprob of a few nats is right to about a hundredth.
    for outputs in (rough, exact):
        assert (rollout.logprobs - outputs.logprobs).abs().mean() < 0.02
        assert (rollout.values - outputs.values).abs().mean() < 0.02 * exact.values.abs().max()
