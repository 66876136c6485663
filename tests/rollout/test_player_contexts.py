"""What the policy reads where an environment, an agent or a chat template rewrites the conversation."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace

import pytest

from kedge.data import Prompt, Rendered
from kedge.data.tokens import encode_completion
from kedge.models import LanguageModel
from kedge.rewards.score import describe_responses
from kedge.rollout import Sampler
from kedge.rollout.episodes import Episode, Limits
from kedge.rollout.player import Player
from kedge_base.environment_turn import EnvironmentTurn as Turn
from kedge_base.errors import DataError, EnvError
from kedge_tasks.environments.client import Environment
from kedge_tasks.environments.tools import Tools
from tests.data.test_chat import FAMILIES, R1, Family
from tests.data.test_turns import stop_of
from tests.tasks.environments import worlds
from tests.tiny import tiny_causal_lm, tiny_tokenizer

CHATML = FAMILIES["chatml"]
THINKS = Family(R1, "<eos>", ("<A>", "<U>"), add_bos=True)
ROW = {"messages": [{"role": "user", "content": "Go."}]}
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"properties": {}}}}


def user(text):
    return {"role": "user", "content": text}


def answer(number, text):
    return {"role": "assistant", "content": text, "answer": number}


class Script:
    """An environment that gives the answers of a list, and keeps what it is told."""

    name = "script"
    failure = ""
    tools = None

    def __init__(self, *answers, last=Turn(ending="completed")):
        self.answers = list(answers)
        self.last = last
        self.heard = []
        self.finished = []

    def tools_of(self, schemas):
        return Tools(schemas)

    def open(self, episodes):
        return {number: self.answers.pop(0) for number in episodes}

    def step(self, said):
        self.heard += said.values()
        return {number: self.answers.pop(0) for number in said}

    def finish(self, episodes):
        found = dict.fromkeys(episodes, self.last)
        self.finished += found
        return found

    def close(self): ...


def play(environment, said, tokenizer, *, stop, prompt=None, context=None, **limits):
    """An episode in which the policy says texts or ids, written as an engine writes them; what it read by turn."""
    player = Player(environment, Limits(**{"turns": 9, "tokens": 300, **limits}), by_turn=True)
    player.begin([stop], 200, context, tokenizer, [])
    episodes = player.episodes(tokenizer, [prompt or Prompt(Rendered("Go."), ROW)], [0])
    [opening] = episodes.open([0])
    read, tokens, parents, turns = [opening], [], {}, []
    for text in said:
        ids = [*(text if isinstance(text, list) else encode_completion(tokenizer, text, eos=False)), stop]
        ids = ids[: episodes.limit(0)]
        ids = ids[: episodes.kept({0: ids}).get(0, len(ids))]
        turns.append(ids)
        tokens += ids
        reply = episodes.answer({0: ids})[0]
        if reply is None:
            break
        if reply.parent is not None:
            parents[len(tokens)] = reply.parent
        tokens += reply.tokens
        slot, path = parents.get(len(tokens), len(tokens) - 1), []
        while slot >= 0:
            path.append(tokens[slot])
            slot = parents.get(slot, slot - 1)
        read.append(opening[: len(opening) + slot + 1] + path[::-1])
    episode = episodes._played[0]
    assert [turn.num_read for turn in episode.turns] == [len(ids) for ids in read]
    return SimpleNamespace(read=read, texts=[tokenizer.decode(ids) for ids in read], said=turns, tokens=tokens,
                           parents=parents, ending=episode.ending, rewards=episode.rewards)  # fmt: skip


def chat(environment, said, **limits):
    tokenizer = CHATML.tokenizer()
    return play(environment, said, tokenizer, stop=stop_of(CHATML, tokenizer), **limits)


def written(conversation):
    messages = [{key: each[key] for key in ("role", "content")} for each in conversation]
    return CHATML.tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_a_context_of_a_class_replaces_what_was_read():
    """By hand: "Play. " is kept, and all after it is new."""
    tokenizer = tiny_tokenizer()
    played = play(Environment(worlds.Notes), ["a", "b", "c"], tokenizer, stop=2, prompt=Prompt("Play. ", {}))
    stopped = tokenizer.decode([2])
    assert played.texts == [
        "Play. Room 0.\n",
        f"Play. Room 0.\na{stopped}Room 1.\n",
        "Play. Notes: ab. Room 2.\n",
    ]
    kept = len(encode_completion(tokenizer, "Play. ", eos=False))
    assert [*played.parents.values()] == [kept - len(played.read[0]) - 1]
    assert played.ending == "completed"


def test_a_context_of_a_class_is_written_as_its_prompt_was():
    """As plain text if the row is plain text, also where the tokenizer has a chat template."""
    tokenizer = CHATML.tokenizer()
    game = Script(Turn([user("One.")]), Turn(context=[user("Two.")]), Turn([user("Three.")]), Turn(ending="completed"))
    played = play(game, ["a", "b", "c"], tokenizer, stop=stop_of(CHATML, tokenizer), prompt=Prompt("Go. ", {}))
    assert played.texts[:2] == ["Go. One.", "Two."]
    assert played.texts[2] == f"Two.{tokenizer.decode(played.said[1])}Three."
    game = Script(Turn([user("One.")]), Turn(context=[user("Two.")]), Turn(ending="completed"))
    played = chat(game, ["a", "b"])
    assert played.texts == [written([user("Go.\nOne.")]), written([user("Two.")])]


def test_a_thought_that_a_context_opens_is_part_of_the_turn():
    """Also of a context that was read before."""
    thinking = Family(
        CHATML.template.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif"),
        CHATML.closing,
        CHATML.tokens,
    )
    tokenizer = thinking.tokenizer()
    first = Turn(context=[user("1?")], tools=[ADD])
    script = Script(first, first, Turn(context=[user("1?")]), Turn(ending="completed"))
    played = play(script, ["so</think>7"] * 3, tokenizer, stop=stop_of(CHATML, tokenizer))
    assert all(text.endswith("<think>\n") for text in played.texts)
    assert [heard["text"].partition("so")[0].strip() for heard in script.heard] == ["<think>", "<think>", ""]


def test_an_agent_that_goes_on_reads_the_tokens_that_were_sampled():
    first = [user("Hi.")]
    second = [*first, answer(0, "Yes"), user("Go on.")]
    third = [*second, answer(1, "No"), user("And?")]
    script = Script(Turn(context=first), Turn(context=second), Turn(context=third), Turn(ending="completed"))
    played = chat(script, ["Yes", "No", "Done"])
    assert played.texts == [written(first), written(second), written(third)]
    assert not played.parents
    assert played.read[1][: len(played.read[0]) + len(played.said[0])] == played.read[0] + played.said[0]
    assert [heard["text"] for heard in script.heard] == ["Yes", "No", "Done"]
    assert [heard["num_tokens"] for heard in script.heard] == [len(ids) for ids in played.said]
    assert [heard["num_read"] for heard in script.heard] == [len(ids) for ids in played.read]
    assert all(heard["is_complete"] for heard in script.heard)


def test_a_sub_agent_and_the_way_back_are_branches():
    """The main conversation goes on after its own turn, and reads nothing of the other one."""
    first = [user("Plan it.")]
    other = [user("Count to two.")]
    other_on = [*other, answer(1, "one"), user("More.")]
    back = [*first, answer(0, "Ask"), user("It said two.")]
    script = Script(*(Turn(context=each) for each in (first, other, other_on, back)), Turn(ending="completed"))
    played = chat(script, ["Ask", "one", "two", "So two"])
    assert played.texts == [written(each) for each in (first, other, other_on, back)]
    assert len(played.parents) == 2
    slot = played.parents[max(played.parents)]
    assert slot == len(played.said[0]) - 1  # the end of the first turn
    # What conversations begin with in common is there once.
    assert len(played.read[0]) + len(played.tokens) < sum(map(len, played.read)) + sum(map(len, played.said))


@pytest.mark.parametrize("tagged", [True, False])
def test_a_changed_history_is_another_branch(tagged):
    """An answer without its number is read as the text says, also one whose question was changed."""
    first = [user("Hi.")]
    changed = {"role": "assistant", "content": "Yes!"} if not tagged else answer(0, "Yes")
    before = first if not tagged else [user("Hello.")]
    second = [*before, changed, user("Go on.")]
    script = Script(Turn(context=first), Turn(context=second), Turn(ending="completed"))
    played = chat(script, ["Yes", "No"])
    assert played.texts == [written(first), written(second)]
    assert len(played.parents) == 1


@pytest.mark.parametrize("again", [1, 3])
def test_what_was_sampled_is_read_up_to_the_first_change(again):
    """A change leaves the answers before it as they were, also those with the same text."""
    tokenizer = CHATML.tokenizer()
    said = [[*encode_completion(tokenizer, letter, eos=False)] for letter in "the sea"]
    said = [token for each in said for token in each]  # the text itself has fewer tokens
    assert len(said) > len(encode_completion(tokenizer, "the sea", eos=False))
    first = [user("Hi.")]
    second = [*first, answer(0, "the sea"), user("Go on.")]
    changed = {1: {"role": "assistant", "content": "the sea!"}, 3: answer(1, "the sea")}[again]
    third = [*second[:2], user("Go on." if again == 1 else "Go."), changed, user("And?")]
    script = Script(Turn(context=first), Turn(context=second), Turn(context=third), Turn(ending="completed"))
    played = chat(script, [said, said, "No"])
    assert played.texts[2] == written(third)
    assert played.read[2][: len(played.read[0]) + len(said)] == [*played.read[0], *said]
    assert played.read[2][-len(tokenizer.encode(f"the sea{'!' * (again == 1)}")) :] != said


def test_a_conversation_that_goes_on_twice_from_an_answer_is_read_once():
    """Two samples after the same answer, and one after another sample with the same text."""
    first = [user("Hi.")]
    second = [*first, answer(0, "Yes"), user("Go on.")]
    third = [*second, answer(1, "No"), user("And?")]
    contexts = [first, second, second, third, third]
    script = Script(*(Turn(context=each) for each in contexts), Turn(ending="completed"))
    played = chat(script, ["Yes", "No", "No", "So", "So"])
    assert played.texts == [*map(written, contexts)]
    told = sum(len(played.read[turn]) - len(played.read[turn - 1]) - len(played.said[turn - 1]) for turn in (1, 3))
    assert len(played.tokens) == told + sum(map(len, played.said))


def test_two_samples_of_one_context():
    first = [user("Hi.")]
    script = Script(Turn(context=first), Turn(context=first), Turn(ending="completed"))
    played = chat(script, ["Yes", "Yes"])
    assert played.read[0] == played.read[1]
    assert played.parents == {len(played.said[0]): -1}


def test_tools_of_a_request_are_described_or_shown():
    script = Script(Turn(context=[user("1?")], tools=[ADD]), Turn(ending="completed"))
    played = chat(script, ["<add>{}</add>"])
    assert "You can use tools." in played.texts[0]
    tokenizer = tiny_tokenizer()
    script = Script(Turn(context=[user("1?")], tools=[ADD]))
    with pytest.raises(DataError, match="script has tools, and a context is plain text"):
        play(script, ["a"], tokenizer, stop=2, prompt=Prompt("Play. ", {}))


def test_a_line_about_the_template_is_said_once_for_the_tools_of_all_requests():
    lines = []
    tokenizer = CHATML.tokenizer()
    others = [[{**ADD, "function": {**ADD["function"], "name": f"add_{number}"}}] for number in range(3)]
    script = Script(*(Turn(context=[user("1?")], tools=tools) for tools in others))
    player = Player(script, Limits(9, 300), by_turn=True, say=lines.append)
    player.begin([stop_of(CHATML, tokenizer)], 200, None, tokenizer, [])
    player.episodes(tokenizer, [Prompt(Rendered("Go."), ROW)] * 3, [0] * 3).open(range(3))
    assert lines == [
        "script: the chat template has no place for tools; they are described before the first question, and called as "
        "<add_0>{}</add_0>"
    ]


def test_an_end_token_that_looks_like_a_closing_tag_is_no_part_of_a_turn_with_tools():
    """`</s>`, as Mistral's and Llama 2's."""
    tokenizer = CHATML.tokenizer()
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    script = Script(Turn(context=[user("1?")], tools=[ADD]), Turn(ending="completed"))
    play(script, ["Nine."], tokenizer, stop=tokenizer.eos_token_id)
    assert [heard["text"] for heard in script.heard] == ["Nine."]


def test_tools_that_a_later_request_changes_are_shown_instead():
    """Agents offer other tools as they go, and none where they want an answer; the conversation stays the same."""
    shows = Family("{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}" + CHATML.template,
                   CHATML.closing, CHATML.tokens)  # fmt: skip
    tokenizer = shows.tokenizer()
    other = {**ADD, "function": {**ADD["function"], "name": "sub"}}
    script = Script(*(
        Turn(context=conversation(number), tools=tools)
        for number, tools in enumerate(([ADD], [ADD], [other], None))
    ), Turn(ending="completed"))  # fmt: skip
    played = play(script, ["No"] * 4, tokenizer, stop=stop_of(CHATML, tokenizer))
    shown = [text.partition("<|im_start|>") for text in played.texts]
    assert [before for before, *_ in shown] == ["[add]", "[add]", "[sub]", ""]
    assert [f"{start}{rest}" for _, start, rest in shown] == [written(conversation(number)) for number in range(4)]
    assert len(played.parents) == 2, "the second continues the first"


def conversation(number):
    """A conversation after so many answers of the policy."""
    turns = ([answer(each, "No"), user("More.")] for each in range(number))
    return [user("Hi."), *(message for turn in turns for message in turn)]


def test_limits_and_stops_of_a_request():
    """The turn ends with the token that completes the stop string, which the agent does not see."""
    first = Turn(context=[user("Hi.")], stop=["l"])
    second = Turn(context=[user("Hi.")], max_tokens=2)
    script = Script(first, second, Turn(ending="completed"))
    played = chat(script, ["Hello", "Hello"])
    tokenizer = CHATML.tokenizer()
    assert tokenizer.decode(played.said[0]) == "Hel"
    assert len(played.said[1]) == 2
    assert [heard["text"] for heard in script.heard] == ["He", tokenizer.decode(played.said[1])]
    assert [heard["is_complete"] for heard in script.heard] == [True, False]


def test_the_place_of_a_stop_string_is_searched_for_by_halves(monkeypatch):
    """Else a turn of a thousand tokens would be decoded a thousand times."""
    tokenizer = CHATML.tokenizer()
    player = Player(Script(Turn(context=[user("Hi.")], stop=["l", "L"])), Limits(turns=9, tokens=300), by_turn=True)
    player.begin([stop_of(CHATML, tokenizer)], 200, None, tokenizer, [])
    episodes = player.episodes(tokenizer, [Prompt(Rendered("Go."), ROW)], [0])
    episodes.open([0])
    ids = encode_completion(tokenizer, "aé " * 100 + "l" + "b L" * 50, eos=False)
    decode, decoded = tokenizer.decode, []
    monkeypatch.setattr(tokenizer, "decode", lambda ids: decoded.append(len(ids)) or decode(ids))
    count = episodes.kept({0: ids})[0]
    assert "l" in decode(ids[:count])
    assert "l" not in decode(ids[: count - 1])
    assert len(decoded) < 12 < len(ids)


def test_a_context_that_does_not_fit_ends_the_episode():
    script = Script(Turn(context=[user("Hi.")]), Turn(context=[user("Hi. " * 40)]))
    played = chat(script, ["Yes", "No"], context=60)
    assert played.ending == "context_overflow"
    script = Script(Turn(context=[user("Hi.")]), Turn(context=[user("Hi.")]), Turn(ending="completed"))
    played = chat(script, ["Yes", "No" * 50], context=40)
    assert len(played.read[1]) + len(played.said[1]) == 40


def test_a_context_that_the_template_rejects_is_a_failure():
    strict = Family("{% if messages | length == 2 %}{{ raise_exception('two') }}{% endif %}" + CHATML.template,
                    CHATML.closing, CHATML.tokens)  # fmt: skip
    tokenizer = strict.tokenizer()
    script = Script(Turn(context=[user("Hi.")]), Turn(context=[user("Hi."), user("Hi.")]))
    played = play(script, ["Yes"], tokenizer, stop=stop_of(CHATML, tokenizer))
    assert played.ending == "failed"
    assert "cannot be written as a message: the chat template rejects the conversation" in script.failure


@pytest.mark.parametrize("prompt", [Prompt("Play. ", {}), Prompt(Rendered("Go."), ROW)])
def test_an_empty_context_is_a_failure(prompt):
    """The policy's next token would depend on nothing, or on what was to be forgotten."""
    tokenizer = CHATML.tokenizer()
    script = Script(Turn([]), Turn(context=[]))
    played = play(script, ["Yes"], tokenizer, stop=stop_of(CHATML, tokenizer), prompt=prompt)
    assert played.ending == "failed"
    assert script.failure == "an answer of script cannot be written as a message: the new context is empty"


