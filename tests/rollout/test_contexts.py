"""Episodes of several contexts, against loops that read the context of every token on its own."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from kedge.algorithm.experience import PolicyOutputs, Rollout
from kedge.data.tokens import pad_left
from kedge.models import ActorCritic, response_logprobs
from kedge.models.packing.trunk import Trunk
from kedge.rollout import Sampler
from kedge.rollout.engine import Reply
from kedge.training.learner import LanguageLearner
from tests.experience import collected
from tests.float64 import in_float64
from tests.models.families import LAYOUTS
from tests.rollout.test_sampler import STOP, speaker
from tests.training.test_update import GAE, make_learner, make_models, run_update

PROMPTS = [[5, 6, 7, 8, 9], [20, 21], [30], [5, 6, 7, 8, 9], [40, 41, 42]]
SEEDS = [3, 1, 4, 1, 5]
LIMIT = 60
TURN = 6
MOST_TURNS = 5


class Jumping:
    """After some turns, the policy reads on after an earlier token, as if the conversation had been rewritten.

    Where it jumps depends on what was said: after its turn, after an earlier one of its own tokens or of its answers,
    in the middle of the prompt, to the very beginning, or to the place where its turn began (a second sample).
    """

    longest_turn = TURN

    def __init__(self, rows=range(len(PROMPTS))):
        self.rows = list(rows)
        self.jumps = {}

    def limit(self, row):
        return TURN - self.rows[row] % 2

    def kept(self, said):
        """A turn with a multiple of 5 ends there."""
        places = {row: next((at for at, token in enumerate(turn, 1) if token % 5 == 0), None)
                  for row, turn in said.items()}  # fmt: skip
        return {row: place for row, place in places.items() if place is not None}

    def open(self, rows):
        self.tokens = {**getattr(self, "tokens", {}), **{row: [] for row in rows}}
        self.turns = {**getattr(self, "turns", {}), **dict.fromkeys(rows, 0)}
        return [PROMPTS[self.rows[row]] for row in rows]

    def answer(self, said):
        return {row: self.reply(row, list(turn)) for row, turn in said.items()}

    def reply(self, row, turn):
        tokens, prompt = self.tokens[row], PROMPTS[self.rows[row]]
        start = len(tokens)
        tokens += turn
        self.turns[row] += 1
        new = [10 + (sum(turn) + place) % 40 for place in range([0, 1, 3, 5][sum(turn) % 4])]
        places = (None, start - 1, len(tokens) // 2, -1, -len(prompt), -len(prompt) - 1)
        parent = places[(sum(turn) + self.rows[row]) % len(places)]
        if parent == -len(prompt) - 1:
            new = [11, *new]  # something is read before every turn
        if parent == len(tokens) - 1:
            parent = None
        if self.turns[row] == MOST_TURNS or len(tokens) + len(new) >= LIMIT - 1:
            return None
        if parent is not None:
            self.jumps[row, len(tokens)] = parent
        tokens += new
        return Reply(new, parent)

    def finished(self, rollout):
        return rollout


def context_of(rollout: Rollout, row: int, slot: int) -> list[int]:
    """What was read before a slot, by following the parents."""
    prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]].tolist()
    found = []
    place = int(rollout.parents[row, slot])
    while place >= 0:
        found.append(int(rollout.response_ids[row, place]))
        place = int(rollout.parents[row, place])
    return prompt[: len(prompt) + place + 1] + found[::-1]


def forest(model, **settings) -> Rollout:
    sampler = Sampler(model, pad_id=0, stop_tokens=[STOP], max_new_tokens=LIMIT, **settings)
    return sampler.generate((), seeds=SEEDS, dialogue=Jumping())


def logprobs_one_by_one(model, rollout):
    """Log probabilities of the actions, each from a pass over its own context."""
    table = torch.zeros_like(rollout.logprobs)
    for row, slot in rollout.action_mask.nonzero().tolist():
        logits = model.causal(input_ids=torch.tensor([context_of(rollout, row, slot)])).logits[0, -1]
        logits = logits.index_fill(0, model.forbidden_ids, -torch.inf)
        table[row, slot] = logits.log_softmax(-1)[rollout.response_ids[row, slot]]
    return table


@torch.no_grad()
@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_contexts_are_sampled_and_read_as_on_their_own(name, layout, monkeypatch):
    if layout == "padded":
        monkeypatch.setattr(Trunk, "packs", lambda self, longest: False)
    model = speaker(name)
    rollout = forest(model)
    assert rollout.branches
    expected = logprobs_one_by_one(model, rollout)
    torch.testing.assert_close(rollout.logprobs, expected, atol=3e-5, rtol=0)
    torch.testing.assert_close(response_logprobs(model, rollout, temperature=1.0), expected, atol=3e-5, rtol=0)


@torch.no_grad()
def test_the_tokens_are_those_of_their_draws():
    """A token is the first one whose cumulative probability in its own context exceeds the draw of its slot."""
    model = speaker()
    rollout = forest(model)
    for row, slot in rollout.action_mask.nonzero().tolist():
        draws = torch.rand(LIMIT, generator=torch.Generator().manual_seed(SEEDS[row]), dtype=torch.float64)
        logits = model.causal(input_ids=torch.tensor([context_of(rollout, row, slot)])).logits[0, -1].double()
        logits[model.forbidden] = -torch.inf
        chances = logits.softmax(-1).cumsum(-1)
        assert (
            int(torch.searchsorted(chances, draws[slot] * chances[-1], right=True)) == rollout.response_ids[row, slot]
        )


def test_a_turn_is_cut_where_it_should_have_ended_and_starts_are_noted():
    rollout = forest(speaker())
    starts, own = rollout.turn_starts, rollout.action_mask
    assert (starts <= own).all()
    for row in range(len(PROMPTS)):
        slots = starts[row].nonzero().flatten().tolist()
        assert len(slots) <= MOST_TURNS
        for start, after in zip(slots, [*slots[1:], LIMIT], strict=True):
            turn = rollout.response_ids[row, start:after][own[row, start:after]].tolist()
            assert len(turn) <= TURN - row % 2
            assert all(token % 5 for token in turn[:-1])


def test_a_new_context_follows_the_token_that_was_named():
    dialogue = Jumping()
    sampler = Sampler(speaker(), pad_id=0, stop_tokens=[STOP], max_new_tokens=LIMIT)
    rollout = sampler.generate((), seeds=SEEDS, dialogue=dialogue)
    assert {min(parent, 0) for parent in dialogue.jumps.values()} >= {0, -1}
    for row, slot in rollout.token_mask.nonzero().tolist():
        assert rollout.parents[row, slot] == dialogue.jumps.get((row, slot), slot - 1)
        assert rollout.response_ids[row, slot] == dialogue.tokens[row][slot]


def test_a_conversation_does_not_depend_on_the_others_of_its_batch():
    model = speaker()
    together, split = forest(model), forest(model, batch_size=2)
    for name in ("response_ids", "token_mask", "action_mask", "turn_starts", "parents"):
        assert torch.equal(getattr(together, name), getattr(split, name))


class OneByOne(LanguageLearner):
    """Evaluates each action and its value from a pass of transformers over the action's own context."""

    def _forward(self, rollout, *, values=False):
        models = self.actor_critic
        tables = [torch.zeros_like(rollout.logprobs) for _ in range(3)]
        for row, slot in rollout.action_mask.nonzero().tolist():
            read = torch.tensor([context_of(rollout, row, slot)])
            causal = models.policy.causal
            hidden = causal.base_model(input_ids=read).last_hidden_state[0, -1]
            logits = causal.lm_head(hidden).index_fill(0, models.policy.forbidden_ids, -1e9)
            spread = logits.log_softmax(-1)
            if models.critic is None:
                value = models.policy.value_head(hidden)[0]
            else:
                classifier = models.critic.classifier
                value = classifier.score(classifier.base_model(input_ids=read).last_hidden_state[0, -1])[0]
            found = spread[rollout.response_ids[row, slot]], -(spread.exp() * spread).sum().detach(), value
            for number, each in enumerate(found):
                place = torch.zeros_like(tables[number])
                place[row, slot] = 1.0
                tables[number] = tables[number] + place * each
        return PolicyOutputs(*tables)


