import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge import algorithm
from kedge.algorithm import cispo_policy_loss, double_sided_policy_loss, kl_penalty_policy_loss, unclipped_policy_loss
from kedge_base.errors import ConfigError, ShapeError

SEEDS = st.integers(0, 10_000)
clipped_policy_loss = partial(algorithm.clipped_policy_loss, clip_range=0.2)
LOSSES = {
    "clipped": clipped_policy_loss,
    "dual": partial(clipped_policy_loss, dual_clip=1.2),
    "unclipped": unclipped_policy_loss,
    "penalty": lambda *tensors, **settings: kl_penalty_policy_loss(*tensors, kl_coef=0.7, **settings),
    "double-sided": partial(double_sided_policy_loss, clip_range=0.2),
}


def tensors(batch):
    return batch.logprobs, batch.old_logprobs, batch.advantages, batch.mask


def token_loss(ratio, advantage, *, low, high, dual=None):
    """PPO eq. 7 for one token, and the bound of the dual clip, case by case instead of by min and clip."""
    if advantage >= 0:
        return -advantage * min(ratio, 1 + high)
    return -advantage * min(max(ratio, 1 - low), math.inf if dual is None else dual)


def mean_loss(batch, **settings):
    counted = [
        token_loss(math.exp(batch.logprobs[i, t] - batch.old_logprobs[i, t]), batch.advantages[i, t].item(), **settings)
        for i, t in batch.mask.nonzero().tolist()
    ]
    return sum(counted) / len(counted)


@given(SEEDS, st.floats(0.01, 0.6), st.floats(0.01, 0.9), st.one_of(st.none(), st.floats(1.01, 3.0)))
def test_the_clipped_loss_agrees_with_a_loop(ragged, seed, low, high, dual):
    batch = ragged(seed)
    found = clipped_policy_loss(*tensors(batch), clip_range=low, clip_range_high=high, dual_clip=dual)
    assert found.loss.item() == pytest.approx(mean_loss(batch, low=low, high=high, dual=dual), abs=1e-10)


@given(SEEDS)
def test_the_siblings_agree_with_a_loop(ragged, seed):
    batch = ragged(seed)
    plain, penalty = [], []
    for i, t in batch.mask.nonzero().tolist():
        ratio = math.exp(batch.logprobs[i, t] - batch.old_logprobs[i, t])
        plain.append(-ratio * batch.advantages[i, t].item())
        penalty.append(ratio - 1 - math.log(ratio))
    count = len(plain)
    assert unclipped_policy_loss(*tensors(batch)).loss.item() == pytest.approx(sum(plain) / count, abs=1e-10)
    found = kl_penalty_policy_loss(*tensors(batch), kl_coef=3.0)
    assert found.loss.item() == pytest.approx((sum(plain) + 3.0 * sum(penalty)) / count, abs=1e-10)
    assert found.approx_kl.item() == pytest.approx(sum(penalty) / count, abs=1e-10)


# S1's and S3's four cases, and the two in range: (advantage, ratio, is there a gradient?).
QUADRANTS = [(1, 1.5, False), (1, 0.5, True), (-1, 1.5, True), (-1, 0.5, False), (1, 1.1, True), (-1, 0.9, True)]


@pytest.mark.parametrize(("advantage", "ratio", "moves"), QUADRANTS)
def test_the_quadrants_of_the_clip(advantage, ratio, moves):
    logprobs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    found = clipped_policy_loss(
        logprobs, torch.zeros(1, 1), torch.tensor([[float(advantage)]]), torch.ones(1, 1, dtype=torch.bool)
    )
    (gradient,) = torch.autograd.grad(found.loss, logprobs)
    # Where it moves, d(−ρA)/d log π = −ρA.
    assert gradient.item() == pytest.approx(-ratio * advantage if moves else 0.0, rel=1e-5)
    assert found.clip_fraction.item() == (0.0 if moves else 1.0)


def test_a_range_with_a_higher_ceiling_lets_good_tokens_rise_further():
    logprobs = torch.tensor([[math.log(1.25)]], requires_grad=True)
    one, mask = torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)
    assert clipped_policy_loss(logprobs, 0 * one, one, mask).clip_fraction == 1
    assert clipped_policy_loss(logprobs, 0 * one, one, mask, clip_range_high=0.28).clip_fraction == 0