def test_tools_of_a_first_request_that_the_template_rejects_are_a_failure_of_the_episode():
    shows = Family("{% for tool in tools or [] %}{{ tool.function.parameters.required }}{% endfor %}" + CHATML.template,
                   CHATML.closing, CHATML.tokens)  # fmt: skip
    tokenizer = shows.tokenizer()
    script = Script(Turn(context=[user("1?")], tools=[{"type": "function", "function": {"name": "add"}}]))
    played = play(script, ["Yes"], tokenizer, stop=stop_of(CHATML, tokenizer))
    assert played.ending == "failed"
    assert script.failure.startswith("script cannot open an episode: the chat template rejects the conversation: ")


@pytest.mark.parametrize(
    ("first", "line"),
    [
        ([user("Hi."), user("Hi.")], "script cannot open an episode: the chat template rejects the conversation"),
        ([user("Hi. " * 200)], r"an episode of script opens with \d+ tokens"),
    ],
)
def test_a_first_request_that_cannot_be_read_is_a_failure_of_the_episode(first, line):
    """The environment ends it, and the policy's turn is not sent. A class whose opening is too long ends the run."""
    strict = Family("{% if messages | length == 2 %}{{ raise_exception('two') }}{% endif %}" + CHATML.template,
                    CHATML.closing, CHATML.tokens)  # fmt: skip
    tokenizer = strict.tokenizer()
    script = Script(Turn(context=first))
    played = play(script, ["Yes"], tokenizer, stop=stop_of(CHATML, tokenizer))
    assert (played.ending, script.heard, len(script.finished)) == ("failed", [], 1)
    assert re.match(line, script.failure)
    with pytest.raises(EnvError, match=line):
        play(Script(Turn(context=first)), ["Yes"], tokenizer, stop=stop_of(CHATML, tokenizer), on_error="stop")
    with pytest.raises(DataError, match="an episode of script opens with"):
        play(Script(Turn(first * 200)), ["Yes"], tokenizer, stop=stop_of(CHATML, tokenizer))