@pytest.mark.parametrize("critic", ["shared", "separate"])
@pytest.mark.parametrize("shares", [True, False])
def test_an_update_is_that_of_contexts_on_their_own(shares, critic, monkeypatch):
    """Weights and metrics of two epochs in float64, with shared beginnings and without, in several passes."""
    if not shares:
        monkeypatch.setattr(Trunk, "shares_up_to", 0)
    models = make_models(critic)
    rollout = forest(models.policy)
    assert rollout.branches
    for model in (models.policy, models.critic):
        if model is not None:
            in_float64(model, monkeypatch)
    rollout = replace(rollout, logprobs=rollout.logprobs.double(), values=None)
    scores = torch.linspace(-1, 2, len(PROMPTS), dtype=torch.float64)
    experience = collected(rollout, scores, models, None, kl_coef=0.0, advantage=GAE)
    whole = copy.deepcopy(models)
    settings = {"num_epochs": 2, "num_minibatches": 5}
    results = [
        run_update(models, experience, learner=make_learner(models, micro_batch_tokens=90), **settings),
        run_update(whole, experience, learner=OneByOne(whole, 1.0), **settings),
    ]
    own, expected = (result.metrics() for result in results)
    for name, value in expected.items():
        assert own[name] == pytest.approx(value, rel=1e-6, abs=1e-8), name
    weights = dict(whole.named_parameters())
    for name, weight in models.named_parameters():
        torch.testing.assert_close(weight, weights[name], atol=1e-8, rtol=1e-6, msg=name)