def test_the_dual_clip_bounds_bad_tokens_that_became_likely():
    logprobs = torch.tensor([[math.log(10.0), math.log(2.0)]], requires_grad=True)
    advantages, mask = torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool)
    found = clipped_policy_loss(logprobs, torch.zeros(1, 2), advantages, mask, dual_clip=3.0)
    assert found.loss.item() == pytest.approx((3.0 + 2.0) / 2)
    assert found.dual_clip_fraction.item() == 0.5
    (gradient,) = torch.autograd.grad(found.loss, logprobs)
    assert gradient[0].tolist() == pytest.approx([0.0, 1.0])


@pytest.mark.parametrize("name", LOSSES)
@given(seed=SEEDS)
def test_at_ratio_one_the_loss_is_minus_the_mean_advantage_and_its_gradient_is_reinforces(ragged, name, seed):
    batch = ragged(seed)
    logprobs = batch.old_logprobs.clone().requires_grad_()
    found = LOSSES[name](logprobs, batch.old_logprobs, batch.advantages, batch.mask)
    counted = batch.advantages[batch.mask]
    assert found.loss.item() == pytest.approx(-counted.mean().item(), abs=1e-12)
    assert found.clip_fraction == found.approx_kl == 0
    assert found.dual_clip_fraction == (0 if name == "dual" else None)
    assert found.ratio_mean == found.ratio_min == found.ratio_max == 1
    # REINFORCE descends on −mean(A·log π), whose gradient at a token is −A/N.
    (gradient,) = torch.autograd.grad(found.loss, logprobs)
    torch.testing.assert_close(gradient, -batch.advantages / counted.numel())


@given(SEEDS)
def test_the_metrics_agree_with_a_loop(ragged, seed):
    batch = ragged(seed)
    found = clipped_policy_loss(*tensors(batch), clip_range=0.1)
    ratios, held = [], 0
    for i, t in batch.mask.nonzero().tolist():
        ratio, advantage = math.exp(batch.logprobs[i, t] - batch.old_logprobs[i, t]), batch.advantages[i, t].item()
        ratios.append(ratio)
        held += (advantage > 0 and ratio > 1.1) or (advantage < 0 and ratio < 0.9)
    count = len(ratios)
    assert found.clip_fraction.item() == pytest.approx(held / count)
    assert found.approx_kl.item() == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / count, abs=1e-12)
    assert found.ratio_mean.item() == pytest.approx(sum(ratios) / count)
    assert found.ratio_max.item() == pytest.approx(max(ratios))
    assert found.ratio_min.item() == pytest.approx(min(ratios))
    assert found.num_tokens.item() == count


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_the_gradient_does_not_depend_on_the_split_into_micro_batches(ragged, name, aggregation):
    batch = ragged(11, batch=8)
    settings = {"aggregation": aggregation, "constant_length": 7 if aggregation == "constant" else None}
    whole = batch.logprobs.clone().requires_grad_()
    LOSSES[name](whole, *tensors(batch)[1:], **settings).loss.backward()
    normalizer = batch.mask.sum() if aggregation == "token" else 8
    for sizes in ([1] * 8, [4, 4], [2, 5, 1]):
        split = batch.logprobs.clone().requires_grad_()
        parts = zip(*(x.split(sizes) for x in (split, *tensors(batch)[1:])), strict=True)
        found = [LOSSES[name](*part, normalizer=normalizer, **settings) for part in parts]
        torch.stack([part.loss for part in found]).sum().backward()
        torch.testing.assert_close(split.grad, whole.grad)
        weighted = sum(part.approx_kl * part.num_tokens for part in found) / batch.mask.sum()
        torch.testing.assert_close(weighted, LOSSES[name](*tensors(batch)).approx_kl)


