"""How reward models read responses, against plain transformers on the texts."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    PreTrainedTokenizerFast,
)

from kedge.data import Sources, encode_example, encode_prompt, read_rows
from kedge.models import ScalarModel, load_tokenizer, save_scalar_model
from kedge.rewards import MESSAGES_COLUMN, ModelReward, Responses, load_reward
from kedge_base.errors import RewardError
from kedge_hub.card import ModelCard
from tests.tiny import CHAT_TEMPLATE, save_tiny_reward_model, tiny_reward_model, tiny_tokenizer

EOS, NEWLINE = 2, tiny_tokenizer().encode("\n")[0]
PROMPT, COMPLETION = "Once upon", " a time there was a little sailor."
MESSAGES = [{"role": "user", "content": "Where is the boat?"}]
CARD = "{% for turn in messages %}[{{ turn.role }}]{{ turn.content }}<bos>{% endfor %}"
CLOSED = (
    "{% for turn in messages %}<|{{ turn.role }}|>{{ turn.content }}<bos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template that ends a turn with a token other than EOS, like that of Gemma; BOS stands for its end of a turn."""


def response(completion=COMPLETION, *, prompt=PROMPT, stop: int | None = EOS, messages=None, tokenizer=None):
    tokenizer = tokenizer or tiny_tokenizer()
    return Responses(
        prompts=[prompt],
        completions=[completion],
        prompt_ids=[tokenizer.encode(prompt)],
        response_ids=[tokenizer.encode(completion) + ([] if stop is None else [stop])],
        stopped=[stop is not None],
        columns={} if messages is None else {MESSAGES_COLUMN: [messages]},
    )


def plain_score(classifier, ids) -> float:
    """The oracle: transformers' own classifier on one unpadded row."""
    with torch.no_grad():
        return classifier.eval()(input_ids=torch.tensor([ids])).logits.item()


def kedge_score(classifier, tokenizer, batch, policy_tokenizer=None) -> float:
    reward = ModelReward(ScalarModel(classifier, tokenizer), tokenizer, policy_tokenizer or tiny_tokenizer())
    [score] = reward.score(batch)
    return score


def trained_here(seed=0):
    """A reward model as kedge saves it."""
    classifier = tiny_reward_model(seed=seed)
    classifier.config.kedge_score_shift = 0.0
    return classifier


def test_a_prompt_that_responses_share_is_encoded_once(monkeypatch):
    encoded = []
    monkeypatch.setattr(
        "kedge.rewards.model.encode_prompt",
        lambda tokenizer, text: encoded.append(text) or encode_prompt(tokenizer, text),
    )
    classifier, tokenizer = tiny_reward_model(), tiny_tokenizer()
    reward = ModelReward(ScalarModel(classifier, tokenizer), tokenizer)
    assert len(set(reward.score(Responses.joined([response()] * 3)))) == 1
    assert encoded == [PROMPT]


@pytest.mark.parametrize("make", [tiny_reward_model, trained_here])
@pytest.mark.parametrize("stop", [EOS, NEWLINE])
def test_a_response_is_scored_at_eos_whatever_token_ended_it(make, stop):
    classifier, tokenizer = make(), tiny_tokenizer()
    expected = plain_score(classifier, tokenizer.encode(PROMPT + COMPLETION + "<eos>"))
    assert kedge_score(classifier, tokenizer, response(stop=stop)) == pytest.approx(expected, abs=1e-5)
    cut = plain_score(classifier, tokenizer.encode(PROMPT + COMPLETION))
    assert kedge_score(classifier, tokenizer, response(stop=None)) == pytest.approx(cut, abs=1e-5)


@pytest.mark.parametrize("messages", [None, MESSAGES])
def test_a_model_that_came_with_eos_as_padding_is_read_before_it(messages, tmp_path):
    """As TRL saves reward models: transformers takes the score at the last token that is not padding, that is, EOS."""
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE.replace("{{ '\n' }}", ""))
    tokenizer.pad_token = tokenizer.eos_token
    folder = save_tiny_reward_model(tmp_path / "reward", tokenizer=tokenizer)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": EOS}))
    plain = AutoModelForSequenceClassification.from_pretrained(folder)
    turns = [*MESSAGES, {"role": "assistant", "content": COMPLETION}]
    text = tokenizer.apply_chat_template(turns, tokenize=False) if messages else PROMPT + COMPLETION + "<eos>"
    [score] = load_reward(str(folder), policy_tokenizer=tiny_tokenizer()).score(response(messages=messages))
    assert score == pytest.approx(plain_score(plain, tokenizer.encode(text)), abs=1e-5)


