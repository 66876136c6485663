"""Episodes as a rollout: endings, limits, and where rewards are paid."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from kedge.algorithm import GeneralizedAdvantage, RewardToGo
from kedge.algorithm.experience import ENDINGS, Rollout, join_rollouts
from kedge.data import Prompt, Rendered, read_rows
from kedge.data.tokens import encode_completion, pad_left
from kedge.logs.experience_metrics import describe_experience
from kedge.models import LanguageModel
from kedge.rewards.score import describe_responses
from kedge.rollout import Sampler
from kedge.rollout.episodes import Limits
from kedge.rollout.player import Player
from kedge_base.errors import DataError, EnvError
from kedge_tasks.environments.client import Environment
from tests.algorithm.test_advantages import advantages_by_definition
from tests.data.test_chat import FAMILIES
from tests.data.test_turns import CALLS, GOES_ON, UNREAD, calling, stop_of
from tests.experience import collected
from tests.models.families import language_model
from tests.rollout.test_sampler import STOP as SPOKEN
from tests.rollout.test_sampler import speaker
from tests.tasks.environments import worlds
from tests.tiny import CHAT_TEMPLATE, tiny_causal_lm, tiny_tokenizer
from tests.training.test_update import make_models

PLAIN = tiny_tokenizer()
ASKED = [{"role": "user", "content": "Add."}]
STOP = 2


def play(kind, said, *, rows=({},), tokenizer=PLAIN, timeout=60.0, room=100, **limits):
    """Episodes in which the policy says given texts, a text or (text, False) without a stop token; by hand."""
    player = Player(Environment(kind, timeout=timeout), Limits(**{"turns": 9, "tokens": 200, **limits}), by_turn=True)
    prompts = [Prompt(Rendered("Play. ") if "messages" in row else "Play. ", row) for row in rows]
    player.begin([STOP], room, None, tokenizer, prompts[:1])
    episodes = player.episodes(tokenizer, prompts, [3] * len(rows))
    opened = episodes.open(range(len(rows)))
    answers, slots = [], [0] * len(rows)
    ids = [[] for _ in rows]
    for turns in said:
        spoken = {}
        for row, turn in enumerate(turns):
            if turn is not None:
                text, stops = turn if isinstance(turn, tuple) else (turn, True)
                spoken[row] = encode_completion(tokenizer, text, eos=False) + [STOP] * stops
                ids[row] += spoken[row]
                slots[row] = len(ids[row]) - 1
        found = episodes.answer(spoken)
        replies = {row: reply and list(reply.tokens) for row, reply in found.items()}
        answers.append({row: None if reply is None else tokenizer.decode(reply) for row, reply in replies.items()})
        for row, reply in replies.items():
            ids[row] += reply or []
    width = 200
    shape = (len(rows), width)
    empty = SimpleNamespace(logprobs=torch.zeros(shape))
    mask = torch.zeros(shape, dtype=torch.bool)
    rollout = Rollout(mask.long(), mask, mask.long(), mask, mask, empty.logprobs, mask[:, 0], mask[:, 0].long(),
                      mask[:, 0].long(), turn_starts=mask,
                      parents=torch.arange(-1, width - 1).repeat(len(rows), 1))  # fmt: skip
    ended = all(each.ending for each in episodes._played.values())
    return SimpleNamespace(
        player=player,
        opened=[tokenizer.decode(each) for each in opened],
        answers=answers,
        ids=ids,
        slots=slots,
        rollout=episodes.finished(rollout) if ended else None,
    )


def endings(played):
    return [ENDINGS[number] for number in played.rollout.ending.tolist()]


def test_rewards_are_paid_at_the_last_token_of_each_turn():
    """By hand: the secret of seed 3 is 2; "a" and "b" are one token each and the stop token one more."""
    played = play(worlds.Guess, [["a"], ["b"], ["11"]])
    assert played.opened == ["Play. From 1 to 5.\n"]
    assert played.answers == [{0: "no.\n"}, {0: "no.\n"}, {0: None}]
    reply = len(encode_completion(PLAIN, "no.\n", eos=False))
    first, second = 1, 2 + reply + 1
    paid = {slot: round(float(reward), 6) for slot, reward in enumerate(played.rollout.rewards[0]) if reward}
    assert paid == {first: 0.25, second: 0.25, played.slots[0]: 1.0}
    assert endings(played) == ["completed"]
    assert not played.rollout.cut_off[0]


def test_an_environment_may_change_its_row():
    row = {"hand": {"cards": [1, 2, 3]}}
    played = play(worlds.Deck, [["a", "a"]], rows=(row, row))
    assert played.answers == [{0: "2 left.\n", 1: "2 left.\n"}]
    assert row == {"hand": {"cards": [1, 2, 3]}}


def test_every_ending_has_its_word():
    played = play(worlds.Guess, [["a"], ["b"]], turns=2)
    assert endings(played) == ["max_turns"]
    assert played.rollout.rewards.sum() == 0.5  # the last turn is paid, too
    played = play(worlds.Guess, [[("a" * 12, False)]], tokens=12)
    assert endings(played) == ["max_tokens"]
    played = play(worlds.Tuple, [["cut"]])
    assert endings(played) == ["truncated"]
    assert played.rollout.rewards.sum() == 0.5
    played = play(worlds.Crowd, [["a"]], tokens=30)
    assert endings(played) == ["context_overflow"]
    played = play(f"{worlds.__file__}:Sleeps", [["0", "30"]], rows=({}, {}), timeout=0.5)
    assert endings(played) == ["completed", "timeout"]
    assert played.rollout.cut_off.tolist() == [False, True]
    played.player.environment.close()


def test_a_cut_turn_is_answered_and_others_go_on():
    played = play(worlds.Guess, [[("a", False), "11"], ["11", None]], rows=({}, {"most": 7}), turn_tokens=1)
    assert played.answers == [{0: "no.\n", 1: None}, {0: None}]
    assert endings(played) == ["completed", "completed"]


def test_an_episode_that_kedge_ends_is_paid_what_the_environment_gives():
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    row = {"answer": 3.0, "messages": [{"role": "user", "content": "1 + 2?"}]}
    call = '<add>{"a": 1, "b": 2}</add>'
    played = play(worlds.Calculator, [[call]], rows=(row,), tokenizer=tokenizer, turns=1, room=600)
    assert endings(played) == ["max_turns"]
    assert played.rollout.rewards.sum() == 1.0
    played = play(worlds.Calculator, [[call], ["3"]], rows=(row,), tokenizer=tokenizer, room=600)
    assert endings(played) == ["completed"]
    assert float(played.rollout.rewards[0, played.slots[0]]) == 1.0
    assert "You can use tools." in played.opened[0]
    assert played.answers[0][0] == "\n<|tool|>\n3\n<|assistant|>\n"


def test_the_calls_of_a_batch_are_those_of_its_own_episodes():
    """By hand: three calls, of which one fails, and none; meanwhile the next batch, sampled ahead, has called once."""
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    row = {"answer": 3.0, "messages": [{"role": "user", "content": "1 + 2?"}]}
    call = '<add>{"a": 1, "b": 2}</add>'
    failing = "<fail>{}</fail>"
    turns = [[call, "3"], [failing, None], [call, None]]
    played = play(worlds.Calculator, turns, rows=(row, row), tokenizer=tokenizer, turns=3, room=600)
    ahead = played.player.episodes(tokenizer, [Prompt(Rendered("Play. "), row)], [3])
    ahead.open([0])
    ahead.answer({0: [*encode_completion(tokenizer, call, eos=False), STOP]})
    found = played.player.metrics(played.rollout)
    assert played.rollout.calls.tolist() == [[3, 1, 0], [0, 0, 0]]
    assert (found["tools/calls"], found["tools/failed"]) == (3 / 2, 1 / 3)
    joined = join_rollouts([played.rollout, played.rollout.select(torch.tensor([1, 1]))], pad_id=0)
    assert played.player.metrics(joined)["tools/calls"] == 3 / 4


@pytest.mark.parametrize(
    ("form", "is_said"), [(CALLS["hermes"], False), (UNREAD["like Python"], True)], ids=["read", "unread"]
)
def test_a_template_whose_calls_are_not_read_is_said_once(form, is_said):
    """And the policy calls by plain tags, as it was told."""
    lines = []
    family = calling(form)
    tokenizer = family.tokenizer()
    stop = stop_of(family, tokenizer)
    player = Player(Environment(worlds.Adder, timeout=60.0), Limits(9, 300), by_turn=True, say=lines.append)
    prompt = Prompt(Rendered(""), {"messages": [{"role": "user", "content": "6 + 1?"}]})
    player.begin([stop], 600, None, tokenizer, [prompt])
    episodes = player.episodes(tokenizer, [prompt], [0])
    opened = tokenizer.decode(episodes.open([0])[0])
    assert ("[1 tools]" in opened, "You can use tools." in opened) == (not is_said, is_said)
    said = '<add>{"a": 6}</add>' if is_said else '<tool_call>{"name": "add", "arguments": {"a": 6}}</tool_call>'
    answer = episodes.answer({0: [*encode_completion(tokenizer, said, eos=False), stop]})[0]
    assert tokenizer.decode(answer.tokens) == "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    line = (
        "Adder: the chat template shows tools, but writes no call that kedge reads; they are described before the "
        'first question, and called as <add>{"a": 1}</add>'
    )
    assert lines == ([line] if is_said else [])


def test_what_cannot_be_is_refused_before_a_run():
    with pytest.raises(DataError, match=r"Calculator has tools, and the prompt 'Play. ' is plain text"):
        play(worlds.Calculator, [], rows=({"answer": 3},))
    with pytest.raises(DataError, match=r"an episode of Guess opens with \d+ tokens .*; expected 1 to 100"):
        play(worlds.Guess, [], rows=({"most": "9" * 200},))
    with pytest.raises(EnvError, match=r"^Nonsense said 3 \(of type int\)"):
        play(worlds.Nonsense, [], rows=({"says": 3},))


class Refusing(worlds.Guess):
    """Fails where its row says, as a sandbox that is full or a connection that is reset."""

    def reset(self, row, seed):
        self.fails = row.get("fails")
        self._check("reset")
        return super().reset(row, seed)

    def step(self, text):
        self._check("step")
        return super().step(text)

    def _check(self, what):
        if self.fails == what:
            raise ConnectionResetError("the connection was reset")


class RefusingAtTheEnd(worlds.Calculator):
    def get_reward(self):
        raise ConnectionResetError("the connection was reset")


ROWS = ({}, {"fails": "reset"}, {"fails": "step"})


@pytest.fixture
def short_pause(monkeypatch):
    monkeypatch.setattr("kedge_tasks.environments.client.PAUSE", 0.01)


@pytest.mark.usefixtures("short_pause")
def test_a_failed_call_ends_its_episode_alone():
    """By hand: the secret of seed 3 is 2. What the others earned is left as it is."""
    played = play(Refusing, [["a"] * 3, ["11", None, None]], rows=ROWS)
    assert played.answers[0] == {0: "no.\n", 1: None, 2: None}
    assert endings(played) == ["completed", "failed", "failed"]
    assert played.rollout.rewards[0].sum() == 1.25
    assert played.rollout.rewards[1:].isnan().all()
    assert not played.rollout.cut_off.any()
    assert played.player.metrics(played.rollout)["episode/failed"] == pytest.approx(2 / 3)


@pytest.mark.usefixtures("short_pause")
@pytest.mark.parametrize("row", ROWS[1:])
def test_a_failed_call_may_stop_the_run(row):
    with pytest.raises(
        EnvError, match=r"^Refusing raised ConnectionResetError: the connection was reset \(test_player"
    ):
        play(Refusing, [["a"] * 2], rows=({}, row), on_error="stop")


@pytest.mark.usefixtures("short_pause")
def test_a_mistake_in_every_episode_ends_the_run():
    played = play(worlds.Raises, [["a", "a"]], rows=({}, {}))
    assert endings(played) == ["failed"] * 2
    with pytest.raises(EnvError, match=r"^Raises raised KeyError: .*: it failed in all episodes$"):
        played.player.check(played.rollout)
    played = play(Refusing, [["a"] * 3, ["11", None, None]], rows=ROWS)
    assert played.player.check(played.rollout) is played.rollout


def test_an_episode_whose_reward_fails_at_its_end_has_failed():
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    row = {"answer": 3.0, "messages": [{"role": "user", "content": "1 + 2?"}]}
    call = '<add>{"a": 1, "b": 2}</add>'
    player = Player(Environment(RefusingAtTheEnd, timeout=60.0), Limits(1, 200), by_turn=True)
    with pytest.raises(EnvError, match=r"^RefusingAtTheEnd raised ConnectionResetError"):  # the trial
        player.begin([STOP], None, None, tokenizer, [Prompt(Rendered("Play. "), row)])
    episodes = player.episodes(tokenizer, [Prompt(Rendered("Play. "), row)] * 2, [3, 3])
    episodes.open([0, 1])
    said = {0: call, 1: "It is 3."}
    assert episodes.answer({row: [*encode_completion(tokenizer, text, eos=False), STOP] for row, text in said.items()})
    assert [each.ending for each in episodes._played.values()] == ["failed", "failed"]


class Deleting:
    """Keeps what it was asked to delete."""

    deleted: ClassVar[list] = []

    def delete(self, path: str) -> str:
        """Delete a file.

        Args:
            path: Where it is.
        """
        self.deleted.append(path)
        return "done"


def said_to_delete(said, *, tokenizer=None, prompt=None, **limits):
    """What a policy deletes, and how its episode ends, with one turn."""
    Deleting.deleted.clear()
    tokenizer = tokenizer or tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    row = {"messages": prompt or [{"role": "user", "content": "Clean up."}]}
    played = play(Deleting, [[said]], rows=(row,), tokenizer=tokenizer, turns=1, room=600, **limits)
    return Deleting.deleted, *endings(played)


def test_only_a_call_that_was_closed_is_made():
    """A turn that the limit cuts off calls nothing with the path as far as it came, and is no answer."""
    whole = "<delete>/data/cache/old</delete>"
    assert said_to_delete(whole) == (["/data/cache/old"], "max_turns")
    size = len(encode_completion(PLAIN, "<delete>/data/cac", eos=False))
    assert said_to_delete(("<delete>/data/cac", False), tokens=size) == ([], "max_tokens")
    assert said_to_delete(("<delete>/data/cac", False), turn_tokens=size) == ([], "completed")
    assert said_to_delete("<delete>/data/cac") == ([], "completed"), "the stop token came in the middle"


def test_a_stop_token_may_be_what_closes_a_call():
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    tokenizer.add_tokens(["</delete>"])
    closing = tokenizer.convert_tokens_to_ids("</delete>")
    Deleting.deleted.clear()
    player = Player(Environment(Deleting, timeout=60.0), Limits(2, 300), by_turn=True)
    prompts = [Prompt(Rendered(""), {"messages": [{"role": "user", "content": "Clean up."}]})]
    player.begin([closing], 600, None, tokenizer, prompts)
    episodes = player.episodes(tokenizer, prompts, [0])
    episodes.open([0])
    ids = encode_completion(tokenizer, "<delete>/tmp/old</delete>", eos=False)
    assert ids[-1] == closing
    episodes.answer({0: ids})
    assert Deleting.deleted == ["/tmp/old"]


@pytest.mark.parametrize("mark", ["<think>\n", "<thinking>", "[THINK]"])
def test_a_thought_that_the_prompt_opened_calls_nothing(mark):
    begins = "{% if message['role'] == 'assistant' %}" + mark + "{% endif %}{{ message['content'] }}"
    opens = "{% if add_generation_prompt %}" + mark + "{% endif %}"
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE.replace("{{ message['content'] }}", begins) + opens)
    closing = {"<think>\n": "</think>", "<thinking>": "</thinking>", "[THINK]": "[/THINK]"}[mark]
    call = "<delete>/tmp/old</delete>"
    assert said_to_delete(f"Maybe {call}, but", tokenizer=tokenizer) == ([], "completed")
    assert said_to_delete(f"Maybe.{closing}{call}", tokenizer=tokenizer) == (["/tmp/old"], "max_turns")


@pytest.mark.parametrize(
    ("row", "opened"),
    [
        ({"prompt": "Q: hello A:", "messages": [{"role": "user", "content": "other"}]}, "Q: hello A:"),
        ({"prompt": "Q: hello A:", "messages": [{"from": "human", "value": "other"}]}, "Q: hello A:"),
        ({"prompt": "Q: hello A:", "messages": []}, "Q: hello A:"),
        ({"prompt": None, "messages": ASKED}, "<|user|>\nAdd.\n<|assistant|>\n"),
        ({"prompt": [*ASKED, {"role": "assistant", "content": "Sure: I"}]}, "<|user|>\nAdd.\n<|assistant|>\nSure: I"),
    ],
    ids=["messages", "ShareGPT", "no messages", "no prompt", "a begun answer"],
)
def test_an_episode_opens_with_the_prompt(row, opened):
    """And with nothing else, as `reset` says nothing."""
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    prompts = read_rows([row], "prompts", tokenizer=tokenizer).records
    rows = []

    class Recording(worlds.Tuple):
        def reset(self, row):
            rows.append(row)

    player = Player(Environment(Recording, timeout=60.0), Limits(2, 20), by_turn=True)
    player.begin([STOP], None, None, tokenizer, prompts)
    assert prompts[0].text == opened
    assert tokenizer.decode(player.episodes(tokenizer, prompts, [0]).open([0])[0]) == opened
    assert rows[-1]["prompt"] == opened


@pytest.mark.parametrize("name", GOES_ON)
@pytest.mark.parametrize("kind", [worlds.Guess, worlds.Tuple], ids=["says", "silent"])
def test_a_reward_model_reads_what_reset_said(name, kind):
    """From the tokens of the rollout, which is all that other ranks and checkpoints have of an episode."""
    tokenizer = FAMILIES[name].tokenizer()
    rows = [[*ASKED], [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ho."}, *ASKED]]
    prompts = read_rows([{"prompt": row} for row in rows], "prompts", tokenizer=tokenizer).records
    player = Player(Environment(kind, timeout=60.0), Limits(2, 20), by_turn=True)
    player.begin([stop_of(FAMILIES[name], tokenizer)], None, None, tokenizer, prompts)
    opened = player.episodes(tokenizer, prompts, [3, 3]).open([0, 1])
    ids, mask = pad_left(opened, 0)
    one = torch.ones(2, 1, dtype=torch.bool)
    numbers = torch.tensor([0, 1])
    rollout = Rollout(ids, mask, one.long(), one, one, one.float(), one[:, 0], numbers, numbers, rewards=one.float())
    described = describe_responses(rollout, prompts, tokenizer)
    said = "Add.\nFrom 1 to 5." if kind is worlds.Guess else "Add."
    found = described.columns["messages"]
    assert [messages[-1]["content"].rstrip() for messages in found] == [said] * 2
    assert [messages[:-1] for messages in found] == [row[:-1] for row in rows]


def test_the_same_episodes_are_played_again():
    """Two samplings of the same seeds agree token by token, rewards and endings included."""
    model = language_model("llama")
    tokenizer = tiny_tokenizer()

    def sampled():
        player = Player(Environment(worlds.Guess, timeout=60.0), Limits(4, 60, 5), by_turn=True)
        player.begin([STOP], 100, None, tokenizer, [])
        prompts = [Prompt(f"Game {number}. ") for number in range(6)]
        sampler = Sampler(model, pad_id=0, stop_tokens=[STOP], max_new_tokens=60)
        dialogue = player.episodes(tokenizer, prompts, range(6))
        rollout = sampler.generate((), seeds=range(6), dialogue=dialogue)
        return rollout, player.metrics(rollout)

    (one, metrics), (other, _) = sampled(), sampled()
    for name in ("prompt_ids", "response_ids", "action_mask", "logprobs", "rewards", "ending", "cut_off"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    shares = [metrics[f"episode/{ending}"] for ending in ENDINGS]
    assert sum(shares) == pytest.approx(1.0)
    assert metrics["episode/turns"] > 1
    assert metrics["episode/length"] == one.token_mask.sum(-1).float().mean()


def test_turns_are_counted_where_an_environment_says_nothing_between_them():
    model = speaker()
    said = []

    class Quiet:
        def reset(self, row, seed): ...

        def step(self, text):
            said.append(text)
            return {"reward": 1}

    player = Player(Environment(Quiet, timeout=60.0), Limits(4, 60), by_turn=True)
    player.begin([SPOKEN], 100, None, PLAIN, [])
    dialogue = player.episodes(PLAIN, [Prompt("Play. ")] * 6, range(6))
    sampler = Sampler(model, pad_id=0, stop_tokens=[SPOKEN], max_new_tokens=60)
    rollout = sampler.generate((), seeds=range(6), dialogue=dialogue)
    assert torch.equal(rollout.action_mask, rollout.token_mask)
    assert player.metrics(rollout)["episode/turns"] == pytest.approx(len(said) / 6)
    assert float(rollout.rewards.sum()) == len(said) > 12


def test_a_turn_that_was_cut_off_counts():
    """Two turns, the second cut off; one that is cut off; one of a stop token alone; one with an answer too long."""
    ids = torch.tensor([[5, STOP, 7, 6], [5, 5, 5, 5], [STOP, 0, 0, 0], [5, 6, STOP, 0]])
    own = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
    endings = [ENDINGS.index(name) for name in ("max_tokens", "max_tokens", "completed", "context_overflow")]
    rollout = Rollout(
        prompt_ids=torch.ones(4, 1, dtype=torch.long),
        prompt_mask=torch.ones(4, 1, dtype=torch.bool),
        response_ids=ids,
        token_mask=ids > 0,
        action_mask=own,
        logprobs=torch.zeros(4, 4),
        stopped=torch.tensor([False, False, True, True]),
        group=torch.arange(4),
        policy_version=torch.zeros(4, dtype=torch.long),
        ending=torch.tensor(endings),
        turn_starts=torch.tensor([[1, 0, 0, 1], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]], dtype=torch.bool),
        parents=torch.arange(-1, 3).repeat(4, 1),
    )
    player = Player(Environment(worlds.Guess, timeout=60.0), Limits(4, 4), by_turn=True)
    player.begin([STOP], 100, None, tiny_tokenizer(), [])
    assert player.metrics(rollout)["episode/turns"] == (2 + 1 + 1 + 1) / 4


# Two tokens of the policy, two that it read, one of the policy, one read, one of the policy; then padding.
OWN = [1, 1, 0, 0, 1, 0, 1, 0, 0]
READ = [1, 1, 1, 1, 1, 1, 1, 0, 0]
PAID = [0.0, 1.0, 0.0, 0.0, 2.0, 0.0, 4.0, 0.0, 0.0]


def test_advantages_of_three_turns_by_hand():
    """γ = .5, λ = .5; the tokens that were read take no time and have no value.

    rewards 0 1 2 4, values 1 2 3 4:  δ = 0 + .5·2 − 1 = 0;  1 + .5·3 − 2 = .5;  2 + .5·4 − 3 = 1;  4 − 4 = 0
    A = δ + .25·A':  0, 1, .5 + .25 = .75, .1875 from the back;  returns = A + V
    """
    own = torch.tensor([OWN], dtype=torch.bool)
    values = torch.tensor([[1.0, 2.0, 9.0, 9.0, 3.0, 9.0, 4.0, 9.0, 9.0]])
    found = GeneralizedAdvantage(0.5, 0.5)(
        torch.tensor([PAID]), own, values=values, group=torch.zeros(1), baseline=None, actions=own
    )
    assert found.advantages[0].tolist() == [0.1875, 0.75, 0, 0, 1.0, 0, 0.0, 0, 0]
    assert found.returns[0].tolist() == [1.1875, 2.75, 0, 0, 4.0, 0, 4.0, 0, 0]


def episode_rollout(models, *, cut_off, width=9):
    rows = len(cut_off)
    ids = torch.randint(3, 90, (rows, width), generator=torch.Generator().manual_seed(0))
    read = torch.tensor([READ[:width]] * rows, dtype=torch.bool)
    own = torch.tensor([OWN[:width]] * rows, dtype=torch.bool)
    paid = torch.tensor([PAID[:width]] * rows)
    return Rollout(
        prompt_ids=torch.tensor([[7, 8]] * rows),
        prompt_mask=torch.ones(rows, 2, dtype=torch.bool),
        response_ids=ids.masked_fill(~read, 0),
        token_mask=read,
        action_mask=own,
        logprobs=torch.zeros(rows, width),
        stopped=torch.zeros(rows, dtype=torch.bool),
        group=torch.arange(rows),
        policy_version=torch.zeros(rows, dtype=torch.long),
        rewards=paid,
        cut_off=torch.tensor(cut_off),
        ending=torch.zeros(rows, dtype=torch.long),
    )


@pytest.mark.parametrize("score_at", ["last", "after_last"])
@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_a_cut_off_episode_goes_on_in_the_critics_eyes(critic, score_at):
    """By the definition of GAE over the policy's own tokens, with V(s_L) after the last one where it was cut off."""
    models = make_models(critic)
    if models.policy.value_head is not None:
        torch.nn.init.normal_(models.policy.value_head.weight, generator=torch.Generator().manual_seed(0))
    rollout = episode_rollout(models, cut_off=[False, True, True])
    gamma, gae_lambda = 0.9, 0.8
    experience = collected(
        rollout, torch.zeros(3), models, None, token_scores=rollout.rewards, kl_coef=0.0, gamma=gamma,
        advantage=GeneralizedAdvantage(gamma, gae_lambda), whiten_advantages=False, score_at=score_at,
    )  # fmt: skip
    with torch.no_grad():
        values = models.values(rollout, value_after_last=True)
    assert values[:, 7].abs().min() > 0.01
    # It is not paid: the metrics of rewards and of the cost of the KL have what the environment gave.
    assert experience.rewards.tolist() == rollout.rewards.tolist()
    metrics = describe_experience(replace(experience, scores=torch.zeros(3)))
    assert metrics["reward/total"] == pytest.approx(sum(PAID))
    assert metrics["reward/kl"] == pytest.approx(0.0, abs=1e-6)
    own = [slot for slot, counts in enumerate(OWN) if counts]
    for row, cut in enumerate([False, True, True]):
        slots = own if score_at == "last" else [*own, 7]
        rewards = [PAID[slot] for slot in slots]
        after = float(values[row, 7]) if cut else 0.0
        rewards[-1] += gamma * after if score_at == "last" else after
        expected = advantages_by_definition(rewards, [float(values[row, slot]) for slot in slots], gamma, gae_lambda)
        found = experience.advantages[row][rollout.action_mask[row]].tolist()
        assert found == pytest.approx(expected[: len(own)], abs=1e-5)


