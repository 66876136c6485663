"""Conversations that the sampler goes on with from its cache, against a loop that reads everything again each token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import MistralConfig

from kedge.algorithm.experience import join_rollouts
from kedge.models import ActorCritic, response_logprobs
from kedge.models.packing.packed import PackedDecoder
from kedge.models.packing.trunk import Trunk
from kedge.ranks import AdaptiveTokens
from kedge.rollout import Sampler
from kedge.rollout.engine import Reply
from tests.models.families import HEADS, LAYOUTS, OTHERS, SIZES
from tests.rollout.test_sampler import STOP, speaker

PROMPTS = [[5, 6, 7, 8, 9], [20, 21], [30], [5, 6, 7, 8, 9], [40, 41, 42]]
SEEDS = [3, 1, 4, 1, 5]
LIMIT = 60
MOST_TURNS = 4


class Scripted:
    """Answers depend on what was said; some conversations end early, some answers are empty or long."""

    def __init__(self, rows=range(len(PROMPTS)), longest_turn=9):
        self.rows = list(rows)
        self.longest_turn = longest_turn
        self.heard = {}
        self.opened = []

    def among(self, rows):
        return Scripted([self.rows[row] for row in rows], self.longest_turn)

    def open(self, rows):
        self.opened += list(rows)
        for row in rows:
            self.heard[row] = []
        return [PROMPTS[self.rows[row]] for row in rows]

    def limit(self, row):
        return self.longest_turn

    def kept(self, said):
        return {}

    def answer(self, said):
        replies = {row: self.reply(row, list(tokens)) for row, tokens in said.items()}
        return {row: None if tokens is None else Reply(tokens) for row, tokens in replies.items()}

    def reply(self, row, tokens):
        self.heard[row].append(tokens)
        turns = self.heard[row]
        length = [0, 1, 3, 12, 25][(sum(tokens) + self.rows[row]) % 5]
        used = sum(map(len, turns)) + sum(len(reply) for reply in self.replies(row)[:-1])
        if len(turns) == MOST_TURNS or sum(tokens) % 7 == 0 or used + length >= LIMIT:
            return None
        return [10 + (sum(tokens) + place) % 40 for place in range(length)]

    def replies(self, row):
        """The answers so far, again from what was said."""
        found = []
        for tokens in self.heard[row]:
            length = [0, 1, 3, 12, 25][(sum(tokens) + self.rows[row]) % 5]
            found.append([10 + (sum(tokens) + place) % 40 for place in range(length)])
        return found

    def finished(self, rollout):
        return replace(rollout, ending=torch.tensor([len(self.heard[row]) for row in range(len(self.rows))]))


@torch.no_grad()
def slowly(model, row, *, longest_turn):
    """One conversation: tokens, and which were sampled. Reads the whole text for every token."""
    dialogue = Scripted([row], longest_turn)
    [prompt] = dialogue.open([0])
    draws = torch.rand(LIMIT, generator=torch.Generator().manual_seed(SEEDS[row]), dtype=torch.float64)
    tokens, own, said = [], [], []
    while True:
        logits = model.causal(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, -1].double()
        logits[model.forbidden] = -torch.inf
        chances = logits.softmax(-1).cumsum(-1)
        said.append(int(torch.searchsorted(chances, draws[len(tokens)] * chances[-1], right=True)))
        tokens.append(said[-1])
        own.append(True)
        if said[-1] == STOP or len(said) == longest_turn or len(tokens) == LIMIT:
            reply = dialogue.reply(0, said)
            if reply is None or len(tokens) == LIMIT:
                return tokens, own, len(dialogue.heard[0])
            tokens += reply
            own += [False] * len(reply)
            said = []


def make_sampler(model, **settings):
    return Sampler(model, pad_id=0, stop_tokens=[STOP], max_new_tokens=LIMIT, **settings)


def assert_is_the_slow_one(model, rollout, rows, *, longest_turn=9):
    for place, row in enumerate(rows):
        tokens, own, num_turns = slowly(model, row, longest_turn=longest_turn)
        count = len(tokens)
        assert rollout.response_ids[place, :count].tolist() == tokens
        assert rollout.action_mask[place, :count].tolist() == own
        assert rollout.token_mask[place].tolist() == [True] * count + [False] * (LIMIT - count)
        assert not rollout.action_mask[place, count:].any()
        assert rollout.ending[place] == num_turns
        assert bool(rollout.stopped[place]) == (tokens[-1] == STOP)


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_conversations_are_those_of_a_loop_that_reads_everything_again(name, layout, monkeypatch):
    if layout == "padded":
        monkeypatch.setattr(Trunk, "packs", lambda self, longest: False)
    model = speaker(name)
    dialogue = Scripted()
    rollout = make_sampler(model).generate((), seeds=SEEDS, dialogue=dialogue)
    assert dialogue.opened == list(range(len(PROMPTS)))
    assert_is_the_slow_one(model, rollout, range(len(PROMPTS)))
    # What was sampled on from a cache has the probability that one pass over the whole conversation gives it.
    again = response_logprobs(model, rollout, temperature=1.0)
    torch.testing.assert_close(again, rollout.logprobs, atol=2e-5, rtol=0)
    assert (rollout.logprobs[~rollout.action_mask] == 0).all()
    assert rollout.action_mask.sum() < rollout.token_mask.sum()


@pytest.mark.parametrize("longest_turn", [1, 4, LIMIT])
def test_a_turn_is_cut_at_its_limit_and_answered(longest_turn):
    model = speaker()
    rollout = make_sampler(model).generate((), seeds=SEEDS, dialogue=Scripted(longest_turn=longest_turn))
    assert_is_the_slow_one(model, rollout, range(len(PROMPTS)), longest_turn=longest_turn)


def test_a_conversation_does_not_depend_on_the_others_of_its_batch():
    model = speaker()
    together = make_sampler(model).generate((), seeds=SEEDS, dialogue=Scripted())
    split = make_sampler(model, batch_size=2).generate((), seeds=SEEDS, dialogue=Scripted())
    for name in ("response_ids", "token_mask", "action_mask", "stopped", "ending"):
        assert torch.equal(getattr(together, name), getattr(split, name))
    torch.testing.assert_close(together.logprobs, split.logprobs, atol=2e-5, rtol=0)


def test_rows_that_wait_are_not_computed_and_half_of_them_are_answered_together():
    """Each token is read once, prompts in common too; the last one of a conversation is not."""
    answered = []

    class Heard(Scripted):
        def answer(self, said):
            answered.append(len(said))
            answers = super().answer(said)
            open_rows.difference_update(row for row, reply in answers.items() if reply is None)
            assert 2 * len(said) >= len(open_rows)
            return answers

    open_rows = set(range(len(PROMPTS)))
    model = speaker()
    make_sampler(model).generate((), seeds=SEEDS, dialogue=Scripted())  # tries out what the model can do
    read = []
    model.trunk.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: read.append(output[..., 0]))
    rollout = make_sampler(model).generate((), seeds=SEEDS, dialogue=Heard())
    prompts = {tuple(prompt) for prompt in PROMPTS}
    needed = sum(map(len, prompts)) + int(rollout.token_mask.sum()) - len(PROMPTS)
    assert sum(each.numel() for each in read) == needed
    assert len(set(answered)) > 1
    assert sum(answered) == int(rollout.ending.sum())


def test_rows_of_several_batches_are_joined_with_what_their_environment_said():
    model = speaker()
    part = make_sampler(model).generate((), seeds=SEEDS, dialogue=Scripted())
    part = replace(part, rewards=part.logprobs - 1, cut_off=part.stopped)
    joined = join_rollouts([part, part.select(torch.tensor([2, 0]))], pad_id=0)
    assert joined.ending.tolist() == [*part.ending.tolist(), int(part.ending[2]), int(part.ending[0])]
    assert torch.equal(joined.rewards[5:], part.rewards[[2, 0]])
    assert torch.equal(joined.cut_off[5:], part.cut_off[[2, 0]])
    plain = replace(part, rewards=None, cut_off=None, ending=None)
    assert join_rollouts([plain, part], pad_id=0).rewards is None


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_values_are_those_of_one_pass_over_the_whole_conversation(name):
    model = speaker(name, value_head=True)
    rollout = make_sampler(model).generate((), seeds=SEEDS, dialogue=Scripted())
    with torch.no_grad():
        outputs = ActorCritic(model)(rollout, temperature=1.0)
    torch.testing.assert_close(rollout.values, outputs.values, atol=1e-5, rtol=1e-5)
    assert outputs.values.abs().max() > 0.1


@pytest.mark.parametrize("layout", ["as it can", "padded"])
def test_no_conversation_is_read_beyond_the_context_while_others_go_on(layout, monkeypatch):
    """A row that has ended its turn at the limit waits for a row that may say much more."""
    if layout == "padded":
        monkeypatch.setattr(Trunk, "packs", lambda self, longest: False)
    model = speaker("gpt2")
    monkeypatch.setitem(globals(), "PROMPTS", [[5 + place % 40 for place in range(256 - LIMIT)], *PROMPTS[1:]])
    rollout = make_sampler(model).generate((), seeds=SEEDS, dialogue=Scripted(longest_turn=LIMIT))
    assert_is_the_slow_one(model, rollout, range(len(PROMPTS)), longest_turn=LIMIT)
    lengths = rollout.prompt_mask.sum(-1) + rollout.response_lengths
    assert lengths.max() > 256 - LIMIT


def test_a_conversation_that_outgrows_the_window_is_not_read_without_it(monkeypatch):
    """The packed decoder has no window: what is short when it is read again is longer than the window in the end."""
    monkeypatch.setitem(OTHERS, "mistral", MistralConfig(**SIZES, **HEADS, sliding_window=45))
    model = speaker("mistral")
    rollout = make_sampler(model).generate((), seeds=SEEDS, dialogue=Scripted())
    assert_is_the_slow_one(model, rollout, range(len(PROMPTS)))
    again = response_logprobs(model, rollout, temperature=1.0)
    torch.testing.assert_close(again, rollout.logprobs, atol=2e-5, rtol=0)


def test_conversations_are_opened_again_where_memory_runs_out_in_the_middle(monkeypatch):
    """What an environment says the second time counts, also if it is something else."""
    opened = {}

    class Moody(Scripted):
        def open(self, rows):
            again = bool(set(rows) & set(self.opened))
            for row, prompt in zip(rows, super().open(rows), strict=True):
                opened[row] = [*prompt, 50] if again else prompt
            return [opened[row] for row in rows]

    whole = PackedDecoder.extend

    def extend(self, rows, *rest, **given):
        if len(rows) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return whole(self, rows, *rest, **given)

    monkeypatch.setattr(PackedDecoder, "extend", extend)
    model = speaker()
    dialogue = Moody()
    rollout = make_sampler(model, adaptive=AdaptiveTokens(10**6)).generate((), seeds=SEEDS, dialogue=dialogue)
    assert len(dialogue.opened) > len(PROMPTS)
    prompts = [ids[mask].tolist() for ids, mask in zip(rollout.prompt_ids, rollout.prompt_mask, strict=True)]
    assert prompts == [opened[row] for row in range(len(PROMPTS))]
    assert any(prompt[-1] == 50 for prompt in prompts)
    monkeypatch.setitem(globals(), "PROMPTS", prompts)
    assert_is_the_slow_one(model, rollout, range(len(PROMPTS)))