def test_a_chat_model_reads_its_own_template_though_it_has_the_policys_tokens():
    classifier, tokenizer = tiny_reward_model(), tiny_tokenizer(chat_template=CARD)
    whole = [*MESSAGES, {"role": "assistant", "content": COMPLETION}]
    expected = plain_score(classifier, tokenizer.apply_chat_template(whole, return_dict=False))
    batch = response(messages=MESSAGES)
    assert kedge_score(classifier, tokenizer, batch) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("template", [None, CARD, CHAT_TEMPLATE])
@pytest.mark.parametrize("make", [tiny_reward_model, trained_here])
@pytest.mark.parametrize("stop", [EOS, NEWLINE, None])
def test_one_more_token_in_the_policys_tokenizer_changes_no_score(make, template, stop):
    classifier, tokenizer, larger = make(), tiny_tokenizer(chat_template=template), tiny_tokenizer()
    larger.add_tokens(["<another>"])
    # Among the sampled ids are a special token and part of a character, which the text does not show.
    batch = dataclasses.replace(
        response(stop=stop, messages=MESSAGES), response_ids=[[9, 1, 200] + [stop] * bool(stop)]
    )
    scores = [kedge_score(classifier, tokenizer, batch, policy) for policy in (tiny_tokenizer(), larger)]
    assert scores[0] == scores[1]


def test_a_tokenizer_without_the_sampled_tokens_reads_the_text():
    classifier, tokenizer, policy = tiny_reward_model(), tiny_tokenizer(), tiny_tokenizer()
    policy.add_tokens(["<another>"])
    batch = dataclasses.replace(response(), response_ids=[[len(policy) - 1, EOS]])
    expected = plain_score(classifier, tokenizer.encode(PROMPT + COMPLETION + "<eos>"))
    assert kedge_score(classifier, tokenizer, batch, policy) == pytest.approx(expected, abs=1e-5)


