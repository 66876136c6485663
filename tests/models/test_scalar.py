"""Reward model and critic: score position, reloads, refused models."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification, BertConfig, LlamaConfig

from kedge.errors import ModelError
from kedge.models import ModelCard, ScalarModel, TokenRows, load_scalar_model, load_tokenizer, save_scalar_model
from tests.models.test_language import ROWS, padded
from tests.tiny import FAMILIES, save_tiny_policy, save_tiny_reward_model, tiny_reward_model, tiny_tokenizer


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_the_score_is_read_at_the_last_real_token_whatever_the_padding(family, left, order):
    classifier = tiny_reward_model(family).eval()
    model = ScalarModel(classifier, tiny_tokenizer())
    rows = [ROWS[index] for index in order]
    unpadded = TokenRows.unpad(*padded(rows, 10, left=left, fill=123))
    with torch.no_grad():
        expected = torch.cat([classifier(input_ids=torch.tensor([row])).logits[0] for row in rows])
        torch.testing.assert_close(model.scores(unpadded), expected, atol=1e-5, rtol=1e-5)
        last = torch.stack([values[-1] for values in model.values(unpadded).split(unpadded.lengths)])
        torch.testing.assert_close(last, expected, atol=1e-5, rtol=1e-5)


def test_an_encoder_scores_but_cannot_be_a_critic():
    config = BertConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=1
    )
    classifier = AutoModelForSequenceClassification.from_config(config).eval()
    model = ScalarModel(classifier, tiny_tokenizer())
    rows = TokenRows.of(ROWS)
    with torch.no_grad():
        expected = torch.cat([classifier(input_ids=torch.tensor([row])).logits[0] for row in ROWS])
        torch.testing.assert_close(model.scores(rows), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ModelError, match="critic needs a decoder"):
        model.values(rows)


def test_normalized_scores_survive_a_reload_bit_for_bit(tmp_path):
    tokenizer = tiny_tokenizer()
    model = ScalarModel(tiny_reward_model(), tokenizer)
    rows = TokenRows.of(ROWS)
    with torch.no_grad():
        raw = model.scores(rows)
        model.normalize(mean=float(raw.mean()), std=float(raw.std()))
        normalized = model.scores(rows)
    torch.testing.assert_close(normalized, (raw - raw.mean()) / raw.std(), atol=1e-5, rtol=1e-5)
    folder = save_scalar_model(model, tokenizer, tmp_path / "reward", card=ModelCard("reward", "tiny"))
    with torch.no_grad():
        reloaded = load_scalar_model(folder, tokenizer=load_tokenizer(folder)).scores(rows)
    assert torch.equal(reloaded, normalized)


def test_normalizing_twice_composes():
    model = ScalarModel(tiny_reward_model(), tiny_tokenizer())
    rows = TokenRows.of(ROWS)
    with torch.no_grad():
        raw = model.scores(rows)
        model.normalize(mean=0.7, std=2.0)
        model.normalize(mean=-0.3, std=0.5)
        torch.testing.assert_close(model.scores(rows), ((raw - 0.7) / 2.0 + 0.3) / 0.5, atol=1e-5, rtol=1e-5)


def test_the_saved_folder_is_a_plain_sequence_classifier(tmp_path):
    folder = save_scalar_model(
        ScalarModel(tiny_reward_model(), tiny_tokenizer()),
        tiny_tokenizer(),
        tmp_path / "r",
        card=ModelCard("reward", "x"),
    )
    plain = AutoModelForSequenceClassification.from_pretrained(folder)
    assert plain.config.num_labels == 1
    assert plain.config.pad_token_id == 0
    assert "SequenceClassification" in (folder / "README.md").read_text()


def test_a_fresh_head_has_the_published_spread(tmp_path):
    folder = save_tiny_policy(tmp_path / "policy")
    torch.manual_seed(0)
    heads = [load_scalar_model(folder, tokenizer=load_tokenizer(folder), init="fresh").head.weight for _ in range(60)]
    # 960 draws: the standard error of their standard deviation is 2.3 %.
    assert torch.cat(heads).std().item() == pytest.approx(1 / 17**0.5, rel=0.08)


def test_a_language_model_is_not_taken_for_a_reward_model(tmp_path):
    folder = save_tiny_policy(tmp_path / "policy")
    with pytest.raises(ModelError, match="no trained scalar head"):
        load_scalar_model(folder, tokenizer=load_tokenizer(folder))


def test_more_than_one_label_is_refused():
    config = LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=2
    )
    with pytest.raises(ModelError, match="one label; this model has 2"):
        ScalarModel(AutoModelForSequenceClassification.from_config(config), tiny_tokenizer())


def test_a_foreign_reward_model_without_normalization_keeps_its_scores(tmp_path):
    folder = save_tiny_reward_model(tmp_path / "foreign", "gpt_neox")
    plain = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    model = load_scalar_model(folder, tokenizer=load_tokenizer(folder))
    with torch.no_grad():
        torch.testing.assert_close(model.scores(TokenRows.of(ROWS[:1])), plain(torch.tensor(ROWS[:1])).logits[:, 0])
