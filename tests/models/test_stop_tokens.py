"""Where responses end: the user's tokens, EOS, what the model declares, and what its chat template writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from kedge.models import (
    StopTokens,
    load_language_model,
    load_tokenizer,
    named_stop_tokens,
    own_stop_tokens,
    save_policy,
)
from kedge_base.errors import ModelError
from kedge_hub.card import ModelCard
from tests.lab.evaluation.speakers import save_speaker
from tests.tiny import CHAT_TEMPLATE, save_tiny_policy, tiny_tokenizer

EOS = 2
# The formats of three families, from their model cards; the tokenizer's EOS is not what ends their turns.
GEMMA = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{{ message['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
CHATS = {
    "<end_of_turn>": (GEMMA, ["<start_of_turn>", "<end_of_turn>"]),
    "<|im_end|>": (CHATML, ["<|im_start|>", "<|im_end|>"]),
    "<|eot_id|>": (LLAMA_3, ["<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"]),
}


def chat_tokenizer(end: str) -> PreTrainedTokenizerFast:
    """A tokenizer with the special tokens and the template of a family whose turns end in `end`."""
    template, special = CHATS[end]
    tokenizer = tiny_tokenizer(chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    return tokenizer


def declare(folder: Path, ids: Any) -> Path:
    """A `generation_config.json` as model authors publish it."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids, "top_p": 0.9}), encoding="utf-8")
    return folder


def own(folder: Path) -> StopTokens:
    tokenizer = load_tokenizer(folder)
    return own_stop_tokens(tokenizer, load_language_model(folder, tokenizer=tokenizer))


def test_a_plain_model_stops_at_eos_alone(tmp_path):
    assert own(save_tiny_policy(tmp_path / "policy")) == StopTokens((EOS,), "responses end with <eos>")


def test_named_tokens_are_all_that_counts():
    tokenizer = chat_tokenizer("<end_of_turn>")
    newline = tokenizer.encode("\n")[0]
    assert named_stop_tokens(tokenizer, None) is None
    assert named_stop_tokens(tokenizer, "<bos>") == StopTokens((1,), "responses end with <bos>")
    assert named_stop_tokens(tokenizer, 7).ids == (7,)
    assert named_stop_tokens(tokenizer, "\n") == StopTokens((newline,), "responses end with '\\n'")
    assert named_stop_tokens(tokenizer, ["\n", "<eos>", newline]).ids == (newline, EOS)


@pytest.mark.parametrize("wrong", ["<pad>", "not a token", 10_000, -1, ["<eos>", "<pad>"]])
def test_a_named_token_that_is_none_is_refused(wrong):
    with pytest.raises(ModelError, match=r"rollout\.stop_token"):
        named_stop_tokens(tiny_tokenizer(), wrong)


def test_the_ids_of_a_vocabulary_may_have_gaps_and_unknown_text_is_no_token():
    words = {"<unk>": 0, "word": 1, "<pad>": 2, "end": 9}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>")
    assert named_stop_tokens(tokenizer, 9) == StopTokens((9,), "responses end with end")
    assert named_stop_tokens(tokenizer, "<unk>").ids == (0,)
    for wrong in (3, -1, "stop", "<pad>"):
        with pytest.raises(ModelError, match="not a single non-padding token of the vocabulary"):
            named_stop_tokens(tokenizer, wrong)


def test_without_any_end_the_setting_is_named(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    folder = save_tiny_policy(tmp_path / "policy", tokenizer=tokenizer)
    assert own(declare(folder, [9])).ids == (9,)
    with pytest.raises(ModelError, match=r"no EOS.*rollout\.stop_token"):
        own(declare(folder, None))


@pytest.mark.parametrize("end", CHATS)
def test_the_end_of_a_templates_turn_is_a_stop_token(tmp_path, end):
    tokenizer = chat_tokenizer(end)
    stops = own(save_tiny_policy(tmp_path / "policy", tokenizer=tokenizer))
    assert stops.ids == (EOS, tokenizer.get_vocab()[end])
    assert stops.line == f"responses end with <eos> or {end}"


@pytest.mark.parametrize(
    "template",
    [
        CHAT_TEMPLATE,  # its turns end in EOS
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}",  # in no token
        "{{ raise_exception('not today') }}",
        "<end_of_turn>",  # the answer is not in the text
    ],
)
def test_a_template_that_ends_turns_otherwise_adds_no_stop_token(tmp_path, template):
    tokenizer = chat_tokenizer("<end_of_turn>")
    tokenizer.chat_template = template
    assert own(save_tiny_policy(tmp_path / "policy", tokenizer=tokenizer)).ids == (EOS,)


