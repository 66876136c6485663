import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kedge.algorithm import generalized_advantages, penalize_missing_eos, shape_rewards
from kedge_base.errors import ConfigError, ShapeError

SEEDS = st.integers(0, 10_000)
# Spec §1: [t0, t1, EOS, PAD, PAD], no EOS at full length, EOS at once.
MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]], dtype=torch.bool)
SCORES = torch.tensor([3.0, 5.0, 7.0])
NOTHING = torch.zeros(3, 5)


def test_the_score_stands_at_the_last_token():
    rewards, mask = shape_rewards(SCORES, NOTHING, None, MASK, kl_coef=0.0)
    assert rewards.tolist() == [[0, 0, 3, 0, 0], [0, 0, 0, 0, 5], [7, 0, 0, 0, 0]]
    assert torch.equal(mask, MASK)


def test_after_the_last_token_where_the_tensor_has_that_slot():
    shaped = shape_rewards(SCORES, NOTHING, None, MASK, kl_coef=0.0, score_at="after_last")
    assert shaped.rewards.tolist() == [[0, 0, 0, 3, 0], [0, 0, 0, 0, 5], [0, 7, 0, 0, 0]]
    assert shaped.mask.int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]


def test_a_token_made_likelier_than_the_reference_has_it_pays_for_it():
    logprobs = torch.tensor([[-1.0, -2.0, -1.0]])
    reference = torch.tensor([[-3.0, -1.5, -1.0]])
    rewards, _ = shape_rewards(
        torch.tensor([10.0]), logprobs, reference, torch.ones(1, 3, dtype=torch.bool), kl_coef=0.1
    )
    assert rewards[0].tolist() == pytest.approx([-0.2, 0.05, 10.0])


@given(SEEDS, st.floats(0.0, 2.0))
def test_token_rewards_agree_with_a_loop(ragged, seed, kl_coef):
    batch = ragged(seed)
    rewards, _ = shape_rewards(batch.scores, batch.logprobs, batch.ref_logprobs, batch.mask, kl_coef=kl_coef)
    for row in range(5):
        length = int(batch.mask[row].sum())
        for t in range(7):
            expected = 0.0
            if t < length:
                expected = -kl_coef * (batch.logprobs[row, t] - batch.ref_logprobs[row, t]).item()
            if t == length - 1:
                expected += batch.scores[row].item()
            assert rewards[row, t].item() == pytest.approx(expected, abs=1e-12)


@given(SEEDS, st.sampled_from(["k1", "k2", "k3"]), st.sampled_from(["last", "after_last"]))
def test_both_scopes_give_a_response_the_same_total(ragged, seed, kl_estimator, score_at):
    batch = ragged(seed)
    settings = {"kl_coef": 0.3, "kl_estimator": kl_estimator, "score_at": score_at}
    by_token, by_sequence = (
        shape_rewards(batch.scores, batch.logprobs, batch.ref_logprobs, batch.mask, kl_scope=scope, **settings)
        for scope in ("token", "sequence")
    )
    torch.testing.assert_close(by_token.rewards.sum(-1), by_sequence.rewards.sum(-1))
    assert ((by_sequence.rewards != 0).sum(-1) == 1).all()


def test_one_adjusted_reward_per_response():
    # R − β·ΣKL = 4 − 0.5·(1 + 2) at the last token.
    logprobs, reference = torch.tensor([[-1.0, -1.0, 0.0]]), torch.tensor([[-2.0, -3.0, 0.0]])
    mask = torch.tensor([[True, True, False]])
    shaped = shape_rewards(torch.tensor([4.0]), logprobs, reference, mask, kl_coef=0.5, kl_scope="sequence")
    assert shaped.rewards.tolist() == [[0.0, 2.5, 0.0]]


def test_a_policy_that_is_the_reference_earns_its_score(ragged):
    batch = ragged(1)
    rewards, _ = shape_rewards(batch.scores, batch.logprobs, batch.logprobs, batch.mask, kl_coef=0.7)
    torch.testing.assert_close(rewards.sum(-1), batch.scores)
    assert (rewards != 0).sum() == 5


