"""Training adapters: equal to PEFT by hand, resumed to the bit, saved in PEFT's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import kedge
from kedge.data import encode_example
from kedge.models import (
    AdapterSettings,
    PolicyWeights,
    load_language_model,
    load_scalar_model,
    load_tokenizer,
    save_policy,
)
from kedge.models.loading import Bases
from kedge.models.origin import read_origin
from kedge.models.packing.rows import TokenRows
from kedge_base.errors import ConfigError, ModelError
from kedge_base.run_folder.record_format import read_samples
from kedge_hub.card import ModelCard
from tests.models.test_adapters import adapt
from tests.stages.ppo.test_ppo import copies_at
from tests.tiny import save_tiny_policy, tiny_causal_lm, tiny_tokenizer

TEXTS = ["The boat", "A sailor and his long rope", "My rope broke", "Once upon a time"]
ROWS = [{"prompt": text, "completion": " sails" * (number + 1)} for number, text in enumerate(TEXTS)]
SFT: dict[str, Any] = {
    "demonstrations": ROWS,
    "batch_size": 4,
    "learning_rate": 1e-2,
    "schedule": "constant",
    "num_epochs": 2,
    "eval_fraction": 0.0,
    "precision": "fp32",
    "report": False,
}
PPO: dict[str, Any] = {
    "prompts": TEXTS,
    "num_updates": 3,
    "num_prompts": 4,
    "max_new_tokens": 6,
    "learning_rate": 1e-2,
    "missing_eos_score": None,
    "eval_fraction": 0.0,
    "precision": "fp32",
    "report": False,
}
LORA = {"kind": "lora", "rank": 4}


def vowels(completions: list[str], **_: object) -> list[float]:
    return [float(sum(text.count(vowel) for vowel in "aeiou")) for text in completions]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_new_adapter_changes_nothing(base: Path, kind: Any) -> None:
    tokenizer = load_tokenizer(base)
    plain, adapted = (
        load_language_model(base, tokenizer=tokenizer, adapter=adapter)
        for adapter in (None, AdapterSettings(kind, rank=4))
    )
    rows = TokenRows.of([[5, 9, 20, 31], [7, 8]], plain.device)
    found, expected = (model.logits(model.hidden(rows)) for model in (adapted, plain))
    assert torch.equal(found, expected) if kind == "lora" else torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
    trained = {name for name, weight in adapted.named_parameters() if weight.requires_grad}
    assert trained == {name for name, _ in adapted.named_parameters() if ".lora_" in name} != set()


def by_hand(base: Path, folder: Path, num_steps: int) -> dict[str, Tensor]:
    """Full-batch steps on the completions' cross-entropy with PEFT and Adam, one row at a time."""
    tokenizer = load_tokenizer(base)
    plain = AutoModelForCausalLM.from_pretrained(base)
    plain.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model = peft.PeftModel.from_pretrained(plain, folder, is_trainable=True).eval()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=SFT["learning_rate"], eps=1e-5, weight_decay=0.0)
    for _ in range(num_steps):
        losses: list[Tensor] = []
        for row in ROWS:
            example = encode_example(tokenizer, str(row["prompt"]), str(row["completion"]))
            ids = torch.tensor([[*example.prompt, *example.completion]])
            logits = model(input_ids=ids).logits[0, :-1]
            logits[:, tokenizer.pad_token_id] = -1e9
            first = len(example.prompt) - 1
            losses.append(torch.nn.functional.cross_entropy(logits[first:], ids[0, 1 + first :], reduction="sum"))
        count = sum(len(encode_example(tokenizer, str(r["prompt"]), str(r["completion"])).completion) for r in ROWS)
        (torch.stack(losses).sum() / count).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(str(folder.parent / "by-hand"))
    return weights_of(folder.parent / "by-hand")


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_an_adapter_that_is_trained_further_equals_peft_by_hand(base: Path, tmp_path: Path, settings: Any) -> None:
    adapt(base, tmp_path / "start", **settings)
    result = kedge.sft(model=tmp_path / "start", out=tmp_path / "run", adapter=LORA, **SFT)
    expected = by_hand(base, tmp_path / "start", num_steps=2)
    found, start = weights_of(result.model), weights_of(tmp_path / "start")
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-5, msg=name)
    assert any((weight - start[name]).abs().max() > 0.01 for name, weight in found.items()), "it was trained"


