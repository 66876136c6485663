"""The PPO stage end to end on tiny models: its files, bit-identical repetition, and rejected inputs."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, BertConfig

from kedge.config import config_from_settings
from kedge.models import load_language_model
from kedge.models.packing.trunk import Trunk
from kedge.stages.ppo import critics, roles, run_ppo
from kedge.stages.ppo import trainer as ppo_trainer
from kedge.training.pretraining_mix import PretrainingMix
from kedge_base.errors import ConfigError, DataError, KedgeError, ModelError, OutputError, RewardError
from kedge_base.run_folder.record_format import MEASURED, read_json_lines, read_samples
from tests.forking import forked_kedge, started_kedge
from tests.lab.evaluation.speakers import save_speaker
from tests.tiny import CHAT_TEMPLATE, FAMILIES, save_tiny_policy, save_tiny_reward_model, tiny_tokenizer

PROMPTS = ["The boat", "A sailor", "My rope broke", "Once upon a time", "The tide", "The sun"]
REWARD = """
def vowels(completions, **_):
    return [sum(letter in "aeiou" for letter in text) / 10 for text in completions]
"""
WANTED = """
def wanted(completions, letter, **_):
    return [float(wish in text) for wish, text in zip(letter, completions)]
"""
METRICS = {
    "objective/kl",
    "policy/approx_kl",
    "policy/clip_fraction",
    "policy/entropy",
    "value/explained_variance",
    "value/clip_fraction",
    "reward/score_mean",
    "reward/kl",
    "response/length",
    "response/eos_rate",
    "tokens_per_second",
    "time/rollout",
    "time/update",
}


def vowels(completions, **_):
    return [sum(letter in "aeiou" for letter in text) / 10 for text in completions]


def varied(completions, **_):
    """Scores that differ; a random model writes next to no vowels, so that those of `vowels` can be all alike."""
    return [sum(map(ord, text)) % 10 / 10 for text in completions]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    return save_tiny_reward_model(tmp_path_factory.mktemp("models") / "reward", seed=3)


def configure(policy, out, **settings):
    defaults = {
        "model": str(policy),
        "out": str(out),
        "num_updates": 2,
        "num_prompts": 4,
        "num_minibatches": 2,
        "num_epochs": 2,
        "max_new_tokens": 8,
        "learning_rate": 1e-3,
        "report": False,
        "num_fixed_prompts": 0,
    }
    return config_from_settings("ppo", {**defaults, **settings})


def metrics_without_times(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in rows]


def copies_at(update, run, copy):
    """For `on_update`: copies a run's folder in the middle of an update, as a machine that is lost would leave it."""

    def copy_once(made, *_):
        if getattr(made, "number", made) == update:
            shutil.copytree(run, copy)

    return copy_once


