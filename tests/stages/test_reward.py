"""Reward models end to end: they learn an order, report their accuracy, and score the same after a reload."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, BertConfig

from kedge.config import load_config, with_values
from kedge.data import Comparison, Demonstration, Ranking, encode_example
from kedge.models import ScalarModel, TokenRows, load_scalar_model, load_tokenizer
from kedge.models.packing.trunk import Trunk
from kedge.runs.run import Resume
from kedge.stages.reward import run_reward, train_reward_model
from kedge.training.supervised import reward_model
from kedge_base.errors import ConfigError, DataError, ModelError
from kedge_base.run_folder.record_format import read_metrics
from kedge_plan.plan import count_stage
from kedge_plan.rows import Lengths
from tests.forking import forked_kedge
from tests.lab.evaluation.speakers import run_kedge
from tests.tiny import (
    CHAT_TEMPLATE,
    FAMILIES,
    save_tiny_policy,
    save_tiny_reward_model,
    tiny_reward_model,
    tiny_tokenizer,
)

# The shorter answers are preferred.
COMPARISONS = [Comparison(f"Deck {number}:", " sun and sea", " rope rope rope rope rope") for number in range(12)]
ROWS = [{"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected} for pair in COMPARISONS]
DEMONSTRATIONS = [Demonstration(f"Deck {number}:", " the tide went out") for number in range(5)]
SETTINGS = ["reward_model.learning_rate=0.01", "reward_model.batch_size=4", "reward_model.num_epochs=3"]
TRAINING = {"learning_rate": 0.01, "batch_size": 4, "num_epochs": 3}


def config_for(tmp_path: Path, *more: str):
    if not (tmp_path / "base").exists():
        save_tiny_policy(tmp_path / "base")
    flags = {"model": str(tmp_path / "base"), "out": str(tmp_path / "run")}
    return load_config(None, [*SETTINGS, "runtime.report=false", "data.eval_fraction=0.25", *more], flags)


def scores(model: ScalarModel, records: list[Demonstration]) -> torch.Tensor:
    tokenizer = tiny_tokenizer()
    examples = [encode_example(tokenizer, record.prompt, record.completion) for record in records]
    with torch.no_grad():
        return model.scores(TokenRows.of([[*example.prompt, *example.completion] for example in examples]))


@pytest.mark.parametrize("family", FAMILIES)
def test_it_learns_an_order_and_knows_that_length_does_not_explain_it(family):
    model = ScalarModel(tiny_reward_model(family), tiny_tokenizer())
    report = train_reward_model(model, tiny_tokenizer(), COMPARISONS[:8], held_out=COMPARISONS[8:], **TRAINING)
    assert report.agreement is not None
    assert report.agreement.accuracy.value == 1.0
    assert report.agreement.length_accuracy.value == 0.0
    assert len(report.agreement.chosen) == 4
    assert report.outcome.evaluation["accuracy"] == 1.0


def test_plain_rows_for_a_model_with_a_chat_template_are_said(tmp_path, capsys):
    """A reward model of plain text would score the conversations that PPO samples."""
    save_tiny_policy(tmp_path / "base", tokenizer=tiny_tokenizer(chat_template=CHAT_TEMPLATE))
    answers = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in ROWS]
    columns = {
        "comparisons": "data.columns.comparisons.instruction=prompt",
        "demonstrations": (
            "data.columns.demonstrations.instruction=prompt data.columns.demonstrations.output=completion"
        ),
    }
    said = {}
    for out, more in (("text", []), ("chat", " ".join(columns.values()).split())):
        flags = {"model": str(tmp_path / "base"), "out": str(tmp_path / out)}
        config = load_config(None, [*SETTINGS, "runtime.report=false", "data.eval_fraction=0.25", *more], flags)
        run_reward(config, comparisons=ROWS, demonstrations=answers)
        lines = capsys.readouterr().err.splitlines()
        said[out] = {role: next(line for line in lines if line.startswith(f"{role}: ")) for role in columns}
    for role, named in columns.items():
        assert f"plain text, without the chat template ({named} makes" in said["text"][role]
        assert "plain text" not in said["chat"][role]


@pytest.mark.parametrize("normalize_scale", [False, True])
def test_the_mean_score_on_the_demonstrations_becomes_0(normalize_scale):
    model = ScalarModel(tiny_reward_model(), tiny_tokenizer())
    report = train_reward_model(
        model, tiny_tokenizer(), COMPARISONS, demonstrations=DEMONSTRATIONS, normalize_scale=normalize_scale, **TRAINING
    )
    after = scores(model, DEMONSTRATIONS)
    assert report.mean != 0.0
    assert after.mean().item() == pytest.approx(0.0, abs=1e-5)
    if normalize_scale:
        assert after.std(correction=0).item() == pytest.approx(1.0, abs=1e-4)
    else:
        assert report.std == 1.0


def test_an_encoder_whose_scores_cannot_be_scaled_is_refused_before_it_is_trained():
    config = BertConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=1
    )
    model = ScalarModel(AutoModelForSequenceClassification.from_config(config), tiny_tokenizer())
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    with pytest.raises(ModelError, match="normalize_scale=true does not work with an encoder"):
        train_reward_model(
            model, tiny_tokenizer(), COMPARISONS, demonstrations=DEMONSTRATIONS, normalize_scale=True, **TRAINING
        )
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_without_demonstrations_the_preferred_answers_are_the_zero():
    chosen = [Demonstration(pair.prompt, pair.chosen) for pair in COMPARISONS]
    for normalize in (None, "comparisons"):
        model = ScalarModel(tiny_reward_model(), tiny_tokenizer())
        train_reward_model(model, tiny_tokenizer(), COMPARISONS, normalize=normalize, **TRAINING)
        assert scores(model, chosen).mean().item() == pytest.approx(0.0, abs=1e-5)
    model = ScalarModel(tiny_reward_model(), tiny_tokenizer())
    train_reward_model(model, tiny_tokenizer(), COMPARISONS, normalize="none", **TRAINING)
    assert model.shift.item() == 0.0
    with pytest.raises(ConfigError, match="needs demonstrations"):
        train_reward_model(model, tiny_tokenizer(), COMPARISONS, normalize="demonstrations", **TRAINING)


def test_of_many_texts_some_evenly_spread_ones_are_the_zero(monkeypatch):
    """Scoring all of a large data set in fp32 would take as long as training on it."""
    monkeypatch.setattr(reward_model, "MOST_REFERENCES", 2)
    model = ScalarModel(tiny_reward_model(), tiny_tokenizer())
    train_reward_model(model, tiny_tokenizer(), COMPARISONS, demonstrations=DEMONSTRATIONS, **TRAINING)
    assert scores(model, DEMONSTRATIONS[::3]).mean().item() == pytest.approx(0.0, abs=1e-5)  # 5 texts: each third
    assert scores(model, DEMONSTRATIONS).mean().item() != pytest.approx(0.0, abs=1e-5)


def test_two_ranked_responses_are_a_comparison():
    rankings = [Ranking(pair.prompt, (pair.rejected, pair.chosen), (2.0, 1.0)) for pair in COMPARISONS]
    trained = []
    for records in (COMPARISONS, rankings):
        model = ScalarModel(tiny_reward_model(), tiny_tokenizer())
        train_reward_model(model, tiny_tokenizer(), records, **TRAINING)
        trained.append(scores(model, DEMONSTRATIONS))
    assert torch.equal(*trained)


def test_ranked_lists_of_different_lengths_are_learned_together():
    good, fair, bad = " sun and sea", " the boat lay", " rope rope rope"
    records = [
        Ranking(f"Deck {number}:", (bad, good, fair)[: 2 + number % 2], (3.0, 1.0, 2.0)[: 2 + number % 2])
        for number in range(12)
    ]
    model = ScalarModel(tiny_reward_model(), tiny_tokenizer())
    train_reward_model(model, tiny_tokenizer(), records, learning_rate=0.01, batch_size=4, num_epochs=10)
    ordered = scores(model, [Demonstration("Deck 99:", text) for text in (good, fair, bad)]).tolist()
    assert ordered == sorted(ordered, reverse=True)


def test_a_run_leaves_a_model_that_scores_the_same_after_a_reload(tmp_path):
    config = config_for(tmp_path)
    rows = [{"prompt": record.prompt, "completion": record.completion} for record in DEMONSTRATIONS]
    result = run_reward(config, comparisons=ROWS, demonstrations=rows)
    model = load_scalar_model(result.model, tokenizer=load_tokenizer(result.model))
    assert model.shift.item() != 0.0
    assert scores(model, DEMONSTRATIONS).mean().item() == pytest.approx(0.0, abs=1e-5)
    torch.testing.assert_close(
        scores(model, DEMONSTRATIONS), scores(model, DEMONSTRATIONS[::-1]).flip(0), rtol=0, atol=1e-5
    )
    plain = AutoModelForSequenceClassification.from_pretrained(result.model)
    assert plain.config.num_labels == 1

    summary = json.loads((result.folder / "summary.json").read_text(encoding="utf-8"))
    assert summary == result.summary
    assert summary["num_comparisons"] == 9
    assert summary["num_pairs"] == 3
    assert summary["accuracy"]["value"] == 1.0
    assert summary["length_accuracy"]["value"] == 0.0
    assert sum(part["num_pairs"] for part in summary["calibration_bins"]) == 3
    assert "held-out accuracy" in (result.model / "README.md").read_text(encoding="utf-8")
    assert read_metrics(result.folder)[-1]["eval/accuracy"] == 1.0


def test_activations_that_are_computed_again_change_no_score(tmp_path, monkeypatch):
    layers = []
    enabled = Trunk.checkpoint_activations
    monkeypatch.setattr(Trunk, "checkpoint_activations", lambda trunk: layers.append(enabled(trunk)))
    found = []
    for again in ("false", "true"):
        config = config_for(tmp_path / again, f"runtime.activation_checkpointing={again}")
        model = run_reward(config, comparisons=ROWS).model
        found.append(scores(load_scalar_model(model, tokenizer=load_tokenizer(model)), DEMONSTRATIONS))
    assert len(layers) == 1
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-3)


def test_a_reward_model_is_trained_further_from_its_trained_head(tmp_path, capfd):
    save_tiny_reward_model(tmp_path / "base", seed=3)
    rate = "reward_model.learning_rate=1e-12"
    result = run_reward(config_for(tmp_path, rate, "reward_model.normalize=none"), comparisons=ROWS)
    trained = [AutoModelForSequenceClassification.from_pretrained(each) for each in (tmp_path / "base", result.model)]
    torch.testing.assert_close(trained[1].score.weight, trained[0].score.weight)
    said = capfd.readouterr().err
    assert f"{tmp_path / 'base'} is a reward model: it is trained further, with its head." in said
    [following] = [line for line in said.splitlines() if line.startswith("Next:")]
    assert "ppo" in following
    assert str(tmp_path / "base") not in following, "the reward model that it started from is no policy"


def test_an_encoder_that_scores_whole_texts_is_trained_further(tmp_path, capfd):
    config = BertConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=1,
        initializer_range=0.2, pad_token_id=0,
    )  # fmt: skip
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    config = config_for(tmp_path, "runtime.activation_checkpointing=true")
    with pytest.raises(ModelError, match="BertForSequenceClassification scores whole texts"):
        count_stage(config, "reward", lengths=Lengths((4,), (4,)))
    capfd.readouterr()
    result = run_reward(config, comparisons=ROWS)
    assert result.summary["accuracy"]["value"] == 1.0
    assert "is not for BertForSequenceClassification, which keeps them" in capfd.readouterr().err


def test_the_command_runs_the_same_twice(tmp_path):
    save_tiny_policy(tmp_path / "base")
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    for name, run in (("a", run_kedge), ("b", forked_kedge)):
        command = ["reward", "--model", tmp_path / "base", "--data", data, "--out", tmp_path / name, *SETTINGS]
        done = run(*command, "runtime.report=false")
        assert done.returncode == 0, done.stderr
    summaries = [(tmp_path / name / "summary.json").read_bytes() for name in ("a", "b")]
    assert summaries[0] == summaries[1]


TIED = [
    {"prompt": f"Deck {number}:", "responses": [" sun", " sea", " rope rope rope"], "ranks": [1, 1, 2]}
    for number in range(6)
] + [{"prompt": f"Hull {number}:", "responses": [" sun", " sea"], "ranks": [1, 1]} for number in range(6)]


@pytest.mark.parametrize("ties", ["davidson", "rao_kupper"])
def test_ties_are_learned_from_and_resumed_bit_exactly(tmp_path, ties):
    settings = [f"reward_model.ties={ties}", "checkpoint.every=2"]
    whole = run_reward(config_for(tmp_path, *settings), comparisons=TIED)
    assert whole.summary["num_comparisons"] + 3 == len(TIED)
    again = load_config(None, [*SETTINGS, "runtime.report=false", "data.eval_fraction=0.25", *settings])
    again = with_values(again, {"model": str(tmp_path / "base"), "out": str(tmp_path / "again")})

    def stop(update):
        if update.number == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_reward(again, comparisons=TIED, callback=stop)
    resumed = run_reward(again, comparisons=TIED, resume=Resume())
    weights = [each.model / "model.safetensors" for each in (whole, resumed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert resumed.summary == whole.summary
    assert resumed.summary["tie"] > -10
    assert load_scalar_model(str(whole.model), tokenizer=tiny_tokenizer()).scores  # scoring needs no tie


def test_the_chance_of_ties_is_learned(tmp_path):
    """Four of five pairs of equal texts are tied: the chance of a tie approaches that from any start."""
    same = [Ranking(f"Deck {number}:", (" sun", " sea"), (1.0, 1.0 + (number % 5 == 0))) for number in range(40)]
    model = ScalarModel(tiny_reward_model("llama"), tiny_tokenizer())
    found = train_reward_model(model, tiny_tokenizer(), same, ties="davidson", **{**TRAINING, "num_epochs": 5})
    assert found.tie == pytest.approx(math.log(2 * 0.8 / 0.2), abs=0.5)


def test_without_a_model_of_ties_rows_of_equal_ranks_are_dropped_with_a_hint(tmp_path):
    with pytest.raises(DataError, match=r"'ranks' are equal.*reward_model\.ties=davidson learns from ties"):
        run_reward(config_for(tmp_path), comparisons=TIED)
    kept = run_reward(config_for(tmp_path, "data.max_rejected_fraction=0.5"), comparisons=TIED)
    assert "tie" not in kept.summary
    assert kept.summary["num_comparisons"] < 6
