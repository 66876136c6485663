"""Reward model and critic: score position, reloads, refused models."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from kedge.models import (
    AdapterSettings,
    ScalarModel,
    TokenRows,
    initialize_head,
    load_scalar_model,
    load_tokenizer,
    save_scalar_model,
)
from kedge.models.loading import Bases
from kedge_base.errors import ModelError
from kedge_hub.card import ModelCard
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
        last = torch.stack([values[-1] for values in model.read_values(unpadded).values.split(unpadded.lengths)])
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
        model.read_values(rows)


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


def test_a_shift_far_larger_than_the_scores_leaves_values_at_every_token(tmp_path):
    model = ScalarModel(tiny_reward_model(), tiny_tokenizer())
    model.rescale(0.01, -1e4)
    save_scalar_model(model, tiny_tokenizer(), tmp_path / "critic", card=ModelCard("critic", "kedge critic", {}))
    critic = load_scalar_model(tmp_path / "critic", tokenizer=tiny_tokenizer())
    assert critic.has_values
    assert critic.read_values(TokenRows.of(ROWS)).values.mean().item() == pytest.approx(-1e4, abs=1.0)


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
    head = load_scalar_model(folder, tokenizer=load_tokenizer(folder), init="fresh").head
    assert 0.5 < head.weight.std().item() * 17**0.5 < 2
    heads = [initialize_head(head, "normal").weight.detach().clone() for _ in range(60)]
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


def save_foreign_reward_model(folder, head, *, beside=False, bias=None, **settings):
    """A reward model as OpenRLHF, TRL and LLaMA-Factory save it: its head under another name, or in another file."""
    save_tiny_reward_model(folder)
    config = json.loads((folder / "config.json").read_text())
    for name in ("id2label", "label2id"):
        del config[name]
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["RewardModel"], **settings}))
    weights = load_file(folder / "model.safetensors")
    found = {f"{head}.weight": weights.pop("score.weight").clone()}
    if bias is not None:
        found[f"{head}.bias"] = torch.tensor([bias])
    if beside:
        save_file(found, folder / "value_head.safetensors", metadata={"format": "pt"})
    save_file({**weights, **({} if beside else found)}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("shared_base", [False, True])
@pytest.mark.parametrize(
    ("head", "settings", "expected"),
    [
        ("score", {}, lambda score: score),
        ("value_head", {"value_head_prefix": "value_head"}, lambda score: score),
        ("value_head", {"normalize_reward": True, "mean": 0.5, "std": 2.0}, lambda score: (score - 0.5) / 2),
        ("score", {"normalize_reward": True, "mean": 0.5, "std": 2.0}, lambda score: (score - 0.5) / 2),
        ("score", {"normalize_reward": False, "mean": 0.5, "std": 2.0}, lambda score: score),
        ("v_head.summary", {"bias": 0.25}, lambda score: score + 0.25),
        ("v_head.summary", {"bias": 0.25, "beside": True}, lambda score: score + 0.25),
        ("v_head.summary", {"bias": 0.25, "normalize_reward": True, "std": 2.0}, lambda score: (score + 0.25) / 2),
    ],
)
def test_the_head_of_another_librarys_reward_model_is_found_by_its_shape(
    tmp_path, head, settings, expected, shared_base
):
    folder = save_foreign_reward_model(tmp_path / "foreign", head, **settings)
    trunk = AutoModel.from_pretrained(folder).eval()
    tokenizer = load_tokenizer(folder)
    bases = Bases() if shared_base else None
    models = [load_scalar_model(folder, tokenizer=tokenizer, bases=bases) for _ in range(1 + shared_base)]
    model = models[0]
    with torch.no_grad():
        states = trunk(torch.tensor(ROWS[:1])).last_hidden_state[0, -1]
        score = expected(states @ tiny_reward_model().score.weight[0])
        for each in models:
            torch.testing.assert_close(each.scores(TokenRows.of(ROWS[:1]))[0], score)
        saved = save_scalar_model(model, tokenizer, tmp_path / "saved", card=ModelCard("reward", "x"))
        again = load_scalar_model(saved, tokenizer=tokenizer)
        torch.testing.assert_close(again.scores(TokenRows.of(ROWS[:1]))[0], score)


@pytest.mark.parametrize("pad", [0, 2])
def test_whether_a_reward_model_pads_with_eos_is_the_files_for_every_role_on_its_base(tmp_path, pad):
    folder = save_tiny_reward_model(tmp_path / "foreign")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": pad}))
    tokenizer, bases = load_tokenizer(folder), Bases()
    for given in ({}, {"bases": bases}, {"bases": bases, "adapter": AdapterSettings(rank=2)}):
        assert load_scalar_model(folder, tokenizer=tokenizer, **given).pads_with_eos == (pad == 2)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"normalize_reward": True, "std": 0.0}, "std is 0.0; it must be positive"),
        ({"normalize_reward": True, "mean": "much"}, "mean is 'much'; it must be a finite number"),
        ({"head": "v_head.summary", "bias": float("nan")}, "its head contain NaN"),
    ],
)
def test_a_foreign_head_that_cannot_be_right_is_refused(tmp_path, settings, line):
    folder = save_foreign_reward_model(tmp_path / "foreign", **{"head": "value_head", **settings})
    with pytest.raises(ModelError, match=line):
        load_scalar_model(folder, tokenizer=load_tokenizer(folder))


@pytest.mark.parametrize("parts", [1, 2], ids=["one file", "shards"])
@pytest.mark.parametrize(
    ("first", "last", "width"),
    [("score.0", "score.2", 16), ("score.dense", "score.out_proj", 16), ("v_head.0", "v_head.2", 8)],
)
def test_a_head_of_several_layers_is_not_read_as_its_last_one(tmp_path, first, last, width, parts):
    folder = save_foreign_reward_model(tmp_path / "foreign", "value_head")
    weights = load_file(folder / "model.safetensors")
    weights[f"{last}.weight"] = weights.pop("value_head.weight")[:, :width].clone()
    rest = {f"{first}.weight": torch.ones(width, 16), f"{first}.bias": torch.ones(width)}
    if parts == 1:
        weights |= rest
    else:
        save_file(rest, folder / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = load_tokenizer(folder)
    line = rf"several layers \({first}.bias, {first}.weight, {last}.weight\), and kedge reads one linear layer"
    for given in ({}, {"init": "any"}, {"bases": Bases()}):
        with pytest.raises(ModelError, match=line):
            load_scalar_model(folder, tokenizer=tokenizer, **given)
    assert load_scalar_model(folder, tokenizer=tokenizer, init="fresh").has_new_head, "its trunk can be used"


@pytest.mark.parametrize(
    "others",
    [{"value_head.mean": (), "value_head.std": ()}, {"value_head.cost.weight": (3, 16)}],
    ids=["scale", "costs"],
)
def test_what_lies_beside_a_head_is_no_layer_of_it(tmp_path, others):
    folder = save_foreign_reward_model(tmp_path / "foreign", "value_head")
    others = {name: torch.ones(shape) for name, shape in others.items()}
    save_file(others, folder / "others.safetensors", metadata={"format": "pt"})
    assert not load_scalar_model(folder, tokenizer=load_tokenizer(folder)).has_new_head


def test_a_row_in_a_part_that_transformers_ignores_is_no_head(tmp_path, monkeypatch):
    """As the gate of a shared expert in layers that predict several tokens."""
    folder = save_tiny_policy(tmp_path / "policy")
    layers = {"mtp.gate.weight": torch.ones(1, 16), "mtp.fc.weight": torch.ones(16, 32)}
    save_file(layers, folder / "mtp.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(LlamaForSequenceClassification, "_keys_to_ignore_on_load_unexpected", [r"^mtp\."])
    assert load_scalar_model(folder, tokenizer=load_tokenizer(folder), init="any").has_new_head


def test_two_heads_of_one_row_are_none(tmp_path):
    folder = save_foreign_reward_model(tmp_path / "foreign", "value_head")
    save_file({"other.weight": torch.ones(1, 16)}, folder / "other.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="no trained scalar head"):
        load_scalar_model(folder, tokenizer=load_tokenizer(folder))


def test_a_head_of_two_rows_is_named(tmp_path):
    folder = save_tiny_reward_model(tmp_path / "two")
    weights = load_file(folder / "model.safetensors")
    weights["score.weight"] = torch.zeros(2, 16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="exactly one label; this model has 2"):
        load_scalar_model(folder, tokenizer=load_tokenizer(folder))