@pytest.mark.parametrize("score_at", ["last", "after_last"])
def test_an_episode_that_fills_its_tensor_goes_on_as_well(score_at):
    """With a slot to spare, its returns are the same, but for the score's own slot."""
    models = make_models()
    torch.nn.init.normal_(models.policy.value_head.weight, generator=torch.Generator().manual_seed(0))
    settings = {"kl_coef": 0.0, "advantage": GeneralizedAdvantage(0.9, 0.95), "whiten_advantages": False}
    narrow, wide = (
        collected(rollout, torch.zeros(1), models, None, token_scores=rollout.rewards, score_at=at, **settings).returns[
            :, :7
        ]
        for rollout, at in (
            (episode_rollout(models, cut_off=[True], width=7), score_at),
            (episode_rollout(models, cut_off=[True]), "last"),
        )
    )
    assert narrow.tolist() == [pytest.approx(wide[0].tolist(), abs=1e-5)]


def test_without_a_critic_nothing_is_added():
    models = make_models()
    rollout = episode_rollout(models, cut_off=[True])
    experience = collected(rollout, torch.zeros(1), models, None, token_scores=rollout.rewards, kl_coef=0.0,
                           advantage=RewardToGo(1.0), whiten_advantages=False)  # fmt: skip
    assert experience.returns[0].tolist() == [7, 7, 0, 0, 6, 0, 4, 0, 0]