def test_what_contexts_have_in_common_is_read_once():
    """Eight contexts of 5 own tokens after a common beginning of 400 tokens: 440 tokens instead of 3,240."""
    read = []
    model = speaker()

    class Eight:
        longest_turn = 5

        def __init__(self):
            self.count = 0

        def limit(self, row):
            return 5

        def kept(self, said):
            return {}

        def open(self, rows):
            return [[10 + place % 30 for place in range(400)]]

        def answer(self, said):
            self.count += 1
            return {0: None if self.count == 8 else Reply((), -1)}

        def finished(self, rollout):
            return rollout

    sampler = Sampler(model, pad_id=0, stop_tokens=[], max_new_tokens=40)
    model.trunk.model.embed_tokens.register_forward_hook(lambda module, inputs, output: read.append(inputs[0].numel()))
    rollout = sampler.generate((), seeds=[0], dialogue=Eight())
    assert rollout.action_mask.sum() == 40
    # While sampling, the last token of the beginning is read again for every context; a turn's last token is not read.
    assert sum(read) == 400 + 7 + 8 * 4
    read.clear()
    found = response_logprobs(model, rollout, temperature=1.0)
    assert sum(read) == 400 + 8 * 4
    assert rollout.num_distinct_tokens == sum(read)
    assert rollout.row_lengths == [sum(read)]
    assert rollout.num_read_tokens == 8 * (400 + 4)
    torch.testing.assert_close(found, rollout.logprobs, atol=3e-5, rtol=0)


def test_the_value_after_the_last_action_follows_it():
    model = speaker()
    model.value_head = torch.nn.Linear(model.causal.config.hidden_size, 1)
    rollout = forest(model)
    values = ActorCritic(model).values(rollout, value_after_last=True)
    for row in range(len(PROMPTS)):
        last = int(rollout.action_mask[row].nonzero().max())
        read = [*context_of(rollout, row, last), int(rollout.response_ids[row, last])]
        hidden = model.trunk.model(input_ids=torch.tensor([read])).last_hidden_state[0, -1]
        torch.testing.assert_close(values[row, last + 1], model.value_head(hidden)[0], atol=1e-4, rtol=0)


def test_a_privileged_critic_reads_its_text_after_what_a_context_has_of_the_prompt():
    """Value by value, against a pass over the context with the privileged tokens in their place."""
    models = make_models("separate")
    rollout = forest(models.policy)
    added = [[50 + row, 60, 61][: 1 + row % 3] for row in range(len(PROMPTS))]
    ids, mask = pad_left(added, 0)
    values = models.values(replace(rollout, privileged_ids=ids, privileged_mask=mask))
    classifier = models.critic.classifier
    for row, slot in rollout.action_mask.nonzero().tolist():
        place = int(rollout.parents[row, slot])
        while place >= 0:
            place = int(rollout.parents[row, place])
        kept = len(PROMPTS[row]) + place + 1
        read = context_of(rollout, row, slot)
        read = torch.tensor([[*read[:kept], *added[row], *read[kept:]]])
        hidden = classifier.base_model(input_ids=read).last_hidden_state[0, -1]
        torch.testing.assert_close(values[row, slot], classifier.score(hidden)[0], atol=1e-4, rtol=0)
    seen, plain = (
        response_logprobs(models.policy, each, temperature=1.0)
        for each in (replace(rollout, privileged_ids=ids, privileged_mask=mask), rollout)
    )
    assert torch.equal(plain, seen)