def test_a_rank_that_a_saved_adapter_does_not_have_is_named(base: Path, tmp_path: Path, capfd: Any) -> None:
    adapt(base, tmp_path / "start")
    own = json.loads((tmp_path / "start" / "adapter_config.json").read_text())
    given = {**LORA, "rank": own["r"], "alpha": own["lora_alpha"]}
    kedge.sft(model=tmp_path / "start", out=tmp_path / "same", adapter=given, **SFT)
    assert "is trained further with the" not in capfd.readouterr().err
    kedge.sft(model=tmp_path / "start", out=tmp_path / "other", adapter={**given, "rank": own["r"] + 1}, **SFT)
    assert f"is trained further with the rank {own['r']} that it has" in capfd.readouterr().err


def test_a_merged_model_keeps_the_record_of_its_origin_and_the_card(base: Path, tmp_path: Path) -> None:
    result = kedge.sft(model=base, out=tmp_path / "run", adapter=LORA, **{**SFT, "num_epochs": 1})
    merged = kedge.merge(result.model, tmp_path / "merged")
    origin = read_origin(merged)
    assert origin is not None
    assert origin.prompt_form == "text", "it is prompted as it was trained"
    for name in ("kedge.json", "README.md"):
        assert (merged / name).read_bytes() == (result.model / name).read_bytes()


