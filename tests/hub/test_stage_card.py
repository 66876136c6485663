"""Model cards: valid metadata, code that works, no path of the machine, no needless digits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard as HubCard
from huggingface_hub.utils import validate_repo_id
from transformers import AutoTokenizer

import kedge
from kedge.config import config_from_settings, load_config
from kedge.data import Rendered, encode_prompt
from kedge.models import load_scalar_model, load_tokenizer
from kedge.models.origin import Origin, hub_id, public_name, read_origin
from kedge.models.scalar import score_rows
from kedge.stages.ppo import run_ppo
from kedge.stages.reward import run_reward
from kedge.stages.sft import run_sft
from kedge_hub.card import CardSample, ModelCard
from kedge_hub.stage_card import _warnings, algorithm_of, recipe_of
from kedge_inspect.doctor.responses import num_responses
from kedge_inspect.page.looks import look_of
from kedge_inspect.record import read_run
from tests.tiny import CHAT_TEMPLATE, save_tiny_policy, tiny_tokenizer

QUIET = {"runtime.report": False, "runtime.num_threads": 1}
COMPARISONS = [{"prompt": f"Deck {number}:", "chosen": " sea", "rejected": " rope rope"} for number in range(8)]
DIALOGUES = [
    {"messages": [{"role": "user", "content": f"Deck {number}?"}, {"role": "assistant", "content": "aye"}]}
    for number in range(8)
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models of three stages, each with its card."""
    base = tmp_path_factory.mktemp("cards")
    policy = save_tiny_policy(base / "policy", tokenizer=tiny_tokenizer(chat_template=CHAT_TEMPLATE, add_bos=True))

    def config(stage: str, model: Path, **settings: Any) -> Any:
        return config_from_settings(stage, {"model": str(model), "out": str(base / stage), **QUIET, **settings})

    sft = run_sft(config("sft", policy, batch_size=4, eval_fraction=0.25), demonstrations=DIALOGUES).model
    reward = run_reward(config("reward", sft, batch_size=4, eval_fraction=0.25), comparisons=COMPARISONS).model
    small = {"num_updates": 1, "num_prompts": 4, "max_new_tokens": 4, "num_epochs": 1, "reward": [str(reward)]}
    small["schedules"] = {"ppo.clip_range": {1: 0.2}}
    ppo = run_ppo(config("ppo", sft, **small), prompts=["The boat", "The sea", "A rope", "Tide"]).model
    return {"sft": sft, "reward": reward, "ppo": ppo}