def test_where_the_template_drops_thoughts_every_turn_reads_the_conversation_as_it_is_written():
    tokenizer = THINKS.tokenizer()
    says = ["<think>\nfour\n</think>\n\nFour.", "<think>\nfive\n</think>\n\nFive.", "No."]
    game = Script(Turn([user("Begin.")]), Turn([user("More.")]), Turn([user("More!")]), Turn(ending="completed"))
    played = play(game, says, tokenizer, stop=2)
    conversation = [user("Go.\nBegin.")]
    for text, reply, read in zip(says, ("More.", "More!", ""), played.texts, strict=True):
        assert read == tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        assert "four" not in read
        conversation += [{"role": "assistant", "content": text}, user(reply)]
    assert played.ending == "completed"
    assert len(played.parents) == 2


def test_a_reward_function_reads_each_new_context_as_a_whole():
    """Also one of which every token was read before."""
    tokenizer = CHATML.tokenizer()
    model = LanguageModel(tiny_causal_lm("llama", len(tokenizer)), tokenizer)
    first, other = [user("Hi.")], [user("Ho.")]
    contexts = [Turn(context=each) for each in (first, first, other)]
    player = Player(Script(*contexts, Turn(ending="completed")), Limits(9, 90, 4), by_turn=True)
    player.begin([5], 200, None, tokenizer, [])
    prompts = [Prompt(Rendered("Go."), ROW)]
    sampler = Sampler(model, pad_id=0, stop_tokens=[5], max_new_tokens=90)
    rollout = sampler.generate((), seeds=[1], dialogue=player.episodes(tokenizer, prompts, [0]))
    [turns] = describe_responses(rollout, prompts, tokenizer).episodes
    assert [turn["role"] for turn in turns] == ["assistant", "environment"] * 2 + ["assistant"]
    assert [turn["content"] for turn in turns[1::2]] == [written(first), written(other)]


