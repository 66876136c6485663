"""Reward models as reward sources: the read-out, batches, and models with their own tokenizer."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kedge.models import ScalarModel, load_tokenizer
from kedge.rewards import MESSAGES_COLUMN, ModelReward, Responses, RewardTerm, load_reward
from kedge.rewards.model import share_tokens
from kedge_base.errors import ModelError, RewardError
from tests.tiny import (
    FAMILIES,
    save_tiny_reward_model,
    tiny_reward_model,
    tiny_sentencepiece_tokenizer,
    tiny_tokenizer,
)

POLICY_TOKENIZER = tiny_tokenizer()
TEXTS = (("Once upon", " a time there was a little sailor."), ("The boat", " sank"), ("POST: help\n\nTL;DR:", ""))


def rollout(eos: bool = True) -> Responses:
    """Responses as the sampler makes them: ids of the policy's tokenizer, EOS behind those that stopped."""
    prompts, completions = [list(texts) for texts in zip(*TEXTS, strict=True)]
    endings = [2] if eos else []
    return Responses(
        prompts=prompts,
        completions=completions,
        prompt_ids=[POLICY_TOKENIZER.encode(text) for text in prompts],
        response_ids=[[*POLICY_TOKENIZER.encode(text), *endings] for text in completions],
        stopped=[eos] * len(prompts),
    )


def score_alone(model, ids):
    """The oracle: one unpadded row through transformers' own classifier, dropout off."""
    model.eval()
    with torch.no_grad():
        return model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long)).logits.item()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("micro_batch_tokens", [1, 12, None])
def test_scores_are_those_of_each_row_alone(family, micro_batch_tokens):
    classifier, batch = tiny_reward_model(family), rollout()
    expected = [score_alone(classifier, p + r) for p, r in zip(batch.prompt_ids, batch.response_ids, strict=True)]
    model = ScalarModel(classifier, POLICY_TOKENIZER)
    reward = ModelReward(model, POLICY_TOKENIZER, micro_batch_tokens=micro_batch_tokens)
    assert reward.score(batch) == pytest.approx(expected, abs=1e-5)


def test_the_same_tokens_are_read_without_encoding_anew():
    """Ids that no encoding of the text would give are scored as sampled."""
    batch = dataclasses.replace(rollout(), response_ids=[[100, 101, 2], [102, 2], [103, 104, 105, 2]])
    classifier = tiny_reward_model()
    reward = ModelReward(ScalarModel(classifier, tiny_tokenizer()), tiny_tokenizer(), POLICY_TOKENIZER)
    expected = [score_alone(classifier, p + r) for p, r in zip(batch.prompt_ids, batch.response_ids, strict=True)]
    assert reward.shares_tokens
    assert reward.score(batch) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("eos", [True, False])
def test_other_tokens_read_the_text_with_their_own_end(eos):
    tokenizer = tiny_sentencepiece_tokenizer()
    classifier = tiny_reward_model(vocab_size=len(tokenizer))
    reward = ModelReward(ScalarModel(classifier, tokenizer), tokenizer, POLICY_TOKENIZER)
    # A whole text, encoded in one go: BOS, prompt and completion, then EOS only where the policy stopped.
    wholes = [tokenizer.encode(prompt + completion) + [2] * eos for prompt, completion in TEXTS[:1]]
    batch = dataclasses.replace(
        rollout(eos),
        **{
            name: getattr(rollout(eos), name)[:1]
            for name in ("prompts", "completions", "prompt_ids", "response_ids", "stopped")
        },
    )
    assert not reward.shares_tokens
    assert reward.score(batch) == pytest.approx([score_alone(classifier, ids) for ids in wholes], abs=1e-5)


@pytest.mark.parametrize(
    ("begun", "completion", "answer"), [(None, "At sea.", "At sea."), ("At ", "sea.", "At sea."), (None, "", "")]
)
def test_other_tokens_render_the_messages_with_their_own_template(begun, completion, answer):
    template = "{% for turn in messages %}[{{ turn.role }}] {{ turn.content }}{{ eos_token }}{% endfor %}"
    tokenizer = tiny_tokenizer(vocab_size=280, add_bos=True, chat_template=template)
    classifier = tiny_reward_model(vocab_size=len(tokenizer))
    reward = ModelReward(ScalarModel(classifier, tokenizer), tokenizer, POLICY_TOKENIZER)
    messages = [{"role": "user", "content": "Where is the boat?"}]
    messages += [{"role": "assistant", "content": begun}] if begun else []
    batch = Responses(["<policy's own form>"], [completion], [[5]], [[6, 2]], [True], {MESSAGES_COLUMN: [messages]})
    # By hand from the template. No BOS: a template writes every special token itself.
    ids = tokenizer.encode(f"[user] Where is the boat?<eos>[assistant] {answer}<eos>", add_special_tokens=False)
    assert reward.score(batch) == pytest.approx([score_alone(classifier, ids)], abs=1e-5)


