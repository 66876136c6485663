"""The minimum gate (spec §12): the test of each item, and the tests that involve several packages.

1. The index fixture, from the sampler to the reward: here; empty responses are rejected: here.
2. Padding: logprobs, values, entropy and their gradients in models/test_actor_critic, scores in models/test_scalar,
   every function of the algorithm in algorithm/test_padding; an update's experience, metrics and weights: here.
3. Learning rate 0: training/test_update (all epochs and minibatches), algorithm/test_padding.
4. Policy = reference: rollout/test_experience, training/test_update. Critic = reward model: models/test_actor_critic.
5. GAE: algorithm/test_advantages. The L / L+1 identity: algorithm/test_shaping. Whitening and aggregation:
   algorithm/test_masking. Estimators: algorithm/test_kl. Adam: training/test_optimizer; no default weight decay: here.
6. Micro-batches and REINFORCE at ρ = 1: training/test_update. Ranks: training/test_objective. The four quadrants:
   algorithm/test_policy_losses.
7. Mutations: test_mutations.
8. The optimum in closed form: algorithm/test_toy_optimum.
"""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import pad

from kedge.algorithm import Rollout, shape_rewards
from kedge.logs.experience_metrics import describe_experience
from kedge.models import ScalarModel, TokenRows
from kedge.rollout import Sampler
from kedge.training.optimizer import build_optimizer
from kedge_base.errors import ShapeError
from tests.experience import collected
from tests.models.test_language import ROWS
from tests.tiny import FAMILIES, tiny_reward_model, tiny_tokenizer
from tests.training.test_update import GAE, PROMPTS, make_experience, make_models, run_update

PAD, EOS, VOCABULARY = 0, 2, 12

# The sampled tokens, the tokens kept, the index L of the last counted token, and whether the response stopped.
FIXTURE = [
    ([5, 6, EOS, 7, 8], [5, 6, EOS, PAD, PAD], 2, True),
    ([5, 6, 7, 8, 9], [5, 6, 7, 8, 9], 4, False),
    ([5, 6, 7, 8, EOS], [5, 6, 7, 8, EOS], 4, True),
    ([EOS, 5, EOS, 6, 7], [EOS, PAD, PAD, PAD, PAD], 0, True),
]


