"""Conversations as chat templates write them, with transformers' `apply_chat_template` as the oracle."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from kedge.data import (
    EncodedExample,
    Prompt,
    encode_example,
    encode_prompt,
    read_rows,
)
from kedge.data.chat import apply_to_parts, closing_of, end_of_turn
from kedge.data.fields import Role
from kedge.models import LanguageModel
from kedge.training.supervised.losses import CompletionLoss
from kedge_base.errors import DataError
from tests.tiny import CHAT_TEMPLATE, tiny_causal_lm, tiny_tokenizer

PAD, EOS = 0, 2
SYSTEM = {"role": "system", "content": "Be brief."}
FIRST = {"role": "user", "content": "Where is the boat?"}
ANSWER = {"role": "assistant", "content": "At sea."}
SECOND = {"role": "user", "content": "Why?"}
LAST = {"role": "assistant", "content": "The tide went out."}
TURNS = [FIRST, ANSWER, SECOND, LAST]

TURN = "{% for m in messages %}"
END = "{% endfor %}"
OPEN = "{% if add_generation_prompt %}"


@dataclass(frozen=True)
class Family:
    """A family of templates: what it writes, its special tokens, and what closes an answer."""

    template: str
    closing: str
    tokens: tuple[str, ...] = ()
    add_bos: bool = False

    def tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = tiny_tokenizer(add_bos=self.add_bos, chat_template=self.template)
        tokenizer.add_special_tokens({"additional_special_tokens": list(self.tokens)})
        return tokenizer


CHATML = TURN + "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}" + END
CHATML += OPEN + "{{ '<|im_start|>assistant\n' }}{% endif %}"
HEADS = "{% set head = '<|head|>' %}{{ bos_token }}" + TURN + "{{ head + m.role + '<|/head|>\n\n' + m.content | trim }}"
HEADS += "<|eot|>" + END
HEADER = "{{ '<|head|>assistant<|/head|>\n\n' }}"
GEMMA = "{{ bos_token }}" + TURN + "{{ '<start>' + m.role | replace('assistant', 'model') + '\n' + m.content | trim }}"
GEMMA += "{{ '<end>\n' }}" + END + OPEN + "{{ '<start>model\n' }}{% endif %}"
INST = "{{ bos_token }}" + TURN + "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}"
INST += "{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}" + END
ZEPHYR = TURN + "{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}" + END
ZEPHYR += OPEN + "{{ '<|assistant|>\n' }}{% endif %}"
SHORTENED = "{{ bos_token }}" + TURN + "{% if m.role == 'assistant' %}{{ '<A>' + m.content.split('</think>')[-1] }}"
SHORTENED += "{{ eos_token }}{% else %}{{ '<U>' + m.content }}{% endif %}" + END
R1 = SHORTENED + OPEN + "{{ '<A>' }}{% endif %}"
VICUNA = TURN + "{{ m.role | upper + ': ' + m.content }}{{ eos_token if m.role == 'assistant' else ' ' }}" + END
VICUNA += OPEN + "ASSISTANT: {% endif %}"
PHI = TURN + "{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}" + END
PHI += OPEN + "{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"

IM = ("<|im_start|>", "<|im_end|>")
HEAD = ("<|head|>", "<|/head|>", "<|eot|>")
FAMILIES = {
    "chatml": Family(CHATML, "<|im_end|>", IM),
    "chatml with bos": Family(CHATML, "<|im_end|>", IM, add_bos=True),
    "chatml without its tokens": Family(CHATML, "<|im_end|>"),
    "always a header": Family(HEADS + HEADER, "<|eot|>", HEAD, add_bos=True),
    "heads": Family(HEADS + OPEN + HEADER + "{% endif %}", "<|eot|>", HEAD, add_bos=True),
    "gemma": Family(GEMMA, "<end>", ("<start>", "<end>"), add_bos=True),
    "mistral": Family(INST, "<eos>", ("[INST]", "[/INST]"), add_bos=True),
    "zephyr": Family(ZEPHYR, "<eos>", add_bos=True),
    "deepseek": Family(R1, "<eos>", ("<A>", "<U>"), add_bos=True),
    "vicuna": Family(VICUNA, "<eos>", add_bos=True),
    "phi": Family(PHI, "<|end|>", ("<|end|>",)),
    "always a header of plain text": Family(
        CHATML + "{{ '<|im_start|>assistant\n' if not add_generation_prompt }}", "<|im_end|>"
    ),
}
GLM = "<sop>" + TURN + "{{ '<|' + m.role + '|>\n' + m.content }}" + END
FAMILIES["glm"] = Family(GLM + OPEN + "{{ '<|assistant|>\n' }}{% endif %}", "", ("<|assistant|>", "<|user|>", "<sop>"))
FAMILIES["always a header and no end"] = Family(GLM + "{{ '<|assistant|>\n' }}", "", ("<|assistant|>", "<|user|>"))
CHANNELS = "<|start|>system<|message|>Be kind.<|end|>" + TURN + "<|start|>{{ m.role }}"
CHANNELS += "{{ '<|channel|>final' if m.role == 'assistant' }}<|message|>{{ m.content }}"
CHANNELS += "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}" + END + OPEN
CHANNELS += "{{ '<|start|>assistant' }}{% endif %}"
CHANNEL_TOKENS = ("<|start|>", "<|message|>", "<|end|>", "<|channel|>", "<|return|>")
families = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def encoded(tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], **options: Any) -> EncodedExample:
    [record] = read_rows([row], "demonstrations", tokenizer=tokenizer, **options).records
    return encode_example(tokenizer, record.prompt, record.completion, read=record.read)


def learned_texts(tokenizer: PreTrainedTokenizerFast, example: EncodedExample) -> list[str]:
    """The text of each run of learned tokens."""
    ids, runs, before = [*example.prompt, *example.completion], [], -2
    for place in example.learned():
        runs = [*runs, []] if place != before + 1 else runs
        runs[-1].append(ids[place])
        before = place
    return [tokenizer.decode(run) for run in runs]


def reason(tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], role: Role = "demonstrations", **options) -> str:
    rows = [row, {"prompt": "a", "completion": "b", "chosen": "c", "rejected": "d"}]
    table = read_rows(rows, role, tokenizer=tokenizer, max_rejected_fraction=1, **options)
    [rejection] = table.rejected
    return rejection.reason


@families
def test_every_answer_is_learned_with_what_closes_it_and_nothing_else(family: Family) -> None:
    tokenizer = family.tokenizer()
    example = encoded(tokenizer, {"messages": TURNS})
    ids = [*example.prompt, *example.completion]
    oracle = tokenizer.apply_chat_template(TURNS, tokenize=True, return_dict=False)
    assert ids[-1] == EOS
    shared = len(ids) if ids == oracle[: len(ids)] else len(ids) - 1
    assert ids[:shared] == oracle[:shared]
    space = " " if "[INST]" in family.tokens else ""
    ends = [f"{space}{turn['content']}{space}{family.closing}" for turn in (ANSWER, LAST)]
    ends[-1] = ends[-1].removesuffix("<eos>") + "<eos>"
    assert learned_texts(tokenizer, example) == ends
    assert closing_of(tokenizer) == family.closing
    alone = encoded(tokenizer, {"messages": TURNS}, train_on="last")
    assert learned_texts(tokenizer, alone) == ends[-1:]
    assert [*alone.prompt, *alone.completion] == ids
    both = {"prompt": [FIRST], "completion": [ANSWER, SECOND, LAST]}
    assert encoded(tokenizer, both) == example
    single = encoded(tokenizer, {"prompt": [FIRST], "completion": [ANSWER]})
    assert learned_texts(tokenizer, single)[0].startswith(ends[0])


def test_an_answer_after_another_one_is_a_message_of_its_own() -> None:
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    row = {"messages": [FIRST, ANSWER, LAST]}
    each = encoded(tokenizer, row)
    alone = encoded(tokenizer, row, train_on="last")
    assert [*alone.prompt, *alone.completion] == [*each.prompt, *each.completion]
    assert learned_texts(tokenizer, each) == ["At sea.<eos>", "The tide went out.<eos>"]
    assert learned_texts(tokenizer, alone) == ["The tide went out.<eos>"]
    begun = {"prompt": [FIRST, {"role": "assistant", "content": "At "}], "completion": [ANSWER, SECOND, LAST]}
    assert reason(tokenizer, begun).startswith("field 'prompt' ends with an assistant message, and 'completion'")
    assert learned_texts(tokenizer, encoded(tokenizer, {**begun, "completion": [ANSWER]})) == ["At sea.<eos>"]


@families
def test_a_prompt_has_the_ids_of_the_template(family: Family) -> None:
    tokenizer = family.tokenizer()
    [prompt] = read_rows([{"messages": [FIRST, ANSWER, SECOND]}], "prompts", tokenizer=tokenizer).records
    oracle = tokenizer.apply_chat_template(TURNS[:3], tokenize=True, return_dict=False, add_generation_prompt=True)
    assert encode_prompt(tokenizer, prompt.text) == oracle


@families
def test_the_answers_of_a_comparison_end_where_their_turn_ends(family: Family) -> None:
    tokenizer = family.tokenizer()
    rows = [{"chosen": TURNS, "rejected": [*TURNS[:3], ANSWER]}]
    rows += [{"prompt": TURNS[:3], "chosen": [LAST], "rejected": "No."}]
    space = " " if "[INST]" in family.tokens else ""
    for record in read_rows(rows, "comparisons", tokenizer=tokenizer).records:
        closing = f"{space}{family.closing}".removesuffix("<eos>")
        assert record.chosen == f"{space}{LAST['content']}{closing}"
        assert encode_prompt(tokenizer, record.prompt) == tokenizer.apply_chat_template(
            TURNS[:3], tokenize=True, return_dict=False, add_generation_prompt=True
        )


def test_a_prompt_is_rendered_once_for_all_answers() -> None:
    tokenizer = FAMILIES["chatml"].tokenizer()
    closing_of(tokenizer)  # is found once
    row = {"prompt": [FIRST], "chosen": [ANSWER], "rejected": [LAST]}
    for role, count in (("comparisons", 3), ("demonstrations", 2), ("prompts", 1)):
        with mock.patch("kedge.data.chat.apply_to_parts", wraps=apply_to_parts) as render:
            read_rows([row], role, tokenizer=tokenizer)
        assert render.call_count == count


def test_a_conversation_is_one_request_for_all_its_answers() -> None:
    tokenizer = FAMILIES["chatml"].tokenizer()
    closing_of(tokenizer)
    with mock.patch("kedge.data.chat.apply_to_parts", wraps=apply_to_parts) as render:
        read_rows([{"messages": TURNS}], "demonstrations", tokenizer=tokenizer)
    assert [[count for count, _ in call.args[2]] for call in render.call_args_list] == [[4, 1, 3]]


@families
def test_an_answer_of_several_messages_is_kept_if_they_repeat_its_last_one(family: Family) -> None:
    tokenizer = family.tokenizer()
    asked = {"role": "user", "content": f"{LAST['content']} Is it not?"}
    for answer in ([LAST, SECOND, LAST], [ANSWER, asked, LAST]):
        row = {"prompt": [FIRST], "chosen": answer, "rejected": [ANSWER]}
        [record] = read_rows([row], "comparisons", tokenizer=tokenizer).records
        whole = tokenizer.apply_chat_template([FIRST, *answer], tokenize=False)
        read = f"{record.prompt}{record.chosen}{family.closing}"
        assert read.startswith(whole[: whole.rindex(LAST["content"]) + len(LAST["content"])])


def test_the_loss_covers_what_the_template_marks_as_generated() -> None:
    """The oracles are transformers' mask of the assistant's tokens, and a loop over single tokens."""
    marked = TURN + "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    marked += "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    marked += "{{ m.content + '<|im_end|>\n' }}{% endif %}"
    marked += END + OPEN + "{{ '<|im_start|>assistant\n' }}{% endif %}"
    tokenizer = Family(marked, "<|im_end|>", IM).tokenizer()
    example = encoded(tokenizer, {"messages": [SYSTEM, *TURNS]})
    oracle = tokenizer.apply_chat_template([SYSTEM, *TURNS], return_assistant_tokens_mask=True, return_dict=True)
    expected = [place for place, flag in enumerate(oracle["assistant_masks"]) if flag]
    ids = [*example.prompt, *example.completion]
    assert example.learned() == [*expected, len(ids) - 1]  # and EOS
    assert ids[:-1] == oracle["input_ids"][: len(ids) - 1]
    model = LanguageModel(tiny_causal_lm(vocab_size=len(tokenizer)), tokenizer)
    other = encoded(tokenizer, {"messages": TURNS[:2]})
    model.eval()
    loss, total = CompletionLoss(model), 0.0
    for each in (example, other):
        text = [*each.prompt, *each.completion]
        with torch.no_grad():
            logits = model.causal(input_ids=torch.tensor([text])).logits[0]
        logits[:, PAD] = -torch.inf  # never sampled
        logprobs = logits.log_softmax(-1)
        total -= sum(float(logprobs[place - 1, text[place]]) for place in each.learned())
    assert loss.weight(example) == len(expected) + 1
    assert loss.sums([example, other])["loss"].item() == pytest.approx(total, abs=1e-4)


REASONED = {"role": "assistant", "content": "<think>The tide falls.</think>\n\nAt sea."}


def test_a_part_that_the_template_leaves_out_is_named() -> None:
    tokenizer = FAMILIES["deepseek"].tokenizer()
    left_out = "leaves out a part of message 2 (assistant): '<think>The tide falls.</think>'; data.chat_template"
    assert left_out in reason(tokenizer, {"messages": [FIRST, REASONED]})
    compared = {"prompt": [FIRST], "chosen": [REASONED], "rejected": [ANSWER]}
    assert left_out in reason(tokenizer, compared, "comparisons")
    several = reason(tokenizer, {"messages": [FIRST, REASONED, SECOND, LAST]})
    assert left_out in several
    assert several.endswith("data.train_on=last learns the last answer only")
    tokenizer.chat_template = CHATML.replace(
        "m.content", "(m.content if loop.last else m.content.split('</think>')[-1].lstrip())"
    )
    repeated = reason(tokenizer, {"messages": [FIRST, REASONED, SECOND, REASONED]})
    assert "leaves out a part of message 2" in repeated
    assert repeated.endswith("data.train_on=last learns the last answer only")
    tokenizer.chat_template = R1
    last = encoded(tokenizer, {"messages": [FIRST, REASONED, SECOND, LAST]}, train_on="last")
    assert learned_texts(tokenizer, last) == ["The tide went out.<eos>"]
    # An earlier answer of a prompt is shortened as it is when the model is used.
    [prompt] = read_rows([{"prompt": [FIRST, REASONED, SECOND]}], "prompts", tokenizer=tokenizer).records
    assert "tide" not in prompt.text
    tokenizer.chat_template = SHORTENED + OPEN + "{{ '<A><think>\n' }}{% endif %}"
    assert left_out in reason(tokenizer, {"messages": [FIRST, REASONED]})
    differs = reason(tokenizer, {"messages": [FIRST, ANSWER]})
    assert "renders the prompt differently once an answer follows: '<think>\\n' becomes 'At sea." in differs


@pytest.mark.parametrize(
    ("template", "author"),
    [
        (TURN + "{% if m.role != 'system' %}{{ m.role + m.content + eos_token }}{% endif %}" + END, "system"),
        (TURN + "{{ m.role + m.content[:9] + eos_token }}" + END, "user"),
        ("{{ messages[0].content }}{% if messages[-1].role == 'assistant' %}A:x{% else %}A:{% endif %}", "user"),
    ],
)
def test_a_message_that_the_template_leaves_out_is_named_in_every_kind_of_row(template: str, author: str) -> None:
    tokenizer = tiny_tokenizer(chat_template=template)
    row = {"messages": [SYSTEM, *TURNS], "prompt": [SYSTEM, FIRST], "chosen": [ANSWER], "rejected": [LAST]}
    kinds: list[tuple[Role, list[str]]] = [
        ("demonstrations", ["messages"]),
        ("prompts", ["prompt"]),
        ("comparisons", ["prompt", "chosen", "rejected"]),
    ]
    for role, names in kinds:
        assert f"leaves out a part of message {1 if author == 'system' else 2} ({author})" in reason(
            tokenizer, {name: row[name] for name in names}, role
        )


def test_reasoning_that_the_template_reformats_or_begins_is_learned() -> None:
    kept = TURN + "{{ '<' + m.role + '>' + m.content | replace('<think>', '<think>\n') + eos_token }}" + END
    tokenizer = tiny_tokenizer(chat_template=kept + OPEN + "{{ '<assistant><think>\n' }}{% endif %}")
    example = encoded(tokenizer, {"messages": [FIRST, REASONED]})
    assert learned_texts(tokenizer, example) == ["The tide falls.</think>\n\nAt sea.<eos>"]
    # Qwen3 writes an empty block before the last answer; the word in it is not the answer.
    empty = TURN + "{{ '<' + m.role + '>' }}{% if loop.last and m.role == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}"
    empty += "{% endif %}{{ m.content + eos_token }}" + END + OPEN + "{{ '<assistant>' }}{% endif %}"
    tokenizer.chat_template = empty
    example = encoded(tokenizer, {"messages": [*TURNS[:3], {"role": "assistant", "content": "think"}]})
    assert learned_texts(tokenizer, example) == ["At sea.<eos>", "<think>\n\n</think>\n\nthink<eos>"]


def test_the_last_answer_may_be_closed_by_another_token_than_the_earlier_ones() -> None:
    """As in gpt-oss, which also begins every conversation with a system message, and answers with a channel."""
    tokenizer = Family(CHANNELS, "<|return|>", CHANNEL_TOKENS).tokenizer()
    example = encoded(tokenizer, {"messages": TURNS})
    final = "<|channel|>final<|message|>"
    assert learned_texts(tokenizer, example) == [
        f"{final}At sea.<|end|>",
        f"{final}The tide went out.<|return|><eos>",
    ]
    assert end_of_turn(tokenizer) == tokenizer.convert_tokens_to_ids("<|return|>")
    assert [*example.prompt, *example.completion][:-1] == tokenizer.apply_chat_template(TURNS, return_dict=False)


def test_old_turns_are_dropped_where_several_answers_are_learned() -> None:
    tokenizer = FAMILIES["chatml"].tokenizer()
    long = [SYSTEM, {"role": "user", "content": "word " * 60}, ANSWER, *TURNS]
    kept = encoded(tokenizer, {"messages": long}, max_length=120, max_prompt_tokens=100, truncate="keep_end")
    assert kept == encoded(tokenizer, {"messages": [SYSTEM, *TURNS]})
    assert "at most 120 fit" in reason(tokenizer, {"messages": long}, max_length=120)
    # The limit of prompts is that of the text before the first answer.
    first = len(encoded(tokenizer, {"messages": TURNS}).prompt)
    assert encoded(tokenizer, {"messages": TURNS}, max_prompt_tokens=first).prompt
    assert f"at most {first - 1} fit" in reason(tokenizer, {"messages": TURNS}, max_prompt_tokens=first - 1)


def test_a_prefix_that_is_not_bos_is_read() -> None:
    """ChatGLM's tokenizer begins every text with two tokens, and none of them is its BOS."""
    from tokenizers import processors

    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[gMASK]", "<sop>"]})
    prefix = tokenizer.convert_tokens_to_ids(["[gMASK]", "<sop>"])
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[gMASK] <sop> $A", special_tokens=list(zip(("[gMASK]", "<sop>"), prefix, strict=True))
    )
    assert encode_prompt(tokenizer, "The sea") == tokenizer("The sea")["input_ids"]
    assert encode_prompt(tokenizer, "The sea")[:2] == prefix
    assert encode_prompt(tokenizer, "[gMASK]<sop>The sea") == tokenizer("The sea")["input_ids"]
    example = encode_example(tokenizer, "The sea", " is deep")
    assert [*example.prompt, *example.completion] == [*tokenizer("The sea is deep")["input_ids"], EOS]
    assert encode_example(tokenizer, "", "The sea").prompt == prefix