def kedge(*arguments, cwd):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "kedge", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_a_run_leaves_metrics_samples_and_a_model_that_plain_transformers_loads(tmp_path, family, critic):
    source = save_tiny_policy(tmp_path / "policy", family, tokenizer=tiny_tokenizer(chat_template=CHAT_TEMPLATE))
    out = tmp_path / "run"
    result = run_ppo(configure(source, out, critic=critic, num_fixed_prompts=2), prompts=PROMPTS, reward=vowels)
    assert [row["update"] for row in result.metrics] == [1, 2]
    assert set(result.metrics[0]) >= METRICS
    assert result.metrics[0]["objective/kl"] == pytest.approx(0.0, abs=1e-5)
    assert yaml.safe_load((out / "config.yaml").read_text())["ppo"]["critic"] == critic
    samples = read_samples(out)
    assert [row["update"] for row in samples if row["fixed"] is None] == [1] * 4 + [2] * 4
    assert [(row["update"], row["fixed"], row["prompt"]) for row in samples if row["fixed"] is not None] == [
        (update, number, PROMPTS[number]) for update in (0, 2) for number in (0, 1)
    ]
    assert all(len(row["entropies"]) == len(row["new_logprobs"]) for row in samples if row["fixed"] is None)
    details = read_json_lines(out / "details.jsonl")
    assert [len(row["epochs"]) for row in details] == [2, 2]
    for row, metrics in zip(details, result.metrics, strict=True):
        held = [epoch["clip_fraction"] for epoch in row["epochs"]]
        assert metrics["policy/clip_fraction"] == pytest.approx(sum(held) / 2)  # minibatches of one size, nearly
    model: Any = AutoModelForCausalLM.from_pretrained(result.model)
    tokenizer = AutoTokenizer.from_pretrained(result.model)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    prompt = tokenizer("The boat", return_tensors="pt")
    generated = model.generate(**prompt, max_new_tokens=5, do_sample=True)
    assert generated.shape[1] > prompt["input_ids"].shape[1]
    assert "updates | 2" in (result.model / "README.md").read_text()
    before, after = load_file(source / "model.safetensors"), load_file(result.model / "model.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_the_same_seed_gives_the_same_metrics_bit_for_bit_and_another_seed_does_not(tmp_path, policy, critic):
    for name, seed in (("one", 5), ("two", 5), ("three", 6)):
        run_ppo(configure(policy, tmp_path / name, seed=seed, critic=critic), prompts=PROMPTS, reward=vowels)
    one, two, three = (metrics_without_times(tmp_path / name) for name in ("one", "two", "three"))
    assert one == two
    assert one != three
    assert (tmp_path / "one/samples.jsonl").read_bytes() == (tmp_path / "two/samples.jsonl").read_bytes()


def test_micro_batches_change_nothing_but_memory(tmp_path, policy):
    for name, tokens, rows in (("whole", None, None), ("split", 1, 1)):
        settings = {"micro_batch_tokens": tokens, "micro_batch_size": rows}
        run_ppo(configure(policy, tmp_path / name, **settings), prompts=PROMPTS, reward=varied)
    whole_rows, split_rows = (metrics_without_times(tmp_path / name) for name in ("whole", "split"))
    for whole, split in zip(whole_rows, split_rows, strict=True):
        assert split == pytest.approx(whole, abs=1e-3)  # the second update samples from weights that differ by rounding


@pytest.mark.parametrize(
    ("settings", "num_models", "measured"),
    [
        ({"kl_coef": 0.0}, 1, False),
        ({"kl_coef": 0.0, "measure_kl": True}, 2, True),
        ({"kl_coef": 0.0, "max_kl": 1e6}, 2, True),
        ({"kl_coef": 0.1}, 2, True),
    ],
    ids=["unpaid", "measured", "bounded", "paid"],
)
def test_a_reference_is_loaded_only_where_something_is_asked_of_it(
    tmp_path, policy, monkeypatch, settings, num_models, measured
):
    loaded = []

    def load(*arguments, **more):
        loaded.append(load_language_model(*arguments, **more))
        return loaded[-1]

    for module in (roles, critics):
        monkeypatch.setattr(module, "load_language_model", load)
    rows = run_ppo(configure(policy, tmp_path / "run", **settings), prompts=PROMPTS, reward=vowels).metrics
    assert len(loaded) == num_models
    assert all(("objective/kl" in row) == measured for row in rows)
    if not settings["kl_coef"]:
        assert all(row["reward/kl"] == pytest.approx(0.0, abs=1e-6) for row in rows)
    if measured:
        assert rows[0]["objective/kl"] == pytest.approx(0.0, abs=1e-5)
        assert rows[1]["objective/kl"] != 0.0


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_activations_that_are_computed_again_change_nothing_but_memory(tmp_path, policy, critic, monkeypatch):
    given_back = []
    monkeypatch.setattr("kedge.stages.ppo.trainer.give_back", lambda: given_back.append(name))
    for name, checkpointing in (("kept", False), ("again", True)):
        config = configure(policy, tmp_path / name, critic=critic, activation_checkpointing=checkpointing)
        run_ppo(config, prompts=PROMPTS, reward=vowels)
    assert given_back == ["again"] * config.ppo.num_updates
    for kept, again in zip(*(metrics_without_times(tmp_path / name) for name in ("kept", "again")), strict=True):
        assert again["flops/train"] == pytest.approx(4 / 3 * kept["flops/train"])
        names = [name for name in kept if not name.startswith(("flops/", "cost/"))]
        # The second update samples from weights that differ by rounding.
        assert [again[name] for name in names] == pytest.approx([kept[name] for name in names], abs=1e-3)


@pytest.mark.parametrize(("precision", "exact"), [("fp32", True), ("bf16", False)])
def test_what_the_sampler_noted_is_taken_over_where_it_is_exact(tmp_path, policy, monkeypatch, precision, exact):
    reused, evaluate = [], ppo_trainer.evaluate_rollout

    def spy(rollout, models, **settings):
        reused.append(models.reuse_sampled)
        return evaluate(rollout, models, **settings)

    monkeypatch.setattr(ppo_trainer, "evaluate_rollout", spy)
    run_ppo(configure(policy, tmp_path / "run", precision=precision), prompts=PROMPTS, reward=vowels)
    assert reused == [exact, exact]


def test_a_separate_critic_starts_as_the_reward_model(tmp_path, policy, reward_model):
    config = configure(policy, tmp_path / "run", critic="separate", reward=str(reward_model), learning_rate=0.0)
    seen = []
    run_ppo(config, prompts=PROMPTS, on_update=lambda update, roles: seen.append(roles.actor_critic.critic))
    weights = load_file(reward_model / "model.safetensors")
    for name, parameter in seen[0].classifier.named_parameters():
        assert torch.equal(parameter.cpu(), weights[name]), name


def test_a_reward_model_with_another_tokenizer_scores_but_cannot_become_the_critic(tmp_path, policy):
    foreign = save_tiny_reward_model(tmp_path / "foreign", "gpt2", tokenizer=tiny_tokenizer(vocab_size=280))
    result = run_ppo(configure(policy, tmp_path / "run", reward=str(foreign)), prompts=PROMPTS)
    assert len(result.metrics) == 2
    with pytest.raises(ConfigError, match=r"ppo\.critic_init=reward.*another tokenizer"):
        run_ppo(
            configure(policy, tmp_path / "other", reward=str(foreign), critic="separate", critic_init="reward"),
            prompts=PROMPTS,
        )


def test_the_model_with_the_shortest_context_is_named(tmp_path, policy, capsys):
    def reward(name, **settings):
        folder = save_tiny_reward_model(tmp_path / name, **settings)
        description = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**description, "max_position_embeddings": 12}))
        return str(folder)

    with pytest.raises(ConfigError, match=r"max_new_tokens=12 .* prompt: reward model 'judge' reads at most 12 tokens"):
        run_ppo(configure(policy, tmp_path / "run", reward=reward("judge"), max_new_tokens=12), prompts=PROMPTS)
    foreign = reward("foreign", tokenizer=tiny_tokenizer(vocab_size=280))
    with pytest.raises(RewardError, match="reads at most 12 tokens"):
        run_ppo(configure(policy, tmp_path / "run", reward=foreign, max_new_tokens=12), prompts=PROMPTS)
    said = capsys.readouterr().err
    assert "reward model 'foreign' reads at most 12 of its tokens, and the longest prompt and a response" in said