class ScriptedPolicy:
    """A policy, with its trunk and decoder, that generates given tokens."""

    device, value_head, can_drop_rows = torch.device("cpu"), None, True

    def __init__(self, script: list[list[int]]) -> None:
        self.trunk, self.script = self, torch.tensor(script)

    def decoder(self, prompts: list[list[int]], *, max_new_tokens: int, pad_id: int) -> "ScriptedPolicy":
        assert (len(prompts), max_new_tokens) == self.script.shape
        return self

    @property
    def hidden(self) -> torch.Tensor:
        return self.script[:, 0]

    def step(self, tokens: torch.Tensor) -> None:
        assert tokens.tolist() == self.script[:, 0].tolist()
        self.script = self.script[:, 1:]

    def keep(self, rows: torch.Tensor) -> None:
        self.script = self.script[rows]

    def over_logits(self, measure, hidden: torch.Tensor, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return measure(50.0 * torch.nn.functional.one_hot(hidden, VOCABULARY), draws)


def test_the_index_contract_from_sampling_to_reward():
    script, kept, last, stopped = (list(column) for column in zip(*FIXTURE, strict=True))
    sampler = Sampler(ScriptedPolicy(script), pad_id=PAD, stop_tokens=[EOS], max_new_tokens=5)
    rollout = sampler.generate([[5, 6]] * 4, seeds=range(4))
    assert rollout.response_ids.tolist() == kept
    assert rollout.action_mask.tolist() == [[time <= index for time in range(5)] for index in last]
    assert rollout.stopped.tolist() == stopped
    assert rollout.response_lengths.tolist() == [3, 5, 5, 1]
    scores, nothing = torch.tensor([3.0, 5.0, 7.0, 9.0]), torch.zeros(4, 5)
    for score_at, slots in (("last", last), ("after_last", [3, 4, 4, 1])):
        rewards, mask = shape_rewards(scores, nothing, None, rollout.action_mask, kl_coef=0.0, score_at=score_at)
        assert rewards.nonzero().tolist() == [[row, slot] for row, slot in enumerate(slots)]
        assert rewards.sum(-1).tolist() == scores.tolist()
        assert mask.sum(-1).tolist() == [slot + 1 for slot in slots]


def test_an_empty_response_is_refused_and_never_wraps_to_the_last_column():
    mask = torch.tensor([[True, False], [False, False]])
    for score_at in ("last", "after_last"):
        with pytest.raises(ShapeError, match=r"row 1 .* empty response"):
            shape_rewards(torch.ones(2), torch.zeros(2, 2), None, mask, kl_coef=0.0, score_at=score_at)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reward_model_in_training_mode_scores_alike_twice(family):
    model = ScalarModel(tiny_reward_model(family), tiny_tokenizer())
    model.trunk.checkpoint_activations()  # runs the layers in training mode
    rows = TokenRows.of(ROWS)
    assert torch.equal(model.train().scores(rows), model.train().scores(rows))
    first, second = (model.classifier.train()(torch.tensor(ROWS[:1])).logits for _ in range(2))
    assert torch.equal(first, second)


def test_a_critic_copied_from_a_normalized_reward_model_is_normalized_too():
    model = ScalarModel(tiny_reward_model(), tiny_tokenizer())
    rows = TokenRows.of(ROWS)
    with torch.no_grad():
        raw = model.scores(rows)
        model.normalize(mean=1.5)
        critic = ScalarModel(copy.deepcopy(model.classifier), tiny_tokenizer())
        torch.testing.assert_close(critic.scores(rows), raw - 1.5, atol=1e-5, rtol=1e-5)


def test_stopping_at_the_stop_token_is_sampling_on_and_cutting_later():
    models = make_models()
    common = {"pad_id": PAD, "max_new_tokens": 20, "temperature": 0.7}
    prompts, seeds = PROMPTS * 4, range(4 * len(PROMPTS))
    first = Sampler(models.policy, stop_tokens=[], **common).generate(prompts, seeds=seeds)
    assert not first.stopped.any()
    stop = int(first.response_ids.flatten().mode().values)
    stopping = Sampler(models.policy, stop_tokens=[stop], **common).generate(prompts, seeds=seeds)
    lengths = [(*row, stop).index(stop) + 1 for row in first.response_ids.tolist()]
    assert {True, False} == set(stopping.stopped.tolist())
    assert stopping.response_lengths.tolist() == [min(length, 20) for length in lengths]
    torch.testing.assert_close(
        stopping.logprobs, first.logprobs.masked_fill(~stopping.action_mask, 0.0), atol=1e-5, rtol=1e-5
    )
    # Tokens after the stop token stay in the ids and must have no influence.
    cut = replace(first, token_mask=stopping.token_mask, action_mask=stopping.action_mask, stopped=stopping.stopped)
    settings = {"temperature": 0.7, "kl_coef": 0.1}
    scores = torch.linspace(-1, 1, len(prompts))
    reference = make_models().policy
    one, other = (
        collected(rollout, scores, models, reference, advantage=GAE, **settings) for rollout in (stopping, cut)
    )
    for name in ("old_logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), atol=1e-5, rtol=1e-5)
    assert describe_experience(other) == pytest.approx(describe_experience(one), abs=1e-5)


def widened(rollout: Rollout, *, left: int, right: int) -> Rollout:
    """The rollout with more padding on either side."""
    return replace(
        rollout,
        prompt_ids=pad(rollout.prompt_ids, (left, 0)),
        prompt_mask=pad(rollout.prompt_mask, (left, 0)),
        response_ids=pad(rollout.response_ids, (0, right)),
        token_mask=pad(rollout.token_mask, (0, right)),
        action_mask=pad(rollout.action_mask, (0, right)),
        logprobs=pad(rollout.logprobs, (0, right)),
        values=None if rollout.values is None else pad(rollout.values, (0, right)),
    )


def soiled(rollout: Rollout) -> Rollout:
    """The rollout with more padding on both sides, filled with random tokens and NaN."""
    wide = widened(rollout, left=3, right=4)
    draw = torch.Generator().manual_seed(0)
    return replace(
        wide,
        prompt_ids=wide.prompt_ids.where(wide.prompt_mask, torch.randint(200, wide.prompt_ids.shape, generator=draw)),
        response_ids=wide.response_ids.where(
            wide.action_mask, torch.randint(200, wide.response_ids.shape, generator=draw)
        ),
        logprobs=wide.logprobs.where(wide.action_mask, torch.nan),
        values=None if wide.values is None else wide.values.where(wide.action_mask, torch.nan),
    )


@pytest.mark.parametrize("score_at", ["last", "after_last"])
@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_padding_changes_no_figure_and_no_weight_of_an_update(critic, score_at):
    models = make_models(critic)
    clean = make_experience(models, score_at=score_at)
    # One more slot, so that "after the last token" is the same slot in both.
    narrow = widened(clean.rollout, left=0, right=1)
    found = []
    for rollout in (narrow, soiled(narrow)):
        trained = copy.deepcopy(models)
        experience = collected(
            rollout, clean.scores, trained, make_models(critic="separate", family="gpt2").policy,
            temperature=1.0, advantage=GAE, kl_coef=0.1, score_at=score_at, whiten_rewards=True,
        )  # fmt: skip
        result = run_update(trained, experience, num_epochs=1, num_minibatches=2, learning_rate=1e-3)
        found.append((describe_experience(experience), result.steps, [p.detach() for p in trained.parameters()]))
    (described, steps, weights), (other_described, other_steps, other_weights) = found
    assert other_described == pytest.approx(described, abs=1e-5)
    for figures, other_figures in zip(steps, other_steps, strict=True):
        assert other_figures == pytest.approx(figures, rel=1e-4, abs=1e-5)
    for one, other in zip(weights, other_weights, strict=True):
        torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-5)


def test_a_matrix_without_a_gradient_stays_as_it_is():
    # The default weight decay of PyTorch's AdamW is 0.01 (spec §7.35).
    matrix = torch.nn.Parameter(torch.ones(2, 2))
    matrix.grad = torch.zeros(2, 2)
    build_optimizer([matrix], learning_rate=0.1).step()
    assert torch.equal(matrix.detach(), torch.ones(2, 2))