def test_a_written_row_is_read_as_the_conversation_that_it_came_from() -> None:
    """`kedge generate` writes the rendered prompt as text, next to its messages."""
    tokenizer = FAMILIES["chatml with bos"].tokenizer()
    [prompt] = read_rows([{"prompt": [FIRST], "id": 1}], "prompts", tokenizer=tokenizer).records
    row = {"prompt": str(prompt.text), **prompt.columns}
    [again] = read_rows([row], "prompts", tokenizer=tokenizer).records
    assert again == prompt
    assert encode_prompt(tokenizer, again.text) == encode_prompt(tokenizer, prompt.text)
    learned = encoded(tokenizer, {**row, "completion": ANSWER["content"]})
    assert learned == encoded(tokenizer, {"messages": TURNS[:2]})
    other = {"prompt": "Where?", "messages": [FIRST]}
    assert read_rows([other], "prompts", tokenizer=tokenizer).records[0].text == "Where?"


def test_a_prompt_that_repeats_the_first_question_is_read_as_the_conversation() -> None:
    """UltraChat has the first question as `prompt`, next to the whole conversation."""
    tokenizer = FAMILIES["chatml"].tokenizer()
    system = {"role": "system", "content": "Be brief."}
    for before in ([], [system]):
        row = {"prompt": FIRST["content"], "messages": [*before, *TURNS]}
        [prompt] = read_rows([row], "prompts", tokenizer=tokenizer).records
        assert prompt == read_rows([{"prompt": [*before, FIRST]}], "prompts", tokenizer=tokenizer).records[0]
        learned = encoded(tokenizer, {"messages": row["messages"]})
        assert encode_prompt(tokenizer, prompt.text) == learned.prompt