def test_a_thousand_episodes_are_trained_on_the_tokens_that_were_sampled():
    """None drifts, although many would if their texts were encoded again."""
    tokenizer = FAMILIES["chatml"].tokenizer()
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model = LanguageModel(tiny_causal_lm("llama", len(tokenizer)), tokenizer)
    player = Player(Environment(worlds.Guess, timeout=60.0), Limits(3, 160, 8), by_turn=True)
    prompts = [
        Prompt(Rendered(""), {"messages": [{"role": "user", "content": f"Game {number}."}]}) for number in range(1000)
    ]
    player.begin([stop], 200, None, tokenizer, [])
    episodes = player.episodes(tokenizer, prompts, range(1000))
    said = defaultdict(list)

    class Listening:
        longest_turn = episodes.longest_turn
        limit = episodes.limit
        open = episodes.open
        kept = episodes.kept
        finished = episodes.finished

        def answer(self, turns):
            for row, tokens in turns.items():
                said[row].append(list(tokens))
            return episodes.answer(turns)

    sampler = Sampler(model, pad_id=0, stop_tokens=[stop], max_new_tokens=160)
    rollout = sampler.generate((), seeds=range(1000), dialogue=Listening())
    drifted = 0
    for row in range(1000):
        own = rollout.response_ids[row][rollout.action_mask[row]].tolist()
        assert own == [token for turn in said[row] for token in turn]
        again = [encode_completion(tokenizer, tokenizer.decode(turn), eos=False) for turn in said[row]]
        drifted += again != said[row]
        messages = rollout.response_ids[row][rollout.token_mask[row] & ~rollout.action_mask[row]]
        assert tokenizer.decode(messages).count("no.") == len(said[row]) - 1
    assert drifted > 20