def test_a_mean_of_micro_batch_means_would_be_another_gradient(ragged):
    batch = ragged(11, batch=8)
    means = [clipped_policy_loss(*(x[rows] for x in tensors(batch))).loss for rows in (slice(0, 4), slice(4, 8))]
    assert abs(sum(means) / 2 - clipped_policy_loss(*tensors(batch)).loss) > 1e-3


def test_importance_weights_scale_each_tokens_gradient(ragged):
    batch = ragged(5)
    logprobs = batch.old_logprobs.clone().requires_grad_()
    weights = torch.where(batch.mask, 0.5, math.nan)
    found = clipped_policy_loss(
        logprobs, batch.old_logprobs, batch.advantages, batch.mask, importance_weights=weights.double()
    )
    (gradient,) = torch.autograd.grad(found.loss, logprobs)
    torch.testing.assert_close(gradient, -0.5 * batch.advantages / batch.mask.sum())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("jump", [100.0, -100.0, 1e4])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_absurd_ratios_stay_finite(name, jump, advantage):
    logprobs = torch.tensor([[jump]], requires_grad=True)
    found = LOSSES[name](logprobs, torch.zeros(1, 1), torch.tensor([[advantage]]), torch.ones(1, 1, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(found.loss, logprobs)
    assert found.loss.isfinite()
    assert gradient.isfinite().all()


def test_the_kl_penalty_pulls_back_towards_the_old_policy():
    # Exactly: the gradient of the penalty's expectation under π_old is that of KL(π_old‖π), −π_old/π per probability.
    logits = torch.tensor([0.5, -0.5, 0.2], dtype=torch.float64, requires_grad=True)
    old = torch.log_softmax(torch.tensor([0.0, 0.3, -0.4], dtype=torch.float64), -1)
    weights = 3 * old.exp()  # the mean over the three tokens then is the expectation
    found = kl_penalty_policy_loss(
        torch.log_softmax(logits, -1).unsqueeze(0),
        old.unsqueeze(0),
        torch.zeros(1, 3, dtype=torch.float64),
        torch.ones(1, 3, dtype=torch.bool),
        kl_coef=1.0,
        importance_weights=weights.unsqueeze(0),
    )
    exact = (old.exp() * (old - torch.log_softmax(logits, -1))).sum()
    torch.testing.assert_close(found.loss, exact)
    torch.testing.assert_close(torch.autograd.grad(found.loss, logits), torch.autograd.grad(exact, logits))


@pytest.mark.usefixtures("unchecked")
class TestErrors:
    ONE = torch.ones(2, 3)
    MASK = ONE > 0

    @pytest.mark.parametrize("name", LOSSES)
    def test_shapes_must_agree_and_something_must_count(self, name):
        with pytest.raises(ShapeError, match=r"advantages \(2,\)"):
            LOSSES[name](self.ONE, self.ONE, self.ONE[:, 0], self.MASK)
        with pytest.raises(ShapeError, match="counts nothing"):
            LOSSES[name](self.ONE, self.ONE, self.ONE, ~self.MASK)
        with pytest.raises(ShapeError, match=r"importance_weights \(3,\)"):
            LOSSES[name](self.ONE, self.ONE, self.ONE, self.MASK, importance_weights=self.ONE[0])

    @pytest.mark.parametrize(
        ("setting", "message"),
        [
            ({"clip_range": 0.0}, "clip_range must be above 0 and below 1"),
            ({"clip_range": 1.0}, "clip_range must be above 0 and below 1"),
            ({"clip_range_high": -0.1}, "clip_range_high above 0; got"),
            ({"dual_clip": 1.0}, "dual_clip must be above 1"),
            ({"aggregation": "mean"}, "token, sequence, constant"),
        ],
    )
    def test_settings_must_make_sense(self, setting, message):
        with pytest.raises(ConfigError, match=message):
            clipped_policy_loss(self.ONE, self.ONE, self.ONE, self.MASK, **setting)


# As above, for masking: in range or not, the sign of the advantage does not matter.
@pytest.mark.parametrize(
    ("advantage", "ratio", "moves"),
    [(1, 1.5, False), (1, 0.5, False), (-1, 1.5, False), (-1, 0.5, False), (1, 1.1, True), (-1, 0.9, True)],
)
def test_the_quadrants_of_the_double_sided_mask(advantage, ratio, moves):
    logprobs = torch.tensor([[math.log(ratio), 0.0]], requires_grad=True)
    advantages, mask = torch.tensor([[float(advantage), 0.0]]), torch.ones(1, 2, dtype=torch.bool)
    found = double_sided_policy_loss(logprobs, torch.zeros(1, 2), advantages, mask, clip_range=0.2)
    (gradient,) = torch.autograd.grad(found.loss, logprobs)
    assert gradient[0].tolist() == pytest.approx([-ratio * advantage / 2 if moves else 0.0, 0.0], rel=1e-5)
    assert found.clip_fraction.item() == (0.0 if moves else 0.5)


@settings(max_examples=12)
@given(SEEDS, st.floats(0.01, 0.6))
def test_cispo_caps_the_weight_and_keeps_every_gradient(ragged, seed, high):
    batch = ragged(seed)
    logprobs = batch.logprobs.clone().requires_grad_()
    found = cispo_policy_loss(
        logprobs, batch.old_logprobs, batch.advantages, batch.mask, clip_range_high=high, aggregation="token"
    )
    (gradient,) = torch.autograd.grad(found.loss, logprobs)
    count, capped = int(batch.mask.sum()), 0
    for i, t in batch.mask.nonzero().tolist():
        ratio = math.exp(batch.logprobs[i, t] - batch.old_logprobs[i, t])
        capped += ratio > 1 + high
        expected = -min(ratio, 1 + high) * batch.advantages[i, t].item() / count
        assert gradient[i, t].item() == pytest.approx(expected, abs=1e-12)
    assert found.clip_fraction.item() == pytest.approx(capped / count)


@pytest.mark.parametrize("name", [*LOSSES, "cispo"])
@settings(max_examples=12)
@given(seed=SEEDS)
def test_a_sequence_of_one_token_has_the_ratio_of_its_token(ragged, name, seed):
    """GSPO with one-token responses is PPO, in value, gradient and metrics."""
    batch = ragged(seed, time=1)
    loss = LOSSES.get(name, partial(cispo_policy_loss, clip_range_high=0.2))
    results = []
    for ratio in ("token", "sequence"):
        logprobs = batch.logprobs.clone().requires_grad_()
        found = loss(logprobs, batch.old_logprobs, batch.advantages, batch.mask, ratio=ratio)
        (gradient,) = torch.autograd.grad(found.loss, logprobs)
        results.append((gradient, found.loss.detach(), found.clip_fraction, found.ratio_max))
    torch.testing.assert_close(*results)


@settings(max_examples=12)
@given(SEEDS, st.floats(0.01, 0.6), st.floats(0.01, 0.9))
def test_gspo_agrees_with_a_loop_over_the_sequences(ragged, seed, low, high):
    """GSPO's objective, differentiated through its own ratio of sequences."""
    batch = ragged(seed)
    scores = batch.scores.unsqueeze(-1).expand_as(batch.mask)  # the same advantage at every token
    logprobs = batch.logprobs.clone().requires_grad_()
    found = clipped_policy_loss(
        logprobs, batch.old_logprobs, scores, batch.mask,
        clip_range=low, clip_range_high=high, ratio="sequence", aggregation="sequence",
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(found.loss, logprobs)
    loop = batch.logprobs.clone().requires_grad_()
    objective, held = torch.zeros(()), 0
    for row, mask in enumerate(batch.mask):
        ratio = ((loop[row] - batch.old_logprobs[row])[mask].sum() / mask.sum()).exp()
        score = batch.scores[row]
        objective = objective + torch.minimum(ratio * score, ratio.clamp(1 - low, 1 + high) * score)
        outside = ratio > 1 + high if score > 0 else ratio < 1 - low
        held += int(outside) * int(mask.sum())
    (expected,) = torch.autograd.grad(-objective / len(batch.mask), loop)
    torch.testing.assert_close(gradient, expected)
    assert found.loss.item() == pytest.approx(-objective.item() / len(batch.mask))
    assert found.clip_fraction.item() == pytest.approx(held / int(batch.mask.sum()))
