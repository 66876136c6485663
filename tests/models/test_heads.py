"""The histogram of a critic: its start, its place in both kinds of critic, and its file."""

import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from kedge.algorithm.critic import Bins
from kedge.models import (
    ActorCritic,
    HistogramHead,
    LanguageModel,
    ModelCard,
    ScalarModel,
    initialize_head,
    load_value_head,
    save_policy,
)
from kedge.models.heads import read_values
from kedge.rollout import Sampler
from kedge_base.errors import ModelError
from tests.models.test_actor_critic import make_rollout
from tests.tiny import tiny_causal_lm, tiny_reward_model, tiny_tokenizer

BINS = Bins(-10.0, 10.0, 101)
HIDDEN = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))


def slow_value(head: HistogramHead, hidden: torch.Tensor) -> float:
    """The mean of the centers, weighted by the softmax of the logits."""
    weights = (head.weight.double() @ hidden.double() + head.bias.double()).exp().tolist()
    width = (head.bins.high - head.bins.low) / head.bins.num_bins
    centers = [head.bins.low + (number + 0.5) * width for number in range(head.bins.num_bins)]
    return sum(w * c for w, c in zip(weights, centers, strict=True)) / sum(weights)


@pytest.mark.parametrize(
    ("bins", "start"),
    [
        (BINS, 0.0),
        (Bins(-0.2, 1.2, 51), 0.0),
        (Bins(-9.0, 1.0, 10), 0.0),
        (Bins(0.0, 10.0, 100), 0.5),  # 5 % inside: a start at an end would leave the far bins without mass
        (Bins(50.0, 100.0, 20), 52.5),
    ],
)
def test_a_new_histogram_starts_at_zero_or_as_near_as_its_support_allows(bins, start):
    head = HistogramHead(16, bins)
    initialize_head(head, "zero")
    assert not head.weight.any()
    assert slow_value(head, HIDDEN[0]) == pytest.approx(start, abs=1e-5 * (bins.high - bins.low))
    values, logits = read_values(head, HIDDEN)
    assert logits is not None
    assert torch.equal(logits[0], head.bias)
    torch.testing.assert_close(values, torch.full((50,), start), atol=1e-5 * (bins.high - bins.low), rtol=0)


