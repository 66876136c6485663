import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kedge.algorithm import (
    token_logprobs,
    token_logprobs_and_entropy,
    truncated_importance_weights,
)
from kedge_base.errors import ConfigError, ShapeError

SEEDS = st.integers(0, 10_000)
TEMPERATURES = st.floats(0.2, 3.0)


def distribution(logits, temperature):
    """Softmax of one position, as a plain list."""
    powers = [math.exp(logit / temperature) for logit in logits]
    return [power / sum(powers) for power in powers]


def token_entropy(logits, temperature=1.0):
    tokens = torch.zeros(logits.shape[:-1], dtype=torch.long)
    return token_logprobs_and_entropy(logits, tokens, temperature=temperature, entropy_gradient=True)[1]


def entropy_by_autograd(logits, temperature):
    """−Σ p·log p, left to autograd; 0·log 0 = 0."""
    logprobs = (logits / temperature).log_softmax(-1)
    return -(logprobs.exp() * logprobs.masked_fill(logprobs.isneginf(), 0.0)).sum(-1)


def draw_logits(seed, *shape):
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(SEEDS, TEMPERATURES)
def test_logprobs_and_entropy_agree_with_a_loop(seed, temperature):
    logits = draw_logits(seed, 2, 3, 5)
    tokens = torch.randint(5, (2, 3), generator=torch.Generator().manual_seed(seed))
    logprobs = token_logprobs(logits, tokens, temperature=temperature)
    entropy = token_entropy(logits, temperature=temperature)
    for row in range(2):
        for step in range(3):
            p = distribution(logits[row, step].tolist(), temperature)
            assert logprobs[row, step].item() == pytest.approx(math.log(p[tokens[row, step]]), abs=1e-10)
            assert entropy[row, step].item() == pytest.approx(-sum(q * math.log(q) for q in p), abs=1e-10)


@given(SEEDS, TEMPERATURES)
def test_probabilities_of_all_tokens_sum_to_one(seed, temperature):
    logits = draw_logits(seed, 6).expand(6, 6)
    assert token_logprobs(logits, torch.arange(6), temperature=temperature).exp().sum().item() == pytest.approx(1.0)


def test_temperature_matters_and_divides():
    logits, token = torch.tensor([[math.log(4.0), 0.0]]), torch.tensor([0])
    assert token_logprobs(logits, token).exp().item() == pytest.approx(0.8)
    assert token_logprobs(logits, token, temperature=0.5).exp().item() == pytest.approx(16 / 17)


def test_entropy_of_known_distributions():
    assert token_entropy(torch.zeros(1, 1000)).item() == pytest.approx(math.log(1000), abs=1e-5)
    fair_and_impossible = torch.tensor([[0.0, 0.0, -math.inf, -1e9]], requires_grad=True)
    entropy = token_entropy(fair_and_impossible)
    assert entropy.item() == pytest.approx(math.log(2))
    entropy.sum().backward()
    assert fair_and_impossible.grad[0].tolist() == pytest.approx([0.0] * 4, abs=1e-7)


