"""Turns added to sampled tokens, against the whole conversation as the chat template writes it."""

from __future__ import annotations

import re

import pytest

from kedge.data import Prompt
from kedge.data.chat import apply_template
from kedge.data.tokens import encode_completion
from kedge.data.turns import PlainTurns, TemplateTurns
from kedge_base.errors import DataError
from kedge_tasks.environments.tools import Tools
from tests.data.test_chat import CHATML, FAMILIES, R1, TURN, Family
from tests.tiny import tiny_tokenizer

QUESTION = {"role": "user", "content": "Say a number."}
REPLIES = [{"role": "user", "content": "Higher."}, {"role": "user", "content": "Lower, and by more than one."}]
ANSWERS = ["It is 4", "Then 9"]
REFUSED = {"deepseek"}
GOES_ON = {name: family for name, family in FAMILIES.items() if name not in REFUSED}
ADD = {"name": "add", "description": "Add 1.", "parameters": {"properties": {"a": {"type": "number"}}}}
TOOLS = Tools([{"type": "function", "function": ADD}])
CALLS = {  # by how the template writes what is in `c`, the function of a call
    "hermes": "<tool_call>\n{{ c | tojson }}\n</tool_call>",
    "arguments as text": """<tool_call>{"name": "{{ c.name }}", "arguments": {{ '' + c.arguments }}}</tool_call>""",
    "mistral": """[TOOL_CALLS][{{ {'id': m.tool_calls[0].id, 'name': c.name, 'arguments': c.arguments} | tojson }}]""",
    "llama": """{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}""",
    "tags": "<{{ c.name }}>{{ c.arguments | tojson }}</{{ c.name }}>",
    "function": "<tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    "keys and values": "<tool_call>{{ c.name }}\n{% for k, v in c.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>",
    # These write no calls, which the policy then writes as it was taught to.
    "left out": "",
    "refused": "{{ raise_exception('no calls') }}",
}
UNREAD = {
    "like Python": "<|call|>[{{ c.name }}(a={{ c.arguments.a }})]<|/call|>",
    "like XML": "<tool_call>\n<function={{ c.name }}>\n<a>{{ c.arguments.a }}</a>\n</function>\n</tool_call>",
    "another tool": """<tool_call>{"name": "sub", "arguments": {{ c.arguments | tojson }}}</tool_call>""",
    "half of it": """<tool_call>{"name": "{{ c.name }}"}</tool_call>""",
}


def calling(form: str) -> Family:
    """ChatML with a place for tools, which writes calls in a form."""
    shown = "{% if tools %}[{{ tools | length }} tools]{% endif %}"
    call = "{% set c = m.tool_calls[0].function if m.tool_calls else none %}{% if c %}" + form + "{% endif %}"
    body = "{{ '<|im_start|>' + m.role + '\n' + m.content }}" + call + "{{ '<|im_end|>\n' }}{% endfor %}"
    header = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    return Family(shown + TURN + body + header, "<|im_end|>", FAMILIES["chatml"].tokens)


def stop_of(family: Family, tokenizer) -> int:
    """The token that closes an answer, as `named_stop_tokens` finds it."""
    known = tokenizer.convert_tokens_to_ids(family.closing) if family.closing in family.tokens else None
    return tokenizer.eos_token_id if known is None else known


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("name", GOES_ON)
def test_a_conversation_is_what_the_template_writes(name, closed):
    """Also where the policy's turn was cut off before it closed it: the other side then does."""
    family = GOES_ON[name]
    tokenizer = family.tokenizer()
    stop = stop_of(family, tokenizer)
    turns = TemplateTurns(tokenizer, [stop])
    ids = turns.context(turns.opening(Prompt("ignored", {"messages": [QUESTION]}), []))
    messages = [QUESTION]
    marks = family.closing in (*family.tokens, "<eos>")
    for answer, reply in zip(ANSWERS, REPLIES, strict=True):
        space = " " if name == "mistral" else ""
        said = encode_completion(tokenizer, space + answer, eos=False)
        said += [stop] if closed and marks else []
        ids = [*ids, *said, *turns.after(said, [reply])]
        messages += [{"role": "assistant", "content": answer}, reply]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    text = tokenizer.decode(ids)
    if closed and name == "mistral":  # it writes a space before the token that the policy has written without one
        whole = whole.replace(" <eos>", "<eos>")
    assert text == whole


def test_what_was_sampled_stays_as_it_was_sampled():
    """Token ids that no tokenizer would choose for their text are not encoded again."""
    family = FAMILIES["chatml"]
    tokenizer = family.tokenizer()
    stop = stop_of(family, tokenizer)
    turns = TemplateTurns(tokenizer, [stop])
    merged = max(tokenizer.get_vocab(), key=lambda token: len(token) if token.isalpha() and token.isascii() else 0)
    odd = [tokenizer.convert_tokens_to_ids(letter) for letter in merged]
    assert len(odd) > 1 == len(encode_completion(tokenizer, merged, eos=False))
    after = turns.after([*odd, stop], REPLIES[:1])
    assert after == turns.after([*encode_completion(tokenizer, "4", eos=False), stop], REPLIES[:1])
    assert tokenizer.decode(after) == "\n<|im_start|>user\nHigher.<|im_end|>\n<|im_start|>assistant\n"


def test_an_answer_that_was_given_before_is_not_rendered_again(monkeypatch):
    """Rendering asks another process: in a game with two answers it took four fifths of the sampling."""
    family = FAMILIES["chatml"]
    tokenizer = family.tokenizer()
    rendered = []

    def counted(tokenizer, messages, **settings):
        rendered.append(messages[-1])
        return apply_template(tokenizer, messages, **settings)

    monkeypatch.setattr("kedge.data.turns.apply_template", counted)
    turns = TemplateTurns(tokenizer, [stop_of(family, tokenizer)])
    first = [turns.after([5], [reply]) for reply in REPLIES]
    assert first[0] != first[1]
    rendered.clear()
    assert [turns.after([7, 8], [dict(reply)]) for reply in REPLIES] == first
    assert not rendered
    turns.after([5], [{"role": "user", "content": "Yes."}])
    assert [message["content"] for message in rendered] == ["Yes."]


def test_a_template_that_drops_thoughts_says_so_and_writes_whole_conversations():
    family = Family(R1, "<eos>", ("<A>", "<U>"), add_bos=True)
    tokenizer = family.tokenizer()
    turns = TemplateTurns(tokenizer, [2])
    assert turns.rewrites
    assert "writes an earlier answer differently once the conversation continues" in turns.rewriting
    assert "think" in turns.rewriting
    conversation = [QUESTION, {"role": "assistant", "content": "<think>\nfour\n</think>\n\nIt is 4"}, REPLIES[0]]
    text = tokenizer.decode(turns.context(conversation))
    assert text == tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert "It is 4" in text
    assert "four" not in text


@pytest.mark.parametrize(
    "mark",
    ["{{ loop.index }}. ", "{% if loop.last %}(of {{ messages | length }}) {% endif %}"],
    ids=["number", "count"],
)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_template_that_numbers_its_turns_rewrites_them(mark, tools):
    """By hand: the user's second message is the third one of the conversation, and the fifth would be written alike."""
    body = "{{ '<|im_start|>' + m.role + '\n' }}" + mark + "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    header = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    family = Family(TURN + body + header, "<|im_end|>", FAMILIES["chatml"].tokens)
    rewriting = TemplateTurns(family.tokenizer(), [2], tools=tools).rewriting
    assert re.search(r"writes (a third turn|an earlier answer) differently", rewriting)
    header = "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' ~ (messages | length) ~ '\n' }}{% endif %}"
    numbered = Family(CHATML.partition("{% if add")[0] + header, "<|im_end|>", FAMILIES["chatml"].tokens)
    assert "differently" in TemplateTurns(numbered.tokenizer(), [2], tools=tools).rewriting


def test_a_template_that_cannot_continue_is_refused():
    once = TURN + "{% if not loop.first %}{{ raise_exception('one turn') }}{% endif %}{% endfor %}"
    family = Family(once + CHATML, "<|im_end|>", FAMILIES["chatml"].tokens)
    with pytest.raises(DataError, match=r"^a conversation cannot continue after the policy's turn: .*one turn"):
        TemplateTurns(family.tokenizer(), [2])


def test_a_template_that_writes_the_date_writes_that_of_the_run(monkeypatch):
    """Over midnight, an episode still continues what was written before."""
    monkeypatch.setattr("kedge.data.chat._day", "2026-02-03")
    dated = CHATML.replace("m.role + '\n'", "m.role + strftime_now(' %d %b') + '\n'")
    dated = dated.replace("assistant\n'", "assistant' + strftime_now(' %d %b') + '\n'")
    tokenizer = Family(dated, "<|im_end|>", FAMILIES["chatml"].tokens).tokenizer()
    text = tokenizer.decode(TemplateTurns(tokenizer, [2]).after([5], REPLIES[:1]))
    assert text == "<|im_end|>\n<|im_start|>user 03 Feb\nHigher.<|im_end|>\n<|im_start|>assistant 03 Feb\n"


def test_the_messages_of_a_game_keep_their_role():
    """And those of tools are the user's only where the template does not write them."""
    result = [{"role": "tool", "content": "7"}]
    chatml = FAMILIES["chatml"].tokenizer()
    stop = stop_of(FAMILIES["chatml"], chatml)
    turns = TemplateTurns(chatml, [stop])
    text = chatml.decode(turns.after([5, stop], result))
    assert text == "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    strict = TURN + "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    without = Family(strict + FAMILIES["chatml"].template, "<|im_end|>", FAMILIES["chatml"].tokens).tokenizer()
    turns = TemplateTurns(without, [stop])
    text = without.decode(turns.after([5, stop], result))
    assert text == "\n<|im_start|>user\n<result>7</result><|im_end|>\n<|im_start|>assistant\n"
    opened = without.decode(turns.context(turns.opening(Prompt("ignored", {"messages": [QUESTION]}), result)))
    assert "<|im_start|>user\nSay a number.\n<result>7</result><|im_end|>" in opened


def test_without_a_template_there_is_one_line():
    with pytest.raises(DataError, match=r"no chat template: name one with data.chat_template"):
        TemplateTurns(tiny_tokenizer(), [2])


@pytest.mark.parametrize("name", GOES_ON)
def test_what_opens_an_episode_is_one_message_with_the_question_before_it(name):
    tokenizer = GOES_ON[name].tokenizer()
    turns = TemplateTurns(tokenizer, [stop_of(GOES_ON[name], tokenizer)])
    opened = turns.context(
        turns.opening(Prompt("", {"messages": [QUESTION]}), [{"role": "user", "content": "From 1 to 5."}])
    )
    whole = [{"role": "user", "content": "Say a number.\nFrom 1 to 5."}]
    assert tokenizer.decode(opened) == tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    system = [{"role": "system", "content": "Be brief."}]
    if name != "mistral":  # which writes every message but the user's as an answer
        opened = turns.context(turns.opening(Prompt("", {"messages": system}), [QUESTION]))
        whole = [*system, QUESTION]
        text = tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(opened) == text


def opened_with_tools(family: Family) -> tuple[str, TemplateTurns]:
    tokenizer = family.tokenizer()
    turns = TemplateTurns(tokenizer, [stop_of(family, tokenizer)], tools=TOOLS)
    return tokenizer.decode(turns.context(turns.opening(Prompt("", {"messages": [QUESTION]}), []))), turns


DESCRIBED = f"<|im_start|>user\n{TOOLS.description}\n\nSay a number.<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("form", CALLS.values(), ids=CALLS)
def test_tools_come_with_a_template_that_has_a_place_for_them(form):
    opened, turns = opened_with_tools(calling(form))
    assert opened == "[1 tools]<|im_start|>user\nSay a number.<|im_end|>\n<|im_start|>assistant\n"
    assert not turns.incompatibility


def test_tools_are_described_to_a_template_without_a_place_for_them():
    opened, turns = opened_with_tools(FAMILIES["chatml"])
    assert opened == DESCRIBED
    assert turns.incompatibility == "has no place for tools"


@pytest.mark.parametrize("form", UNREAD.values(), ids=UNREAD)
def test_tools_are_described_where_the_calls_of_the_template_are_not_read(form):
    """Their calls would not be seen, or all fail, and each episode would end as if the policy had called nothing."""
    opened, turns = opened_with_tools(calling(form))
    assert opened == DESCRIBED
    assert turns.incompatibility == "shows tools, but writes no call that kedge reads"
    tokenizer = calling(form).tokenizer()
    result = turns.after([5, stop_of(calling(form), tokenizer)], [{"role": "tool", "name": "add", "content": "7"}])
    assert tokenizer.decode(result) == "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"


def test_tools_that_the_template_moves_to_the_last_question_are_described():
    """As Mistral's does, which also refuses the result of a tool without the id of its call."""
    shown = "{% if tools and m == (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}[tools]{% endif %}"
    result = "{% if m.role == 'tool' %}{{ raise_exception('no id') }}{% endif %}"
    family = Family(CHATML.replace(TURN, TURN + shown + result), "<|im_end|>", FAMILIES["chatml"].tokens)
    opened, turns = opened_with_tools(family)
    assert opened == DESCRIBED
    assert turns.incompatibility == "shows tools, but elsewhere once the conversation continues"
    after = turns.after([5, stop_of(family, family.tokenizer())], [{"role": "tool", "name": "add", "content": "7"}])
    assert (
        family.tokenizer().decode(after) == "\n<|im_start|>user\n<result>7</result><|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_are_shown_by_a_template_that_opens_a_thought_for_the_next_answer_only():
    """As Nemotron's does: what precedes the first answer changes later, but not where the tools are."""
    plain = calling(CALLS["function"])
    family = Family(plain.template.replace("assistant\n' }}", "assistant\n<think>\n' }}"), plain.closing, plain.tokens)
    opened, turns = opened_with_tools(family)
    assert opened == "[1 tools]<|im_start|>user\nSay a number.<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert (turns.incompatibility, turns.rewrites) == ("", True)


def test_the_result_of_a_tool_has_its_role_or_is_told_by_the_user():
    result = [{"role": "tool", "name": "add", "content": "7"}]
    with_role = FAMILIES["chatml"].tokenizer()
    stop = stop_of(FAMILIES["chatml"], with_role)
    said = [5, stop]
    text = with_role.decode(TemplateTurns(with_role, [stop], tools=TOOLS).after(said, result))
    assert text == "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    strict = TURN + "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + "{% endfor %}"
    without = Family(strict + FAMILIES["chatml"].template, "<|im_end|>", FAMILIES["chatml"].tokens).tokenizer()
    text = without.decode(TemplateTurns(without, [stop], tools=TOOLS).after(said, result))
    assert text == "\n<|im_start|>user\n<result>7</result><|im_end|>\n<|im_start|>assistant\n"
    more = [*result, {"role": "tool", "name": "add", "content": "8"}]
    text = without.decode(TemplateTurns(without, [stop], tools=TOOLS).after(said, more))
    told = "<result>7</result>\n<result>8</result>"
    assert text == f"\n<|im_start|>user\n{told}<|im_end|>\n<|im_start|>assistant\n", "in one turn: roles alternate"


def test_plain_texts_follow_each_other():
    tokenizer = tiny_tokenizer(add_bos=True)
    turns = PlainTurns(tokenizer)
    opened = turns.context(turns.opening(Prompt("A game.\n"), [QUESTION]))
    assert tokenizer.decode(opened) == "<bos>A game.\nSay a number."
    assert tokenizer.decode(turns.after([5, 2], REPLIES)) == "Higher.Lower, and by more than one."
    assert turns.after([5, 2], []) == []