def text_of(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_a_hub_can_read_the_metadata(models, stage):
    card = HubCard.load(models[stage] / "README.md")
    data = card.data.to_dict()
    assert {"kedge", stage.replace("reward", "reward-model")} <= set(data["tags"])
    assert data["library_name"] == "transformers"
    assert data["pipeline_tag"] == ("text-classification" if stage == "reward" else "text-generation")
    assert not {"license", "language", "base_model", "datasets"} & set(data)  # not known


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_no_path_of_the_machine_and_no_needless_digits(models, stage):
    text = text_of(models[stage])
    assert not re.search(r"(?<![\w.])/(home|root|tmp|work|Users|private|var)\b", text)
    body = text.split("## Reproduce")[0]
    assert not re.search(r"\d\.\d{5,}", body)
    assert "## Limitations" in body
    assert "rows used" in body


@pytest.mark.parametrize(
    ("settings", "shown", "tag"),
    [
        ({}, "PPO", "ppo"),
        ({"preset": ["small-cpu", "vapo"]}, "VAPO", "vapo"),
        ({"preset": ["grpo"]}, "GRPO", "grpo"),
        ({"preset": ["dapo", "small-cpu"]}, "DAPO", "dapo"),
        ({"preset": ["dr-grpo"]}, "Dr. GRPO", "dr-grpo"),
        ({"preset": ["distill"], "ppo.reference": "teacher"}, "on-policy distillation", "on-policy-distillation"),
        ({"ppo.advantage": "rloo", "rollout.num_responses": 4}, "RLOO", "rloo"),
        ({"ppo.advantage": {"n_step": 3}}, "PPO", "ppo"),
        ({"ppo.advantage": "to_go"}, "PPO without a critic", "ppo-without-a-critic"),
    ],
)
def test_the_card_names_the_algorithm(settings, shown, tag):
    card = ModelCard("ppo", "base", algorithm=algorithm_of(config_from_settings("ppo", settings)))
    assert f"# base, trained with {shown}\n" in card.render()
    assert HubCard(card.render()).data.to_dict()["tags"] == ["kedge", tag, "rlhf"]


def test_the_card_words_the_figures_of_an_evaluation(tmp_path):
    policy = save_tiny_policy(tmp_path / "policy")
    result = kedge.ppo(
        model=policy, prompts=["The boat", "The sea"], eval_prompts=["Tide"], out=tmp_path / "run",
        reward=lambda completions: [float(len(text)) for text in completions], num_updates=1, num_epochs=1,
        eval_every=1, max_new_tokens=4, preset="grpo", num_prompts=2, num_responses=2, **QUIET,
    )  # fmt: skip
    results = text_of(result.model).partition("## Results")[2].partition("##")[0]
    row = result.metrics[-1]
    assert f"| held-out score | {row['eval/score']:.4g} |" in results
    assert f"| held-out length, tokens | {row['eval/length']:.4g} |" in results
    assert "held-out score/" not in results


def test_the_responses_of_a_loop_are_counted(tmp_path):
    """Its batches may have any size, whatever `rollout.num_prompts` says."""
    policy = save_tiny_policy(tmp_path / "policy")
    with kedge.PpoTrainer(model=policy, out=tmp_path / "run", num_updates=1, max_new_tokens=4, **QUIET) as trainer:
        trainer.update(trainer.sample(["The boat", "The sea", "Tide"]), [0.0, 1.0, 2.0])
    assert "| updates | 1 |" in (card := text_of(trainer.folder / "model"))
    assert "| responses | 3 |" in card
    record = read_run(trainer.folder)
    assert num_responses(record) == look_of("ppo").items_per_update(record) == 3


def test_what_a_stranger_needs(models):
    sft, reward, ppo = (text_of(models[stage]) for stage in ("sft", "reward", "ppo"))
    assert "from `policy`" in sft
    assert "The prompt is a conversation" in sft
    assert "held-out token accuracy" in sft
    assert "from `sft/model`" in ppo
    assert "The prompt is plain text" in ppo
    assert "`reward/model: a reward model, weight 1`" in ppo
    assert ppo.count("Response:\n") == 2
    assert "held-out accuracy" in reward
    assert "SequenceClassification" in reward


def test_the_recipe_is_a_configuration(models):
    [recipe] = re.findall(r"```yaml\n(.*?)```", text_of(models["ppo"]), re.DOTALL)
    assert yaml.safe_load(recipe)["rollout"] == {"num_prompts": 4, "max_new_tokens": 4}
    path = models["ppo"].parent / "recipe.yaml"
    path.write_text(recipe, encoding="utf-8")
    assert load_config(path).rollout.num_prompts == 4
    assert load_config(path).schedules


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_the_code_works_and_reads_what_the_training_read(models, stage, capsys):
    [code] = re.findall(r"```python\n(.*?)```", text_of(models[stage]), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace("path/to/this/folder", str(models[stage])), names)  # from a card that kedge wrote
    ids = names["inputs"]["input_ids"][0].tolist()
    tokenizer = AutoTokenizer.from_pretrained(models[stage])
    if stage == "sft":  # conversations, by a template that writes no BOS
        asked = tokenizer.apply_chat_template(names["messages"], add_generation_prompt=True, return_dict=False)
        assert ids == asked == encode_prompt(tokenizer, Rendered(names["prompt"]))
    else:
        assert ids == encode_prompt(tokenizer, names["text" if stage == "reward" else "prompt"])
        assert ids.count(1) == 1  # one BOS


def test_the_code_for_a_reward_adapter_gives_its_scores(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = tokenizer.pad_token = tokenizer.eos_token  # GPT-2's, so that kedge adds a pad token
    save_tiny_policy(tmp_path / "base", tokenizer=tokenizer)
    settings = {"model": "base", "out": "reward", "adapter.kind": "lora", "batch_size": 4, "learning_rate": 0.1}
    folder = run_reward(config_from_settings("reward", {**settings, **QUIET}), comparisons=COMPARISONS).model
    [(source, out)] = re.findall(r"`kedge merge (\S+) --out (\S+)`", text_of(folder))
    kedge.merge(source.replace("path/to/this/folder", str(folder)), out)
    for card in (folder, Path(out)):
        [code] = re.findall(r"```python\n(.*?)```", text_of(card), re.DOTALL)
        names: dict[str, Any] = {}
        exec(code.replace("path/to/this/folder", out), names)  # from a card that kedge wrote
        model = load_scalar_model(folder, tokenizer=load_tokenizer(folder))
        assert float(model.shift) != 0
        expected = score_rows(model, names["inputs"]["input_ids"].tolist())
        assert names["score"] == pytest.approx(expected.item(), abs=1e-5)


def test_the_recipe_names_mixed_sources_without_their_folders():
    sources = ["/elsewhere/someone/a.jsonl", "/elsewhere/someone/b.jsonl"]
    config = config_from_settings("sft", {"data.demonstrations": sources, "mix": dict.fromkeys(sources, 0.5)})
    recipe = yaml.safe_load(recipe_of(config))
    assert recipe["data"] == {"demonstrations": ["a.jsonl", "b.jsonl"], "mix": {"a.jsonl": 0.5, "b.jsonl": 0.5}}


def test_the_record_of_the_origin(models):
    assert read_origin(models["sft"]) == Origin("sft", "policy", None, "conversation")
    assert read_origin(models["ppo"]) == Origin("ppo", "sft/model", None, "text")


def test_the_chain_starts_at_a_hub_id(tmp_path):
    Origin("sft", "org/base", "org/base", "text").write(tmp_path)
    card = ModelCard("ppo", str(tmp_path), {}, datasets=["org/data", "org/data"])
    data = HubCard(card.render()).data.to_dict()
    assert (data["base_model"], data["datasets"]) == ("org/base", ["org/data"])
    validate_repo_id(data["base_model"])
    assert "# base, trained with PPO" in card.render()
    assert f"from `{tmp_path.name}`, which started from `org/base`" in card.render()


def test_names_say_nothing_about_the_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "local").mkdir()
    assert public_name("org/name") == "org/name"
    assert public_name("runs/sft/model") == "runs/sft/model"
    assert public_name(str(tmp_path / "runs" / "sft" / "model")) == "runs/sft/model"
    assert public_name("/elsewhere/someone/runs/sft/model") == "sft/model"
    assert public_name("/elsewhere/someone/rewards.py:brief") == "rewards.py:brief"
    assert public_name("package.module:brief") == "package.module:brief"
    assert public_name("openai:llama3:8b@http://gpu7.internal:8000/v1") == "openai:llama3:8b"
    assert [hub_id(name) for name in ("org/name:train", "org/local", "a.jsonl", "/a/b")] == [
        "org/name",
        None,
        None,
        None,
    ]


def test_an_error_of_the_doctor_does_not_prevent_the_card(tmp_path, monkeypatch):
    def broken(folder, *, advice):
        raise ZeroDivisionError

    (tmp_path / "metrics.jsonl").touch()
    monkeypatch.setattr("kedge_hub.stage_card.diagnose_run", broken)
    assert _warnings(tmp_path) == []


def test_texts_of_data_have_no_effect():
    hostile = "```\n# owned\n</details><script>alert(1)</script>\x1b[2J"
    card = ModelCard(
        "ppo",
        "x",
        {"a|b": "[x](y)"},
        reward=["`f`"],
        warnings=[hostile],
        samples=[CardSample(hostile, hostile, 0.123456789)],
    )
    text = card.render()
    assert "````\n```\n# owned" in text
    assert "\x1b" not in text
    assert "| a\\|b | \\[x\\](y) |" in text
    assert "Score: 0.1235" in text
    assert "\\<script\\>" in text.split("## Limitations")[1]