@pytest.mark.parametrize("shift", [-20.0, 20.0])
def test_responses_without_a_stop_token_score_minus_one_or_less_with_a_reward_model(tmp_path, shift, capsys):
    """Less if the model's scores lie lower; here no response stops, so all scores of the first update decide."""
    folder = shifted_reward_model(tmp_path / "judge", shift)
    settings = {"reward": str(folder), "max_new_tokens": 1, "num_fixed_prompts": 2}
    speaker = save_speaker(tmp_path / "policy")  # every response is "e"
    metrics = run_ppo(configure(speaker, tmp_path / "run", **settings), prompts=PROMPTS).metrics
    samples = read_samples(tmp_path / "run")
    prompts = [row["prompt"] for row in samples if row["update"] == 1 and row["fixed"] is None]
    plain = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        rows = [torch.tensor([tiny_tokenizer().encode(text) + tiny_tokenizer().encode("e")]) for text in prompts]
        scores = torch.cat([plain(row).logits[:, 0] for row in rows]) - shift
    expected = min(-1.0, float(scores.mean() - scores.std(correction=0)))
    assert (expected < -10) == (shift > 0)
    assert [row["response/eos_rate"] for row in metrics] == [0.0, 0.0]
    for row in metrics:
        assert row["reward/missing_eos_score"] == pytest.approx(expected, abs=1e-4)
        assert row["reward/score_mean"] == pytest.approx(expected, abs=1e-4)
    # The fixed prompts too, also before the first update.
    assert [row["score"] for row in samples] == pytest.approx([expected] * len(samples), abs=1e-4)
    said = f"A response without a stop token scores {expected:.4g} (rollout.missing_eos_score=auto)"
    assert said in capsys.readouterr().err