def comparison_ids(tokenizer, answer: str, tmp_path) -> list[int]:
    """The row that training on a conversation reads."""
    row = {"prompt": MESSAGES, "chosen": [{"role": "assistant", "content": answer}], "rejected": "no"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    [record] = read_rows(Sources((str(tmp_path / "rows.jsonl"),)), "comparisons", tokenizer=tokenizer).records
    return [id for part in encode_example(tokenizer, record.prompt, record.chosen) for id in part]


@pytest.mark.parametrize(
    ("template", "written", "stop"),
    [
        (CHAT_TEMPLATE, "At sea.", EOS),
        (CLOSED, "At sea.<bos>\n", EOS),  # the policy writes the template's closing itself, then EOS
        (CLOSED, "At sea.", 1),  # the policy stops at the end of its turn
    ],
)
def test_a_model_that_kedge_trained_reads_a_conversation_as_in_training(template, written, stop, tmp_path):
    classifier, tokenizer = trained_here(), tiny_tokenizer(chat_template=template)
    prompt = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(written)
    batch = dataclasses.replace(
        response(tokenizer.decode(ids), prompt=prompt, messages=MESSAGES, stop=stop),
        response_ids=[[*ids, stop]],
    )
    expected = plain_score(classifier, comparison_ids(tokenizer, "At sea.", tmp_path))
    assert kedge_score(classifier, tokenizer, batch, tokenizer) == pytest.approx(expected, abs=1e-5)


def test_a_turn_that_the_prompt_started_is_one_turn_for_a_model_that_kedge_trained(tmp_path):
    classifier, tokenizer = trained_here(), tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    batch = response("sea.", messages=[*MESSAGES, {"role": "assistant", "content": "At "}])
    expected = plain_score(classifier, comparison_ids(tokenizer, "At sea.", tmp_path))
    assert kedge_score(classifier, tokenizer, batch) == pytest.approx(expected, abs=1e-5)


def test_special_tokens_of_a_response_are_read_as_in_training(tmp_path):
    classifier, tokenizer = trained_here(), tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    policy = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    for each, names in ((tokenizer, ["<bos>"]), (policy, ["<another>", "<bos>"])):
        each.add_special_tokens({"additional_special_tokens": names})
    batch = response("<bos>At sea.", messages=MESSAGES, tokenizer=policy)
    expected = plain_score(classifier, comparison_ids(tokenizer, "<bos>At sea.", tmp_path))
    for reader in (policy, tokenizer):
        assert kedge_score(classifier, tokenizer, batch, reader) == pytest.approx(expected, abs=1e-5)


def test_a_template_that_leaves_out_a_part_does_not_stop_the_scoring(tmp_path):
    """A reward model reads what its template shows: a policy may reason, or have a system message."""
    template = CHAT_TEMPLATE.replace("message['content'] }}", "message['content'].split('</think>')[-1] }}")
    template = template.replace("<|{{ message", "{% if message['role'] != 'system' %}<|{{ message", 1)
    template = template.replace("{% endfor %}", "{% endif %}{% endfor %}")
    classifier, tokenizer = trained_here(), tiny_tokenizer(chat_template=template)
    asked = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    batch = response("<think>Tides.</think>At sea.", messages=asked)
    expected = plain_score(classifier, comparison_ids(tokenizer, "At sea.", tmp_path))
    assert kedge_score(classifier, tokenizer, batch) == pytest.approx(expected, abs=1e-5)


def encoder(vocab_size: int):
    config = BertConfig(
        vocab_size=vocab_size, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        num_labels=1, initializer_range=0.5,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForSequenceClassification.from_config(config)


def encoder_tokenizer(**names: str) -> PreTrainedTokenizerFast:
    """A tokenizer that wraps every text in [CLS] … [SEP]."""
    backend = Tokenizer(models.WordLevel({"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3, "Once": 4, "a": 5}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapping = [("[CLS]", 1), ("[SEP]", 2)]
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=wrapping)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", **names)


@pytest.mark.parametrize(
    "names",
    [
        {"cls_token": "[CLS]", "sep_token": "[SEP]"},  # BERT, ModernBERT, ELECTRA
        {"cls_token": "[CLS]", "sep_token": "[SEP]", "bos_token": "[CLS]", "eos_token": "[SEP]"},  # RoBERTa
    ],
)
@pytest.mark.parametrize("stop", [EOS, None])
def test_an_encoder_reads_the_text_in_its_tokenizers_own_wrapping(names, stop):
    tokenizer, classifier = encoder_tokenizer(**names), encoder(6)
    ids = tokenizer(PROMPT + COMPLETION)["input_ids"]
    assert (ids[0], ids[-1]) == (1, 2)
    reward = ModelReward(ScalarModel(classifier, tokenizer), tokenizer, tiny_tokenizer())
    reward.check([])
    assert reward.score(response(stop=stop)) == pytest.approx([plain_score(classifier, ids)], abs=1e-5)


def test_a_tokenizer_that_cannot_mark_the_end_is_refused_with_advice_that_works(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token = None
    folder = save_tiny_reward_model(tmp_path / "judge", tokenizer=tokenizer)
    refused = r"reward model 'judge': its tokenizer has no EOS .* set eos_token in its tokenizer_config\.json"
    with pytest.raises(RewardError, match=refused):
        load_reward(str(folder), policy_tokenizer=tiny_tokenizer()).check([])
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<eos>"}))
    reward = load_reward(str(folder), policy_tokenizer=tiny_tokenizer())
    reward.check([])
    plain = AutoModelForSequenceClassification.from_pretrained(folder)
    expected = plain_score(plain, AutoTokenizer.from_pretrained(folder).encode(PROMPT + COMPLETION + "<eos>"))
    assert reward.score(response()) == pytest.approx([expected], abs=1e-5)


def test_a_conversation_needs_no_eos_where_the_template_ends_it():
    tokenizer = tiny_tokenizer(chat_template=CARD)
    tokenizer.bos_token = tokenizer.eos_token = None
    reward = ModelReward(ScalarModel(tiny_reward_model(), tokenizer), tokenizer, tiny_tokenizer())
    reward.check([MESSAGES_COLUMN])
    with pytest.raises(RewardError, match="no EOS"):
        reward.check([])


def test_every_reward_model_that_kedge_saves_is_known_as_its_own(tmp_path):
    model, tokenizer = ScalarModel(tiny_reward_model(), tiny_tokenizer()), tiny_tokenizer()
    assert not model.trained_here
    folder = save_scalar_model(model, tokenizer, tmp_path / "own", card=ModelCard("reward", "tiny"))
    assert json.loads((folder / "config.json").read_text())["kedge_score_shift"] == 0.0
    classifier = AutoModelForSequenceClassification.from_pretrained(folder)
    assert ScalarModel(classifier, load_tokenizer(folder)).trained_here


def test_a_judges_long_texts_have_no_score_and_a_reward_models_are_an_error():
    classifier, tokenizer = tiny_reward_model(), tiny_tokenizer()
    long = response(" a" * 300)
    batch = Responses(*([*getattr(long, name), *getattr(response(), name)] for name in (
        "prompts", "completions", "prompt_ids", "response_ids", "stopped")))  # fmt: skip
    judge = ModelReward(ScalarModel(classifier, tokenizer), tokenizer, skip_too_long=True)
    expected = plain_score(classifier, tokenizer.encode(PROMPT + COMPLETION + "<eos>"))
    assert judge.score(batch) == [None, pytest.approx(expected, abs=1e-5)]
    with pytest.raises(RewardError, match="reads at most 256 tokens"):
        ModelReward(ScalarModel(classifier, tokenizer), tokenizer).score(batch)