def test_every_id_that_the_model_declares_is_a_stop_token(tmp_path):
    tokenizer = chat_tokenizer("<|eot_id|>")
    eom, eot = (tokenizer.get_vocab()[token] for token in ("<|eom_id|>", "<|eot_id|>"))
    folder = save_tiny_policy(tmp_path / "policy", tokenizer=tokenizer)
    assert own(declare(folder, [EOS, eom, eot])) == StopTokens(
        (EOS, eom, eot), "responses end with <eos> or <|eom_id|> or <|eot_id|>"
    )
    assert own(declare(folder, eom)).ids == (EOS, eom, eot)


def test_declared_ids_that_cannot_be_sampled_are_ignored_and_named(tmp_path):
    folder = save_tiny_policy(tmp_path / "policy", extra_rows=3)
    stops = own(declare(folder, [EOS, 0, 302, 99_999, -1, "x", None, True, [1]]))
    assert stops.ids == (EOS,)
    assert stops.line == (
        "responses end with <eos>; ignored, because never sampled or not special: "
        "<pad>, 302, 99999, -1, x, None, True, [1]"
    )
    assert own(declare(folder, [EOS, *range(1_000, 9_000)])).line.endswith(", 7992 more")


def test_an_ordinary_word_is_a_stop_token_only_where_a_generation_configuration_says_so(tmp_path):
    # `eos_token_id` of config.json may be the default of the architecture, 2 in Llama's, whatever the vocabulary.
    folder = save_tiny_policy(tmp_path / "policy")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [EOS, 70]}))
    (folder / "generation_config.json").unlink()
    word = tiny_tokenizer().decode([70])
    assert own(folder) == StopTokens(
        (EOS,), f"responses end with <eos>; ignored, because never sampled or not special: {word}"
    )
    assert own(declare(folder, [EOS, 70])).ids == (EOS, 70)


def resaved(folder: Path, out: Path, **settings: Any) -> Path:
    tokenizer = load_tokenizer(folder)
    model = load_language_model(folder, tokenizer=tokenizer)
    return save_policy(model, tokenizer, out, card=ModelCard("ppo", "tiny"), **settings)


def saved_ids(folder: Path) -> Any:
    return json.loads((folder / "generation_config.json").read_text())["eos_token_id"]


@pytest.mark.parametrize("end", ["<eos>", "<|eom_id|>", "<|eot_id|>", "."])
def test_generate_of_the_saved_model_stops_at_every_stop_token(tmp_path, end):
    tokenizer = chat_tokenizer("<|eot_id|>")
    folder = save_speaker(tmp_path / "policy", end, tokenizer=tokenizer)
    declare(folder, [EOS, tokenizer.get_vocab()["<|eom_id|>"]])
    saved = resaved(folder, tmp_path / "saved", stop_tokens=own(folder).ids)
    model = AutoModelForCausalLM.from_pretrained(saved)
    written = model.generate(torch.tensor([[5, 6]]), max_new_tokens=6)[0, 2:].tolist()
    token = tokenizer.get_vocab()[end]
    assert written == ([token] * 6 if end == "." else [token])
    assert own(saved).ids == own(folder).ids


def test_a_saved_model_keeps_what_it_came_with_and_nothing_doubtful(tmp_path):
    folder = save_tiny_policy(tmp_path / "policy")
    assert saved_ids(resaved(folder, tmp_path / "plain", stop_tokens=[EOS])) == EOS
    # A server may sample the padding token that kedge never does, and must then stop.
    declare(folder, [9, 0, 99_999])
    saved = resaved(folder, tmp_path / "declared", stop_tokens=[EOS, 7])
    assert saved_ids(saved) == [EOS, 7, 9, 0]
    assert saved_ids(resaved(saved, tmp_path / "again", stop_tokens=own(saved).ids)) == [EOS, 7, 9, 0]
    assert "top_p" not in json.loads((saved / "generation_config.json").read_text())