@given(SEEDS, st.floats(0.0, 1.0))
def test_the_identity_of_the_two_score_slots(ragged, seed, gae_lambda):
    """At γ = 1: A_L = −β·KL_L − V_L + S, against −β·KL_L − V_L + (1−λ)·V_{L+1} + λ·S (spec §5.22)."""
    batch = ragged(seed)
    kl_coef = 0.2
    critic = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = {}
    for score_at in ("last", "after_last"):
        rewards, mask = shape_rewards(
            batch.scores, batch.logprobs, batch.ref_logprobs, batch.mask, kl_coef=kl_coef, score_at=score_at
        )
        found[score_at] = generalized_advantages(rewards, critic, mask, gamma=1.0, gae_lambda=gae_lambda).advantages
    for row in range(5):
        last = int(batch.mask[row].sum()) - 1
        common = -kl_coef * (batch.logprobs - batch.ref_logprobs)[row, last] - critic[row, last]
        score = batch.scores[row]
        torch.testing.assert_close(found["last"][row, last], common + score)
        after = score if last == 6 else (1 - gae_lambda) * critic[row, last + 1] + gae_lambda * score
        torch.testing.assert_close(found["after_last"][row, last], common + after)


def test_rewards_are_constants(ragged):
    batch = ragged(2)
    rewards, _ = shape_rewards(
        batch.scores, batch.logprobs.requires_grad_(), batch.ref_logprobs, batch.mask, kl_coef=0.1
    )
    assert not rewards.requires_grad


def test_a_masked_span_inside_a_response_is_neither_scored_nor_charged():
    mask = torch.tensor([[True, False, True, False]])
    logprobs, reference = torch.tensor([[-1.0, 5.0, -1.0, 5.0]]), torch.tensor([[-2.0, 0.0, -2.0, 0.0]])
    rewards, _ = shape_rewards(torch.tensor([9.0]), logprobs, reference, mask, kl_coef=1.0)
    assert rewards.tolist() == [[-1.0, 0.0, 8.0, 0.0]]


def test_a_response_that_never_stopped_scores_worse():
    scores, stopped = torch.tensor([3.0, -5.0, 2.0]), torch.tensor([True, False, False])
    assert penalize_missing_eos(scores, stopped).tolist() == [3.0, -1.0, -1.0]
    assert penalize_missing_eos(scores, stopped, value=-4.0).tolist() == [3.0, -4.0, -4.0]
    for value in (2.0, -2.0):
        assert penalize_missing_eos(scores, stopped, value=value, mode="subtract").tolist() == [3.0, -7.0, 0.0]


@pytest.mark.usefixtures("unchecked")
class TestErrors:
    def test_an_empty_response_is_refused(self):
        with pytest.raises(ShapeError, match="row 1 of the mask counts no token"):
            shape_rewards(SCORES, NOTHING, None, MASK & torch.tensor([[True], [False], [True]]), kl_coef=0.0)

    def test_a_kl_needs_its_reference(self):
        with pytest.raises(ConfigError, match=r"kl_coef=0\.1 needs ref_logprobs"):
            shape_rewards(SCORES, NOTHING, None, MASK, kl_coef=0.1)

    def test_shapes_must_agree(self):
        with pytest.raises(ShapeError, match=r"scores \(2,\)"):
            shape_rewards(SCORES[:2], NOTHING, None, MASK, kl_coef=0.0)
        with pytest.raises(ShapeError, match=r"ref_logprobs \(3, 4\)"):
            shape_rewards(SCORES, NOTHING, NOTHING[:, :4], MASK, kl_coef=0.1)
        with pytest.raises(ShapeError, match="shapes must be equal"):
            penalize_missing_eos(SCORES, torch.tensor([True]))

    @pytest.mark.parametrize(
        ("setting", "message"),
        [
            ({"score_at": "end"}, "last, after_last"),
            ({"kl_scope": "batch"}, "token, sequence"),
            ({"kl_estimator": "k0", "kl_coef": 0.1}, "k1, k2, k3"),
        ],
    )
    def test_options_must_be_known(self, setting, message):
        with pytest.raises(ConfigError, match=message):
            shape_rewards(SCORES, NOTHING, NOTHING, MASK, **{"kl_coef": 0.0, **setting})

    def test_the_mode_must_be_known(self):
        with pytest.raises(ConfigError, match="replace, subtract"):
            penalize_missing_eos(SCORES, SCORES > 4, mode="add")