@pytest.mark.parametrize("more", [[], TURNS[2:]], ids=["one answer", "several"])
def test_the_messages_beside_a_plain_text_end_before_the_answer(more) -> None:
    """A reward model with a chat template takes a final answer for the start of the response."""
    tokenizer = FAMILIES["chatml"].tokenizer()
    shared = [{"from": "human", "value": FIRST["content"]}, {"from": "gpt", "value": ANSWER["content"]}]
    for messages in (TURNS[:2], shared, json.dumps(TURNS[:2])):
        [prompt] = read_rows([{"prompt": "Q: Where?", "messages": messages}], "prompts", tokenizer=tokenizer).records
        assert prompt == Prompt("Q: Where?", {"messages": [FIRST]})
    row = {"prompt": FIRST["content"], "messages": [*TURNS[:2], *more]}
    [prompt] = read_rows([row], "prompts", tokenizer=tiny_tokenizer()).records
    assert prompt == Prompt(FIRST["content"], {"messages": [FIRST]})


def test_an_empty_system_message_is_left_out() -> None:
    tokenizer = FAMILIES["chatml"].tokenizer()
    kinds = [{"role": "system", "content": " "}, {"from": "system", "value": ""}, {"role": "system", "content": None}]
    kinds += [{"role": "system", "content": parts} for parts in ([], [{"type": "text", "text": ""}])]
    for empty in kinds:
        assert encoded(tokenizer, {"messages": [empty, *TURNS]}) == encoded(tokenizer, {"messages": TURNS})
        [prompt] = read_rows([{"prompt": [empty, FIRST]}], "prompts", tokenizer=tokenizer).records
        assert prompt.columns["messages"] == [FIRST]
    assert "field 'messages' is empty" in reason(tokenizer, {"messages": [{"role": "system", "content": ""}]})


def test_the_end_of_a_turn_is_a_special_token_only() -> None:
    assert end_of_turn(FAMILIES["chatml without its tokens"].tokenizer()) is None
    tokenizer = FAMILIES["gemma"].tokenizer()
    assert end_of_turn(tokenizer) == tokenizer.convert_tokens_to_ids("<end>")
    tokenizer.chat_template = ZEPHYR
    assert end_of_turn(tokenizer) == EOS
    tokenizer.chat_template = None
    assert end_of_turn(tokenizer) is None


def test_a_conversation_without_a_template_is_told_what_to_set() -> None:
    with pytest.raises(DataError, match=r"no chat template: name one with data\.chat_template"):
        read_rows([{"messages": [FIRST]}], "prompts", tokenizer=tiny_tokenizer())