def test_the_refusal_of_a_template_is_one_line():
    tokenizer = tiny_tokenizer(vocab_size=280, chat_template="{{ raise_exception('no users') }}")
    model = ScalarModel(tiny_reward_model(vocab_size=len(tokenizer)), tokenizer)
    batch = Responses(["?"], ["yes"], [[5]], [[6, 2]], [True], {MESSAGES_COLUMN: [[{"role": "user", "content": "?"}]]})
    with pytest.raises(RewardError, match="the chat template rejects the conversation: no users"):
        ModelReward(model, tokenizer, POLICY_TOKENIZER).score(batch)


def test_sharing_tokens_looks_past_padding_but_not_past_the_end():
    same, other_pad, other_end = tiny_tokenizer(), tiny_tokenizer(), tiny_tokenizer()
    other_pad.add_special_tokens({"pad_token": "<|another pad|>"})
    other_end.eos_token = "<bos>"
    assert share_tokens(POLICY_TOKENIZER, same)
    assert share_tokens(POLICY_TOKENIZER, other_pad)
    assert not share_tokens(POLICY_TOKENIZER, other_end)
    assert not share_tokens(POLICY_TOKENIZER, tiny_tokenizer(vocab_size=280))


def test_bad_rows_are_named():
    reward = ModelReward(ScalarModel(tiny_reward_model(), POLICY_TOKENIZER), POLICY_TOKENIZER, name="judge")
    texts = ["p", "p " * 100]
    ids = [POLICY_TOKENIZER.encode(text) for text in texts]
    long = Responses(texts, ["c", "c"], ids, [[6, 2], [*[6] * (257 - len(ids[1])), 2]], [True, True])
    with pytest.raises(RewardError, match="'judge' reads at most 256 tokens, but response 1 has 258"):
        reward.score(long)
    with pytest.raises(RewardError, match="response 0 and its prompt are empty"):
        reward.score(Responses([""], [""], [[]], [[]], [False]))


def test_a_model_that_overflows_is_named():
    classifier = tiny_reward_model()
    torch.nn.init.constant_(classifier.score.weight, float("nan"))
    reward = ModelReward(ScalarModel(classifier, POLICY_TOKENIZER), POLICY_TOKENIZER, name="judge")
    with pytest.raises(RewardError, match="reward model 'judge' gave response 0 nan"):
        reward.score(rollout())


def test_no_gradient_is_kept():
    reward = ModelReward(ScalarModel(tiny_reward_model(), POLICY_TOKENIZER), POLICY_TOKENIZER)
    reward.score(rollout())
    assert all(parameter.grad is None for parameter in reward.model.parameters())


def test_a_folder_and_a_function_load_as_one_reward(tmp_path):
    folder = save_tiny_reward_model(tmp_path / "judge")
    tokenizer = load_tokenizer(folder)
    alone = load_reward(str(folder), policy_tokenizer=tokenizer).score_terms(rollout())
    assert list(alone.terms) == ["judge"]
    mixed = load_reward(
        [RewardTerm(folder, 2.0), RewardTerm("kedge.rewards.penalties:blank", 0.5)], policy_tokenizer=tokenizer
    )
    expected = [2 * score - 0.5 * (not text) for score, (_, text) in zip(alone.scores, TEXTS, strict=True)]
    assert mixed.score(rollout()) == pytest.approx(expected)


def test_a_weighted_reward_lists_its_models(tmp_path):
    folders = [save_tiny_reward_model(tmp_path / name / "judge") for name in "ab"]
    reward = load_reward([str(folders[0]), "kedge.rewards.penalties:blank", str(folders[1])])
    assert list(reward.models) == ["judge", "judge-2"]
    assert [each.model for each in reward.models.values()] == [reward.sources[0].model, reward.sources[2].model]
    assert all((each.shares_tokens, each.max_tokens) == (True, 256) for each in reward.models.values())
    assert load_reward(lambda completions: []).models == {}


def test_a_folder_with_a_name_like_a_function_is_a_model(tmp_path, monkeypatch):
    folder = save_tiny_reward_model(tmp_path / "judge:v2")
    monkeypatch.chdir(tmp_path)
    assert load_reward("judge:v2").names == ["judge:v2"]
    with pytest.raises(RewardError, match="is a model and takes no settings"):
        load_reward(RewardTerm(str(folder), settings={"scale": 2}))


def test_a_missing_folder_is_one_line(tmp_path):
    with pytest.raises(ModelError, match="no such folder"):
        load_reward(str(tmp_path / "nothing" / "here"))