def test_entropy_stays_finite_with_gradients_where_a_forbidden_token_stands_beside_unequal_ones():
    logits = torch.tensor([[1.0, 0.0, -math.inf]], requires_grad=True)
    token_entropy(logits).sum().backward()
    # dH/dz_i = −p_i·(log p_i + H), by hand for p = (σ(1), σ(−1)).
    p = 1 / (1 + math.exp(-1))
    h = -p * math.log(p) - (1 - p) * math.log(1 - p)
    expected = [-p * (math.log(p) + h), -(1 - p) * (math.log(1 - p) + h), 0.0]
    assert logits.grad[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_half_precision_logits_are_computed_in_float32():
    logits = draw_logits(0, 4, 50).bfloat16()
    tokens = torch.arange(4)
    assert token_logprobs(logits, tokens).dtype == torch.float32
    assert token_entropy(logits).dtype == torch.float32
    torch.testing.assert_close(token_logprobs(logits, tokens), token_logprobs(logits.float(), tokens))
    assert token_logprobs(logits.double(), tokens).dtype == torch.float64


@given(SEEDS, TEMPERATURES, st.booleans())
def test_both_at_once_are_what_each_is_alone_in_value_and_gradient(seed, temperature, forbid):
    logits, tokens = draw_logits(seed, 2, 3, 7), torch.randint(6, (2, 3), generator=torch.Generator().manual_seed(seed))
    if forbid:
        logits[..., 6] = -math.inf
    weights = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    plain, fused = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    by_autograd = torch.log_softmax(plain / temperature, dim=-1).gather(-1, tokens[..., None])[..., 0]
    apart = by_autograd, entropy_by_autograd(plain, temperature)
    together = token_logprobs_and_entropy(fused, tokens, temperature=temperature, entropy_gradient=True)
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)
    for logprobs, entropy in (apart, together):
        (weights[0] * logprobs + weights[1] * entropy).sum().backward()
    torch.testing.assert_close(fused.grad, plain.grad, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_gradients_written_down_are_those_of_finite_differences(temperature):
    logits, tokens = draw_logits(0, 4, 6).requires_grad_(), torch.tensor([0, 5, 2, 2])

    def both(logits):
        return token_logprobs_and_entropy(logits, tokens, temperature=temperature, entropy_gradient=True)

    assert torch.autograd.gradcheck(both, logits)
    assert torch.autograd.gradcheck(lambda logits: both(logits)[0], logits)
    assert torch.autograd.gradcheck(lambda logits: both(logits)[1], logits)
    assert torch.autograd.gradcheck(lambda logits: token_logprobs(logits, tokens, temperature=temperature), logits)


def test_without_its_gradient_the_entropy_is_a_figure_alone():
    logits, tokens = draw_logits(0, 3, 5).requires_grad_(), torch.tensor([0, 1, 2])
    logprobs, entropy = token_logprobs_and_entropy(logits, tokens)
    assert logprobs.requires_grad
    assert not entropy.requires_grad
    torch.testing.assert_close(entropy, entropy_by_autograd(logits.detach(), 1.0))


def test_both_at_once_keep_float32_where_the_logits_are_halved():
    logits, tokens = draw_logits(0, 4, 50).bfloat16().requires_grad_(), torch.arange(4)
    logprobs, entropy = token_logprobs_and_entropy(logits, tokens, entropy_gradient=True)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(entropy, entropy_by_autograd(logits.float(), 1.0))
    (logprobs + entropy).sum().backward()
    assert logits.grad.dtype == torch.bfloat16


@given(SEEDS)
def test_importance_weights_are_capped_ratios(ragged, seed):
    batch = ragged(seed)
    weights = truncated_importance_weights(batch.logprobs, batch.old_logprobs, batch.mask, cap=1.3)
    expected = np.minimum(np.exp(batch.logprobs.numpy()) / np.exp(batch.old_logprobs.numpy()), 1.3)
    np.testing.assert_allclose(weights[batch.mask].numpy(), expected[batch.mask.numpy()])
    assert (weights[~batch.mask] == 0).all()


@pytest.mark.usefixtures("unchecked")
class TestErrors:
    @pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
    def test_temperature_is_positive(self, temperature):
        with pytest.raises(ConfigError, match="temperature must be"):
            token_logprobs(torch.zeros(1, 2), torch.tensor([0]), temperature=temperature)
        with pytest.raises(ValueError, match="temperature must be"):
            token_logprobs_and_entropy(torch.zeros(1, 2), torch.tensor([0]), temperature=temperature)

    def test_each_position_has_one_token(self):
        with pytest.raises(ShapeError, match=r"tokens \(4,\)"):
            token_logprobs(torch.zeros(3, 2), torch.zeros(4, dtype=torch.long))
        with pytest.raises(ShapeError, match=r"tokens \(4,\)"):
            token_logprobs_and_entropy(torch.zeros(3, 2), torch.zeros(4, dtype=torch.long))