def test_an_agent_that_has_ended_may_pay_each_of_its_calls():
    script = Script(Turn(context=[user("Hi.")]), Turn(context=[user("Ho.")]), Turn(ending="completed", rewards=[2, 3]))
    played = chat(script, ["Yes", "No"])
    first = len(played.said[0]) - 1
    assert played.rewards == {first: 2.0, len(played.tokens) - 1: 3.0}


def test_an_agent_whose_episode_was_ended_may_pay_each_of_its_calls():
    last = Turn(ending="completed", rewards=[2, 3])
    script = Script(Turn(context=[user("Hi.")]), *[Turn(context=[user("Ho.")])] * 2, last=last)
    played = chat(script, ["Yes", "No"], turns=2)
    assert played.ending == "max_turns"
    assert played.rewards == {len(played.said[0]) - 1: 2.0, len(played.tokens) - 1: 3.0}


def test_contexts_are_found_among_those_read_before_as_a_search_through_all_tokens_finds_them():
    """Random contexts of three tokens with many repetitions, beside a slow loop."""
    generator = random.Random(0)
    state = Episode(0)
    state.opens([1, 2, 1])
    for _ in range(60):
        ids = [1, 2, 1, *generator.choices([1, 2, 3], k=generator.randint(1, 8))]
        count, slot = state.known(ids)
        paths = {s: [*path_of(state, s)] for s in range(-3, state.length)}
        fits = [s for s, path in paths.items() if path == ids[: len(path)]]
        longest = max(len(paths[s]) for s in fits)
        assert (count, slot) == (longest, max(s for s in fits if len(paths[s]) == longest))
        state.add(ids[count:], None if slot == state.length - 1 else slot)
        state.add([generator.choice([1, 2, 3])])


def path_of(state, slot):
    """The tokens up to a slot."""
    tokens = []
    while slot >= -len(state.prompt):
        tokens.append(state.tokens[slot] if slot >= 0 else state.prompt[slot])
        slot = state.parents.get(slot, slot - 1)
    return reversed(tokens)