def test_a_dropped_first_update_leaves_the_start_to_the_next(tmp_path, policy, capsys):
    calls = []

    def nan_at_first(completions):
        calls.append(len(completions))
        return [math.nan if len(calls) == 1 else 0.0] * len(completions)

    config = configure(policy, tmp_path / "run", num_updates=3, num_fixed_prompts=1, on_nonfinite="skip")
    rewards = [str(shifted_reward_model(tmp_path / "judge", 5.0)), nan_at_first]
    run_ppo(config, prompts=PROMPTS, reward=rewards)
    fixed = [row["update"] for row in read_json_lines(tmp_path / "run" / "samples.jsonl") if row["fixed"] is not None]
    assert fixed == [0, 3]
    assert "A response without a stop token scores -" in capsys.readouterr().err


@pytest.mark.usefixtures("unchecked")  # a training
@pytest.mark.parametrize(("missing", "stops_more_often"), [("auto", True), (-1.0, False)])
def test_scores_below_minus_one_do_not_teach_the_policy_not_to_stop(tmp_path, policy, missing, stops_more_often):
    folder = shifted_reward_model(tmp_path / "judge", 5.0)
    stopping = save_often_stopping(policy, tmp_path / "policy")
    sizes = {"num_updates": 6, "num_prompts": 48, "num_minibatches": 4, "num_epochs": 2}
    settings = {**sizes, "kl_coef": 0.0, "learning_rate": 5e-3, "missing_eos_score": missing}
    metrics = run_ppo(configure(stopping, tmp_path / "run", reward=str(folder), **settings), prompts=PROMPTS).metrics
    first, *_, second_last, last = (row["response/eos_rate"] for row in metrics)
    assert -6 < metrics[0]["score/judge"] < -4
    assert first == pytest.approx(0.42, abs=0.1)
    rate = (second_last + last) / 2
    assert (rate > 0.6) if stops_more_often else (rate < 0.25)


def shifted_reward_model(folder, shift):
    """A random reward model whose scores are lower by `shift`."""
    save_tiny_reward_model(folder, seed=3)
    description = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**description, "kedge_score_shift": shift}))
    return folder


def save_often_stopping(policy, folder):
    """The policy with a larger probability of EOS, whose output weights point along the mean of its hidden states."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(policy), AutoTokenizer.from_pretrained(policy)
    with torch.no_grad():
        texts = [torch.tensor([tokenizer.encode(prompt)]) for prompt in PROMPTS]
        hidden = torch.cat([model.model(ids).last_hidden_state[0] for ids in texts])
        logits, mean = model.lm_head(hidden), hidden.mean(0)
        model.lm_head.weight[tokenizer.eos_token_id] = mean / mean.dot(mean) * (logits.logsumexp(-1).mean() - 3.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_judge_changes_no_figure_but_its_own_and_no_weight(tmp_path, policy, reward_model):
    judge = save_tiny_reward_model(tmp_path / "critic" / "judge", seed=8)
    description = json.loads((judge / "config.json").read_text())
    (judge / "config.json").write_text(json.dumps({**description, "max_position_embeddings": 14}))
    (tmp_path / "reward.py").write_text(REWARD)
    prompts = [*PROMPTS, "A prompt that is longer than what the judge reads"]
    settings = {"critic": "separate", "critic_init": "auto", "num_prompts": 7, "num_minibatches": 1}
    for name, own in (("model", {str(reward_model): 1.0}), ("function", {f"{tmp_path}/reward.py:vowels": 1.0})):
        alone, judged = tmp_path / f"{name}-alone", tmp_path / f"{name}-judged"
        run_ppo(configure(policy, alone, reward=own, **settings), prompts=prompts)
        run_ppo(configure(policy, judged, reward={**own, str(judge): 0.0}, **settings), prompts=prompts)
        rows, others = metrics_without_times(alone), metrics_without_times(judged)
        assert all(math.isfinite(row.pop("score/judge")) and row.pop("flops/judge") > 0 for row in others)
        assert rows == others
        assert ("reward/missing_eos_score" in rows[0]) == (name == "model")
        assert (alone / "model/model.safetensors").read_bytes() == (judged / "model/model.safetensors").read_bytes()


def save_pooled_reward_model(folder):
    """A classifier with a pooled head and the policy's tokens."""
    config = BertConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_a_model_that_scores_whole_texts_is_not_copied_as_the_critic(tmp_path, policy):
    settings = {"critic": "separate", "reward": str(save_pooled_reward_model(tmp_path / "pooled"))}
    critics = []
    config = configure(policy, tmp_path / "run", learning_rate=0.0, num_updates=1, **settings)
    run_ppo(config, prompts=PROMPTS, on_update=lambda update, roles: critics.append(roles.actor_critic.critic))
    weights = load_file(policy / "model.safetensors")
    for name, parameter in critics[0].classifier.base_model.named_parameters():
        assert torch.equal(parameter.cpu(), weights[f"model.{name}"]), name
    with pytest.raises(ConfigError, match=r"ppo\.critic_init=reward.*one that only scores whole texts"):
        run_ppo(configure(policy, tmp_path / "other", critic_init="reward", **settings), prompts=PROMPTS)