@pytest.mark.parametrize("scalar", [False, True])
def test_an_adapter_pads_with_a_token_that_its_base_has(tmp_path: Path, scalar: bool) -> None:
    """kedge adds a pad token to a base without one; plain PEFT loads the base as it is."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    plain = tiny_causal_lm("llama", len(tokenizer))
    plain.config.pad_token_id = None
    plain.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    settings = {**SFT, "num_epochs": 1, "out": tmp_path / "run", "adapter": LORA, "model": tmp_path / "base"}
    if scalar:
        settings["comparisons"] = [{"prompt": "The boat", "chosen": " sails", "rejected": " sinks"}] * 4
        settings.pop("demonstrations")
    model = (kedge.reward if scalar else kedge.sft)(**settings).model
    auto, labels = (AutoModelForSequenceClassification, {"num_labels": 1}) if scalar else (AutoModelForCausalLM, {})
    saved = AutoTokenizer.from_pretrained(model)
    by_peft = peft.PeftModel.from_pretrained(auto.from_pretrained(tmp_path / "base", **labels), model).eval()
    by_peft.config.pad_token_id = by_peft.get_base_model().config.pad_token_id = saved.pad_token_id
    texts = ["The boat sails away<eos>", "A sailor<eos>"]
    with torch.no_grad():
        found = by_peft(**saved(texts, padding=True, return_tensors="pt", return_token_type_ids=False)).logits
    own = load_tokenizer(model)
    assert own.get_vocab() == load_tokenizer(tmp_path / "base").get_vocab()
    rows = TokenRows.of([own(text)["input_ids"] for text in texts], torch.device("cpu"))
    with torch.no_grad():
        if scalar:
            scores = load_scalar_model(model, tokenizer=own)
            torch.testing.assert_close(scores.scores(rows) + scores.shift, found[:, 0], rtol=1e-4, atol=1e-4)
        else:
            policy = load_language_model(model, tokenizer=own)
            logits = policy.logits(policy.hidden(rows))[rows.last, : len(tokenizer)]
            torch.testing.assert_close(logits, found[:, -1], rtol=1e-4, atol=1e-4)  # padded on the left
            numbers = json.loads((model / "generation_config.json").read_text())
            assert numbers["pad_token_id"] == saved.pad_token_id < len(tokenizer)
            assert max(numbers["suppress_tokens"] or [0]) < len(tokenizer)
            merged = kedge.merge(model, tmp_path / "merged")
            numbers = json.loads((merged / "generation_config.json").read_text())
            pad = load_tokenizer(merged).pad_token_id
            assert (numbers["pad_token_id"], numbers["suppress_tokens"]) == (pad, [pad])


def test_a_pad_token_of_its_own_is_kept_where_another_role_has_grown_the_base(base: Path, tmp_path: Path) -> None:
    adapt(base, tmp_path / "reward", scalar=True)
    other = tiny_tokenizer()
    other.pad_token = "<eos>"
    other.save_pretrained(tmp_path / "reward")
    bases, tokenizer = Bases(), load_tokenizer(base)
    load_scalar_model(tmp_path / "reward", tokenizer=load_tokenizer(tmp_path / "reward"), bases=bases)
    policy = load_language_model(base, tokenizer=tokenizer, adapter=AdapterSettings(rank=2), bases=bases)
    assert len(policy.causal.get_input_embeddings().weight) == len(tokenizer) + 1
    saved = save_policy(policy, tokenizer, tmp_path / "saved", card=ModelCard("ppo", "base"))
    assert load_tokenizer(saved).pad_token_id == tokenizer.pad_token_id == 0
    numbers = json.loads((saved / "generation_config.json").read_text())
    assert (numbers["pad_token_id"], numbers["suppress_tokens"]) == (0, [0])


@pytest.mark.parametrize("given", ["folder", "object"])
@pytest.mark.parametrize("kind", ["none", "lora"])
def test_a_start_from_an_adapter_says_that_all_weights_are_trained(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str, kind: str
) -> None:
    adapted = adapt(base, tmp_path / "start")
    model = tmp_path / "start" if given == "folder" else kedge.LoadedModel(adapted, load_tokenizer(base))
    run = kedge.sft(model=model, out=tmp_path / "run", **{**SFT, "num_epochs": 1, "adapter.kind": kind})
    said = f"is an adapter: it is merged into its base, {base}, and all weights are trained; adapter.kind=lora trains"
    assert (said in " ".join(capsys.readouterr().err.split())) == (kind == "none")
    assert (run.model / "adapter_config.json").is_file() == (kind == "lora")


@pytest.mark.parametrize("start", ["base", "adapter"])
def test_the_base_is_the_reference(base: Path, tmp_path: Path, start: str) -> None:
    """Without its adapter, or with the one that training started from; the policy keeps its own."""
    if start == "adapter":
        adapt(base, tmp_path / "adapter")
    source = base if start == "base" else tmp_path / "adapter"
    tokenizer = load_tokenizer(source)
    initial, bases = load_language_model(source, tokenizer=tokenizer), Bases()
    policy = load_language_model(
        source, tokenizer=tokenizer, value_head=True, adapter=AdapterSettings(rank=4), bases=bases
    )
    reference = load_language_model(source, tokenizer=tokenizer, bases=bases)
    assert policy.adapter is not None
    with torch.no_grad():
        for weight in policy.adapter.weights().values():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    rows = TokenRows.of([[5, 9, 20, 31], [7, 8]], policy.device)
    changed = policy.hidden(rows)
    with torch.no_grad():
        torch.testing.assert_close(reference.hidden(rows), initial.hidden(rows), rtol=1e-4, atol=1e-5)
    assert (changed - initial.hidden(rows)).abs().max() > 0.01
    assert torch.equal(policy.hidden(rows), changed)
    changed.sum().backward()
    trained = policy.adapter.weights()
    assert all(weight.grad is not None for weight in trained.values())
    assert all(weight.grad is None for name, weight in policy.causal.named_parameters() if name not in trained)
    shared = set(policy.causal.parameters()) & set(reference.causal.parameters())
    assert shared == set(policy.causal.parameters()) - set(trained.values()), "no weight of the base is held twice"


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_ppo_trains_and_saves_the_adapter_alone(base: Path, tmp_path: Path, critic: str) -> None:
    settings = {"ppo.critic": critic, "checkpoint.every": 1, "checkpoint.keep": 5, **PPO}
    settings["ppo.value_unit"] = "score"  # else a new critic's first update does not reuse the pass, and rounds
    copies = copies_at(2, tmp_path / "run", tmp_path / "cut")
    result = kedge.ppo(model=base, reward=vowels, out=tmp_path / "run", adapter=LORA, on_update=copies, **settings)
    assert result.metrics[0]["objective/kl"] == 0.0
    assert result.metrics[0]["objective/reference_error"] == 0.0
    assert result.metrics[-1]["objective/kl"] > 0.01
    kept = load_file(tmp_path / "run" / "checkpoints" / "update-000003" / "actor_critic.safetensors")
    held = [name for name in kept if name.startswith("policy.causal") and not name.endswith("inv_freq")]
    assert held
    assert all(".lora_" in name for name in held)

    # What was saved is an adapter for plain PEFT, too.
    plain = AutoModelForCausalLM.from_pretrained(base)
    plain.resize_token_embeddings(len(load_tokenizer(base)), mean_resizing=False)
    peft_model = peft.PeftModel.from_pretrained(plain, result.model).eval()
    merged = load_language_model(result.model, tokenizer=load_tokenizer(result.model))
    ids = torch.tensor([[5, 9, 20, 31]])
    found = merged.logits(merged.hidden(TokenRows.of(ids.tolist(), merged.device)))
    known = ~merged.forbidden
    torch.testing.assert_close(found[:, known], peft_model(input_ids=ids).logits[0][:, known], rtol=1e-4, atol=1e-4)
    assert merged.causal.generation_config.suppress_tokens, "the defaults of generate are the adapter's"

    resumed = kedge.ppo(model=base, reward=vowels, out=tmp_path / "cut", adapter=LORA, resume=True, **settings)
    whole, parts = weights_of(result.model), weights_of(resumed.model)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(weight, parts[name]) for name, weight in whole.items())
    texts = [[sample["response"] for sample in read_samples(run)] for run in (tmp_path / "run", tmp_path / "cut")]
    assert texts[0] == texts[1]


def test_recomputed_activations_give_the_same_adapter(base: Path, tmp_path: Path) -> None:
    runs = [
        kedge.ppo(
            model=base, reward=vowels, out=tmp_path / str(again), adapter=LORA, activation_checkpointing=again, **PPO
        )
        for again in (False, True)
    ]
    one, other = (weights_of(run.model) for run in runs)
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}], ids=["lora", "dora"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_engine_gets_the_merged_weights(tmp_path: Path, family: Any, settings: Any) -> None:
    base = save_tiny_policy(tmp_path / "base", family=family)
    adapt(base, tmp_path / "adapter", fan_in_fan_out=family == "gpt2", **settings)
    tokenizer = load_tokenizer(tmp_path / "adapter")
    whole = load_language_model(tmp_path / "adapter", tokenizer=tokenizer)
    trained = load_language_model(tmp_path / "adapter", tokenizer=tokenizer, adapter=AdapterSettings(rank=4))
    expected, found = (dict(PolicyWeights(model)) for model in (whole, trained))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        if (
            "embed" not in name and "wte" not in name and "lm_head" not in name
        ):  # their row of a new pad token is random
            torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-6)


def test_sampling_ahead_uses_the_adapter_of_an_earlier_update(base: Path, tmp_path: Path) -> None:
    def run(name: str, ahead: int, **given: Any) -> Any:
        settings = {**PPO, "num_updates": 4, "max_staleness": ahead, "checkpoint.every": 1, "checkpoint.keep": 4}
        return kedge.ppo(model=base, reward=vowels, out=tmp_path / name, adapter=LORA, **settings, **given)

    def responses(name: str) -> dict[int, list[str]]:
        rows = list(read_samples(tmp_path / name))
        return {update: [row["response"] for row in rows if row["update"] == update] for update in range(1, 5)}

    ahead = run("ahead", 1, on_update=copies_at(3, tmp_path / "ahead", tmp_path / "cut"))
    resumed = run("cut", 1, resume=True)
    one, other = weights_of(ahead.model), weights_of(resumed.model)
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())
    assert responses("cut") == responses("ahead")
    run("at-once", 0)
    assert responses("at-once")[1] == responses("ahead")[1]
    ratios = [row["policy/sampler_k3"] for row in ahead.metrics]
    assert ratios[0] < 1e-8 < ratios[1], "the second update's responses are those of the first weights"


def test_a_critic_has_no_output_layer_to_train_whole(base: Path, tmp_path: Path) -> None:
    """The layers that new tokens need, beside a critic of its own."""
    settings = {"adapter.modules_to_save": ["embed_tokens", "lm_head"], "critic": "separate", "num_updates": 1}
    run = kedge.ppo(model=base, reward=vowels, out=tmp_path / "run", **{"adapter.kind": "lora", **PPO, **settings})
    whole = {name for name in weights_of(run.model) if ".lora_" not in name}
    assert {name.split(".")[-2] for name in whole} == {"embed_tokens", "lm_head"}


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"adapter.target_modules": ["nothing"]}, "adapter.target_modules=['nothing']"),
        ({"adapter.target_modules": ["q_proj", "lm_head"]}, "adapter.target_modules has the output layer"),
        ({"adapter.dropout": 0.05}, "dropout is OpenRLHF's name; here there is none: no dropout"),
        ({"runtime.parallel": "shard"}, "use runtime.parallel=replicate, where each rank holds the frozen base"),
        ({"adapter.modules_to_save": ["nothing"]}, "adapter.modules_to_save: the model has no module 'nothing'"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(base: Path, tmp_path: Path, settings: Any, line: str) -> None:
    with pytest.raises((ConfigError, ModelError)) as caught:
        kedge.ppo(model=base, reward=vowels, out=tmp_path / "run", **{"adapter.kind": "lora", **PPO, **settings})
    assert line in str(caught.value)
    assert not (tmp_path / "run").exists()
