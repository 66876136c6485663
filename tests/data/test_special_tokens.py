"""Special tokens that a row writes and the tokenizer or the chat template adds: each is there once."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from kedge.data import encode_completion, encode_example, encode_prompt, read_rows
from tests.tiny import CHAT_TEMPLATE, tiny_sentencepiece_tokenizer, tiny_tokenizer

BOS, EOS = 1, 2
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}"
    " {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level() -> PreTrainedTokenizerBase:
    return tiny_tokenizer(add_bos=True, chat_template=TEMPLATE)


def sentence_piece() -> PreTrainedTokenizerBase:
    tokenizer = tiny_sentencepiece_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


adding = pytest.mark.parametrize("tokenizer", [byte_level(), sentence_piece()], ids=["byte-level", "sentencepiece"])


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def ids_of(tokenizer: Any, row: Any) -> list[int]:
    [record] = read_rows([row], "demonstrations", tokenizer=tokenizer).records
    example = encode_example(tokenizer, record.prompt, record.completion, read=record.read)
    return [*example.prompt, *example.completion]


@adding
@pytest.mark.parametrize(
    ("written", "bare"),
    [
        ({"text": "<bos>The boat."}, {"text": "The boat."}),
        ({"text": "<bos><bos>The boat.<eos>\n"}, {"text": "The boat."}),
        ({"prompt": "The boat", "completion": "<bos> lay."}, {"prompt": "The boat", "completion": " lay."}),
        ({"prompt": "<bos>The boat", "completion": " lay.<eos>\n"}, {"prompt": "The boat", "completion": " lay."}),
        ({"prompt": "The", "completion": " tide.<eos> <eos>\n\n"}, {"prompt": "The", "completion": " tide."}),
        ({"instruction": "Why?", "output": "<bos>So.<eos>"}, {"instruction": "Why?", "output": "So."}),
        (
            {"messages": [user("<bos>Why?"), assistant("<bos>So.<eos>"), user("Why?"), assistant("No.<eos>\n")]},
            {"messages": [user("Why?"), assistant("So."), user("Why?"), assistant("No.")]},
        ),
        (
            {"prompt": "<bos>Why?", "completion": [{"from": "gpt", "value": "<bos>So.<eos>"}]},
            {"prompt": "Why?", "completion": [assistant("So.")]},
        ),
        ({"prompt": "Why?", "chosen": "<bos>So.<eos>\n", "rejected": "No."}, {"prompt": "Why?", "completion": "So."}),
    ],
    ids=str,
)
def test_bos_and_eos_of_a_demonstration_are_there_once(tokenizer, written, bare):
    ids = ids_of(tokenizer, written)
    assert ids == ids_of(tokenizer, bare)
    assert ids.count(BOS) == 1
    assert ids[0] == BOS
    assert ids[-1] == EOS


@adding
def test_several_documents_in_one_text_have_one_bos_each(tokenizer):
    ids = ids_of(tokenizer, {"text": "<bos>One.<eos><bos>Two.<eos>"})
    assert [ids.count(BOS), ids.count(EOS)] == [2, 2]
    assert [ids[0], ids[-1]] == [BOS, EOS]


@adding
def test_bos_and_eos_of_compared_answers_are_there_once(tokenizer):
    row = {"prompt": "<bos>The boat", "chosen": "<bos> lay.<eos>\n", "rejected": " sank.<eos>"}
    ranked = {"prompt": "<bos>The boat", "responses": ["<bos> lay.<eos>\n", " sank.<eos>"], "ranks": [1, 2]}
    [pair, ranking] = read_rows([row, ranked], "comparisons", tokenizer=tokenizer).records
    for answers in ((pair.chosen, pair.rejected), ranking.responses):
        texts = [encode_completion(tokenizer, each) for each in answers]
        assert [(ids.count(BOS), ids.count(EOS)) for ids in texts] == [(0, 1), (0, 1)]
    assert encode_prompt(tokenizer, pair.prompt).count(BOS) == 1
    same = {"prompt": "The boat", "chosen": " lay.<eos>", "rejected": " lay."}
    table = read_rows([row, same], "comparisons", tokenizer=tokenizer, max_rejected_fraction=0.5)
    assert len(table.rejected) == 1


@adding
def test_bos_of_a_prompt_is_there_once(tokenizer):
    for row in ({"prompt": "<bos>Why?"}, {"prompt": [user("<bos>Why?")]}, {"messages": [user("<bos><bos>Why?")]}):
        [prompt] = read_rows([row], "prompts", tokenizer=tokenizer).records
        assert encode_prompt(tokenizer, prompt.text).count(BOS) == 1


def test_tokens_that_nothing_adds_stay():
    plain = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    assert ids_of(plain, {"text": "<bos>The boat."})[0] == BOS
    assert ids_of(plain, {"messages": [user("<bos>Why?"), assistant("So.")]}).count(BOS) == 1
    # The template adds no BOS, as `apply_chat_template(tokenize=True)` has it.
    assert (
        ids_of(
            tiny_tokenizer(add_bos=True, chat_template=CHATML), {"messages": [user("<bos>Why?"), assistant("So.")]}
        ).count(BOS)
        == 1
    )
    assert ids_of(plain, {"prompt": "Why?", "completion": "<eos>"})[-2:] != [EOS, EOS]
    assert ids_of(plain, {"text": "One.<eos>Two."}).count(EOS) == 2


def test_a_token_that_closes_no_turn_is_not_learned_before_the_one_that_does():
    tokenizer = tiny_tokenizer(chat_template=CHATML)
    turns = [user("Why?"), assistant("So.<eos>"), user("Why?"), assistant("No.<eos>\n")]
    bare = [user("Why?"), assistant("So."), user("Why?"), assistant("No.")]
    assert ids_of(tokenizer, {"messages": turns}) == ids_of(tokenizer, {"messages": bare})