@pytest.mark.parametrize(("critic_init", "rate"), [("policy", 10.0), ("reward", 1.0)])
def test_the_new_head_of_a_separate_critic_has_a_rate_of_its_own(tmp_path, policy, reward_model, critic_init, rate):
    rates, others = [], []

    def note(update, roles):
        head = roles.actor_critic.critic.head.weight
        for group in roles.optimizer.param_groups:
            (rates if any(each is head for each in group["params"]) else others).append(group["lr"])

    settings = {"reward": str(reward_model), "critic": "separate", "critic_init": critic_init, "schedule": "constant"}
    settings["value_unit"] = "score"  # else the rate is in the unit of the returns
    run_ppo(configure(policy, tmp_path / "run", num_updates=1, **settings), prompts=PROMPTS, on_update=note)
    assert rates == [pytest.approx(rate * 1e-3)]
    assert set(others) == {1e-3}


def test_any_stop_token_is_an_end_for_scores_metrics_samples_and_the_saved_model(tmp_path, reward_model, capsys):
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE.replace("{{ eos_token }}", "<end_of_turn>"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end_of_turn>"]})
    end, period = (tokenizer.convert_tokens_to_ids(token) for token in ("<end_of_turn>", "."))
    source = save_speaker(tmp_path / "policy", "<end_of_turn>", tokenizer=tokenizer)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, period]}))
    config = configure(source, tmp_path / "run", reward=str(reward_model), num_updates=1)
    result = run_ppo(config, prompts=PROMPTS)
    assert result.metrics[0]["response/eos_rate"] == 1.0
    assert result.metrics[0]["reward/score_mean"] != -1.0  # the score of a response without an end
    samples = read_samples(result.folder)
    assert all(row["stopped"] and row["tokens"] == ["<end_of_turn>"] and row["response"] == "" for row in samples)
    generation = json.loads((result.model / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, period, end]
    assert "responses end with <eos> or . or <end_of_turn>" in capsys.readouterr().err.splitlines()


def test_several_rewards_with_weights_and_columns(tmp_path, policy):
    (tmp_path / "rewards.py").write_text(REWARD + WANTED)
    rows = [{"prompt": prompt, "letter": "e"} for prompt in PROMPTS]
    reward = {f"{tmp_path}/rewards.py:wanted": 2.0, f"{tmp_path}/rewards.py:vowels": -1.0}
    result = run_ppo(configure(policy, tmp_path / "run", reward=reward, num_updates=1), prompts=rows)
    row = result.metrics[0]
    assert row["reward/score_mean"] == pytest.approx(2 * row["score/wanted"] - row["score/vowels"], abs=1e-5)


def test_responses_without_a_score_are_left_out(tmp_path, policy):
    def half(completions, **_):
        return [1.0 if index % 2 else None for index in range(len(completions))]

    result = run_ppo(configure(policy, tmp_path / "run", num_updates=1), prompts=PROMPTS, reward=half)
    assert result.metrics[0]["reward/unscored"] == 2
    with pytest.raises(RewardError, match="scored none of 4 responses"):
        run_ppo(
            configure(policy, tmp_path / "none", num_updates=1),
            prompts=PROMPTS,
            reward=lambda completions, **_: [None] * len(completions),
        )


@pytest.mark.parametrize(
    "settings",
    [
        {"kl_in": {"loss": "k2"}},
        {"kl_in": "score", "advantage": "monte_carlo"},
        {"kl_controller": "ziegler"},
        {"kl_controller": "schulman"},
        {"policy_loss": "kl_penalty_adaptive"},
        {"policy_loss": "unclipped", "value_clip_range": None, "value_loss": "mse"},
        {"entropy_coef": 0.01, "entropy_target": 2.0, "value_loss": "mse"},
        {"score_at": "after_last", "whiten_rewards": True, "value_loss": "hl_gauss"},
        {"aggregation": "sequence", "policy_loss": {"dual_clip": 3.0}, "clip_range_high": 0.28},
        {"aggregation": "constant", "advantage": "n_step"},
        {"early_stop_kl": 1e-6, "adam_eps": {"tf1": 1e-5}},
        {"value_warmup_updates": 1, "schedule": {"constant": 0.5}},
        {"num_responses": 2, "temperature": 0.7, "kl_coef": 0.0},
        {"precision": "bf16", "value_loss": "hl_gauss", "critic": "separate"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_every_option_of_the_algorithm_runs_and_stays_finite(tmp_path, policy, settings):
    result = run_ppo(configure(policy, tmp_path / "run", **settings), prompts=PROMPTS, reward=vowels)
    assert all(value is not None for row in result.metrics for value in row.values())


def test_pretraining_texts_are_mixed_in(tmp_path, policy):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{prompt} and the sea."}) + "\n" for prompt in PROMPTS))
    config = configure(policy, tmp_path / "run", ptx_coef=1.0, pretraining=str(texts))
    rows = run_ppo(config, prompts=PROMPTS, reward=vowels).metrics
    assert all(row["loss/ptx"] > 0 for row in rows)


def test_a_step_reads_eight_pretraining_texts_per_response_if_asked(tmp_path, policy, monkeypatch):
    texts, drawn = tmp_path / "texts.jsonl", []
    texts.write_text("".join(json.dumps({"text": f"{prompt} and the sea."}) + "\n" for prompt in PROMPTS))
    shares = PretrainingMix.shares

    def counted(self, batch):
        drawn.append(len(batch))
        return shares(self, batch)

    monkeypatch.setattr(PretrainingMix, "shares", counted)
    config = configure(
        policy, tmp_path / "run", ptx_coef={"coef": 1.0, "batch": 8}, pretraining=str(texts), num_minibatches=2
    )
    run_ppo(config, prompts=PROMPTS, reward=vowels)
    assert set(drawn) == {8 * config.responses_per_update // 2}


@pytest.mark.parametrize("settings", [{"critic": "shared"}, {"critic": "separate"}, {"preset": "grpo"}], ids=str)
def test_responses_that_share_a_prompt_are_trained_as_each_by_itself(tmp_path, policy, settings, monkeypatch):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{prompt} and the sea."}) + "\n" for prompt in PROMPTS))
    settings |= {"ptx_coef": 1.0, "pretraining": str(texts), "num_responses": 3, "num_epochs": 3, "num_updates": 1}
    settings |= {"adapter": {"kind": "lora", "rank": 4}, "precision": "fp32"}
    found = []
    for name in ("shared", "alone"):
        if name == "alone":
            monkeypatch.setattr(Trunk, "shares_up_to", 0)
        run_ppo(configure(policy, tmp_path / name, **settings), prompts=PROMPTS, reward=vowels)
        (row,) = metrics_without_times(tmp_path / name)
        found.append({key: each for key, each in row.items() if not key.startswith(("flops/", "memory/", "cost/"))})
    assert found[0] == pytest.approx(found[1], abs=1e-5, rel=1e-5)


def test_learning_rate_zero_leaves_the_weights_and_the_kl_at_zero(tmp_path, policy):
    result = run_ppo(configure(policy, tmp_path / "run", learning_rate=0.0), prompts=PROMPTS, reward=vowels)
    before, after = load_file(policy / "model.safetensors"), load_file(result.model / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(row["objective/kl"] == pytest.approx(0, abs=1e-5) for row in result.metrics)
    assert all(row["policy/clip_fraction"] == 0 for row in result.metrics)


def test_an_error_after_the_first_update_keeps_what_was_learned(tmp_path, policy):
    calls = []

    def fails_later(completions, **_):
        calls.append(len(completions))
        if len(calls) >= 3:  # and again, when it is repeated
            raise ValueError("out of luck")
        return vowels(completions)

    with pytest.raises(RewardError, match="out of luck"):
        run_ppo(configure(policy, tmp_path / "run", num_updates=5), prompts=PROMPTS, reward=fails_later)
    assert len(metrics_without_times(tmp_path / "run")) == 2
    AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")


@pytest.mark.parametrize(
    ("settings", "prompts", "error", "message"),
    [
        ({"model": "no/such/folder"}, PROMPTS, ModelError, "no such folder"),
        ({"max_new_tokens": 300}, PROMPTS, ConfigError, r"max_new_tokens=300 leaves no room.*at most 256 tokens"),
        ({"stop_token": "<nonsense>"}, PROMPTS, ModelError, r"rollout\.stop_token"),
        ({}, [{"query": "?"}] * 4, DataError, "prompt"),
        ({"num_minibatches": 3}, PROMPTS, ConfigError, r"num_minibatches=3 does not divide"),
        ({"num_updates": -1}, PROMPTS, ConfigError, "num_updates"),
    ],
)
def test_mistakes_are_one_clear_line_before_any_training(tmp_path, policy, settings, prompts, error, message):
    with pytest.raises(error, match=message) as caught:
        run_ppo(configure(policy, tmp_path / "run", **settings), prompts=prompts, reward=vowels)
    assert isinstance(caught.value, KedgeError)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_a_folder_that_holds_something_is_refused_and_left_alone(tmp_path, policy):
    out = tmp_path / "run"
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    with pytest.raises(OutputError, match="is not empty"):
        run_ppo(configure(policy, out), prompts=PROMPTS, reward=vowels)
    assert [path.name for path in out.iterdir()] == ["precious.txt"]


def test_the_command_trains_and_its_mistakes_are_one_line(tmp_path, policy):
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    arguments = (
        "ppo", "--model", policy, "--prompts", "prompts.jsonl", "--reward", "reward.py:vowels", "--seed", 1,
        "ppo.num_updates=2", "rollout.num_prompts=4", "rollout.max_new_tokens=6",
    )  # fmt: skip
    done = kedge(*arguments, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(metrics_without_times(tmp_path / "run")) == 2
    assert "4 optimizer steps per update" in done.stderr
    again = forked_kedge(*arguments, "--out", "run", cwd=tmp_path)
    assert again.returncode == 2
    assert again.stderr.startswith("error: ")
    assert len(again.stderr.strip().splitlines()) == 1


def test_ctrl_c_leaves_a_loadable_model(tmp_path, policy):
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    command = [
        "ppo", "--model", policy, "--prompts", "prompts.jsonl", "--reward", "reward.py:vowels", "--out", "run",
        "ppo.num_updates=100000", "rollout.num_prompts=4",
    ]  # fmt: skip
    with started_kedge(*command, cwd=tmp_path, errors=tmp_path / "errors") as process:
        wait_for(lambda: rows_of(tmp_path / "run/metrics.jsonl") >= 2)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        process.join(60)
        assert process.exitcode == 130
    assert "Traceback" not in (tmp_path / "errors").read_text()
    AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")


def rows_of(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for(condition, seconds=90):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.1)


def test_a_reward_function_that_fails_at_once_leaves_no_folder_so_that_the_mended_run_starts(tmp_path, policy):
    def broken(completions, **_):
        raise ValueError("a typo")

    with pytest.raises(RewardError, match="a typo"):
        run_ppo(configure(policy, tmp_path / "run"), prompts=PROMPTS, reward=broken)
    assert not (tmp_path / "run").exists()
    assert len(run_ppo(configure(policy, tmp_path / "run"), prompts=PROMPTS, reward=vowels).metrics) == 2


def test_ctrl_c_in_the_first_update_still_leaves_a_model(tmp_path, policy):
    def interrupted(completions, **_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_ppo(configure(policy, tmp_path / "run"), prompts=PROMPTS, reward=interrupted)
    AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")


def test_a_reward_model_handed_over_from_python_becomes_the_critic_too(tmp_path, policy, reward_model):
    critics = []
    run_ppo(
        configure(policy, tmp_path / "run", critic="separate", learning_rate=0.0, num_updates=1),
        prompts=PROMPTS,
        reward=[vowels, str(reward_model)],
        on_update=lambda update, roles: critics.append(roles.actor_critic.critic),
    )
    head = load_file(reward_model / "model.safetensors")["score.weight"]
    assert torch.equal(critics[0].head.weight.cpu(), head)