def test_a_histogram_made_from_a_scalar_head_has_its_values():
    scalar = nn.Linear(16, 1)
    nn.init.normal_(scalar.weight, std=0.5, generator=torch.Generator().manual_seed(1))
    wanted = scalar(HIDDEN).squeeze(-1) - 0.3
    assert wanted.std() > 1
    values = read_values(HistogramHead(16, BINS).start_from(scalar, shift=0.3), HIDDEN).values
    assert values[7].item() == pytest.approx(
        slow_value(HistogramHead(16, BINS).start_from(scalar, shift=0.3), HIDDEN[7]), abs=1e-4
    )
    inside = wanted.abs() < 5.0
    assert inside.sum() > 40
    # The Gaussian with a standard deviation of 20/12 is cut off at ±10. At a value of 5 these are 3 standard
    # deviations, and the cut moves the mean by 20/12 · φ(3) = 0.0074.
    torch.testing.assert_close(values[inside], wanted[inside], atol=0.0075, rtol=0)
    assert values.abs().max() < 10


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_both_kinds_of_critic_predict_a_histogram_of_which_the_values_are_the_means(critic):
    tokenizer = tiny_tokenizer()
    policy = LanguageModel(tiny_causal_lm(), tokenizer, value_head=critic == "shared", bins=BINS)
    reward = ScalarModel(tiny_reward_model("llama"), tokenizer)
    reward.normalize(mean=0.3)
    rollout = make_rollout()
    scores = ActorCritic(LanguageModel(tiny_causal_lm(), tokenizer), reward).values(rollout)
    if policy.value_head is not None:
        nn.init.normal_(policy.value_head.weight, generator=torch.Generator().manual_seed(0))
    models = ActorCritic(policy, reward.predict_histogram(BINS) if critic == "separate" else None)
    with torch.no_grad():
        outputs = models(rollout, temperature=1.0)
    mask = rollout.action_mask
    assert outputs.value_logits.shape == (*mask.shape, 101)
    assert not outputs.value_logits[~mask].any()
    probabilities = outputs.value_logits.double().softmax(-1)
    centers = torch.linspace(-10 + 10 / 101, 10 - 10 / 101, 101, dtype=torch.float64)
    means = torch.where(mask, (probabilities * centers).sum(-1), 0.0)
    torch.testing.assert_close(outputs.values.double(), means, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(models.values(rollout), outputs.values)
    if critic == "separate":
        torch.testing.assert_close(outputs.values, scores.detach(), atol=1e-4, rtol=1e-4)
    assert {parameter.shape[0] for parameter in models.critic_parameters()} >= {101}


def test_the_sampler_notes_the_histograms_values():
    model = LanguageModel(tiny_causal_lm(), tiny_tokenizer(), value_head=True, bins=BINS)
    assert model.value_head is not None
    nn.init.normal_(model.value_head.weight, generator=torch.Generator().manual_seed(0))
    rollout = Sampler(model, pad_id=0, stop_tokens=[9], max_new_tokens=6).generate([[5, 6], [20]], seeds=[0, 1])
    values = ActorCritic(model).values(rollout)
    assert values.abs().max() > 0.1
    torch.testing.assert_close(rollout.values, values.detach(), atol=1e-4, rtol=1e-4)


def test_a_histogram_is_saved_with_its_support(tmp_path):
    tokenizer = tiny_tokenizer()
    model = LanguageModel(tiny_causal_lm(), tokenizer, value_head=True, bins=BINS)
    assert model.value_head is not None
    nn.init.normal_(model.value_head.weight)
    folder = save_policy(model, tokenizer, tmp_path / "policy", card=ModelCard("ppo", "tiny"))
    assert not load_value_head(HistogramHead(16, BINS), tmp_path)
    head = HistogramHead(16, BINS)
    assert load_value_head(head, folder)
    assert torch.equal(head.weight, model.value_head.weight)
    refused = "101 bins from -10 to 10; use it with ppo.value_loss={hl_gauss: [-10, 10, 101]}"
    for other in (nn.Linear(16, 1), HistogramHead(16, Bins(-5.0, 5.0, 101)), HistogramHead(16, Bins(-10.0, 10.0, 51))):
        with pytest.raises(ModelError, match=re.escape(refused)):
            load_value_head(other, folder)
    with pytest.raises(ModelError, match="not a value head of the model in this folder"):
        load_value_head(HistogramHead(17, BINS), folder)


def test_a_saved_scalar_head_becomes_a_histogram_with_its_values(tmp_path):
    tokenizer = tiny_tokenizer()
    model = LanguageModel(tiny_causal_lm(), tokenizer, value_head=True)
    assert model.value_head is not None
    nn.init.normal_(model.value_head.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    folder = save_policy(model, tokenizer, tmp_path / "policy", card=ModelCard("ppo", "tiny"))
    head = HistogramHead(16, BINS)
    assert load_value_head(head, folder)
    torch.testing.assert_close(
        read_values(head, HIDDEN).values, read_values(model.value_head, HIDDEN).values, atol=0.005, rtol=0
    )
    with pytest.raises(ModelError, match="not a value head"):
        load_value_head(HistogramHead(17, BINS), folder)


@pytest.mark.parametrize(
    "support",
    [torch.tensor([1.0]), torch.tensor(1.0), torch.tensor([1.0, 0.0]), torch.tensor([0.0, torch.nan])],
    ids=["one number", "no list", "empty", "nan"],
)
def test_an_invalid_support_is_one_line(tmp_path, support):
    save_file(
        {"weight": torch.zeros(9, 16), "bias": torch.zeros(9), "support": support}, tmp_path / "value_head.safetensors"
    )
    for head in (nn.Linear(16, 1), HistogramHead(16, BINS)):
        with pytest.raises(ModelError, match="not a value head of the model in this folder"):
            load_value_head(head, tmp_path)
    save_file({"support": torch.tensor([0.0, 1.0])}, tmp_path / "value_head.safetensors")
    with pytest.raises(ModelError, match="not a value head"):
        load_value_head(HistogramHead(16, BINS), tmp_path)
