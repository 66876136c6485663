"""Settings in a model's folder that would take hours, crash a library, or change the form of its outputs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertForPreTraining

from kedge.config import load_config
from kedge.models import load_language_model, load_scalar_model, load_tokenizer
from kedge.models.pretrained import load_pretrained
from kedge.models.sources import loading_reason
from kedge_base.errors import ModelError
from kedge_plan.plan import plan_machine
from tests.tiny import save_tiny_policy, save_tiny_reward_model


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("models") / "policy")


def changed(policy: Path, folder: Path, **settings: object) -> Path:
    """A copy of the policy with other settings."""
    shutil.copytree(policy, folder)
    content = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**content, **settings}), encoding="utf-8")
    return folder


def test_millions_of_labels_are_refused_before_their_names_are_made(policy: Path, tmp_path: Path) -> None:
    folder = changed(policy, tmp_path / "labels", num_labels=30_000_000)
    with pytest.raises(ModelError, match=r"has 30,000,000 labels; at most 10,000 are supported"):
        load_tokenizer(folder)


def test_pickles_are_refused_and_the_line_says_what_to_do(policy: Path, tmp_path: Path) -> None:
    folder = changed(policy, tmp_path / "pickles")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    for read in (lambda: load_language_model(str(folder), tokenizer=load_tokenizer(folder)), lambda: plan(folder)):
        with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle, .* by save_pretrained\(\)$"):
            read()


def test_a_model_of_another_kind_is_named(policy: Path, tmp_path: Path) -> None:
    folder = changed(policy, tmp_path / "t5", model_type="t5", d_model=16, num_layers=1, num_heads=2, d_kv=8)
    for read in (lambda: load_language_model(str(folder), tokenizer=load_tokenizer(policy)), lambda: plan(folder)):
        with pytest.raises(ModelError, match=r"cannot be loaded: T5 is not a causal language model that transformers "):
            read()


def test_a_configuration_that_transformers_refuses_is_not_the_tokenizers_fault(policy: Path, tmp_path: Path) -> None:
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    folder = changed(policy, tmp_path / "labels", problem_type="single_label_classification", **labels)
    with pytest.raises(ModelError, match=r"config.json cannot be used: `problem_type=.* requires `num_labels > 1`"):
        load_tokenizer(folder)


def with_weights(folder: Path, *names: str, shape: tuple[int, ...] = (16,)) -> Path:
    """Add weights to a model's file."""
    weights = load_file(folder / "model.safetensors")
    weights |= {name: torch.ones(shape) for name in names}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("load", "names"),
    [
        (load_language_model, ["model.layers.0.self_attn.q_proj.bias", "model.layers.1.self_attn.q_proj.bias"]),
        (load_language_model, ["model.layers.0.self_attn.q_norm.weight"]),
        (load_language_model, ["model.layers.2.self_attn.q_proj.weight"]),
        (load_language_model, ["model.layers.1.mlp.up_proj.lora_A.default.weight"]),
        (load_language_model, ["lm_head.bias"]),
        (load_scalar_model, ["score.bias"]),
    ],
)
def test_weights_that_the_model_would_lack_are_refused(tmp_path: Path, load: Any, names: list[str]) -> None:
    save = save_tiny_reward_model if load is load_scalar_model else save_tiny_policy
    folder = with_weights(save(tmp_path / "model"), *names)
    more = " and 1 more" if names[1:] else ""
    kind = "LlamaForSequenceClassification" if load is load_scalar_model else "LlamaForCausalLM"
    line = rf"its files have {names[0]}{more}, for which {kind} has no place with this config.json; correct config.json"
    with pytest.raises(ModelError, match=line):
        load(folder, tokenizer=load_tokenizer(folder))


@pytest.mark.parametrize(
    ("family", "settings", "names"),
    [
        ("llama", {}, ["model.pooler.dense.weight", "model.vision_tower.layers.0.weight", "v_head.summary.weight"]),
        ("llama", {}, ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.mtp.layers.0.norm.weight"]),
        ("llama", {"num_nextn_predict_layers": 1}, ["model.layers.2.self_attn.q_proj.weight"]),
        ("gpt2", {}, ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"]),
        ("gpt2", {}, ["h.0.attn.bias", "h.1.attn.masked_bias"]),
    ],
)
def test_weights_of_other_parts_and_constants_are_left_out(
    tmp_path: Path, family: Any, settings: dict[str, object], names: list[str]
) -> None:
    policy = save_tiny_policy(tmp_path / "policy", family)
    folder = with_weights(changed(policy, tmp_path / "model", **settings), *names)
    load_language_model(folder, tokenizer=load_tokenizer(folder))
    load_scalar_model(folder, tokenizer=load_tokenizer(folder), init="fresh")


def test_the_other_heads_of_a_pretrained_decoder_are_left_out(tmp_path: Path) -> None:
    sizes: Any = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertForPreTraining(BertConfig(vocab_size=300, is_decoder=True, **sizes)).save_pretrained(tmp_path)
    assert load_pretrained(AutoModelForCausalLM, tmp_path).missing == set()


def plan(folder: Path) -> None:
    plan_machine(load_config(flags={"model": str(folder)}, overrides=["runtime.device=cpu"], stage="ppo"), "ppo")


def test_weights_that_were_cut_off_and_a_folder_of_gguf_files(policy: Path, tmp_path: Path) -> None:
    folder = changed(policy, tmp_path / "cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(ModelError, match=r"; the file may be incomplete or damaged: download it again$"):
        load_language_model(str(folder), tokenizer=load_tokenizer(folder))
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "b.gguf").touch()
    with pytest.raises(ModelError, match=r"has no config\.json; name the file: .*files/b\.gguf$"):
        load_tokenizer(tmp_path / "files")


def test_a_reason_that_is_cut_shows_it() -> None:
    assert loading_reason(ValueError("x" * 301)) == "x" * 300 + "…"


def test_outputs_are_read_by_name_whatever_the_folder_says(policy: Path, tmp_path: Path) -> None:
    folder = changed(policy, tmp_path / "tuples", return_dict=False)
    model = load_language_model(str(folder), tokenizer=load_tokenizer(folder))
    assert model.causal(torch.tensor([[1, 2]])).logits.shape[:2] == (1, 2)


def test_a_library_that_panics_is_one_line(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("PanicException", (BaseException,), {})

    def panic(*_: object, **__: object) -> None:
        raise kind("called `Result::unwrap()` on an `Err` value")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", panic)
    with pytest.raises(ModelError, match=r"cannot be loaded: called `Result::unwrap\(\)`"):
        load_tokenizer(policy)


def normalized(policy: Path, folder: Path, *normalizers: dict[str, object]) -> Path:
    """A copy of the policy whose tokenizer normalizes texts."""
    shutil.copytree(policy, folder)
    content = json.loads((folder / "tokenizer.json").read_bytes())
    content["normalizer"] = {"type": "Sequence", "normalizers": list(normalizers)}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def replaced(text: str, content: str, kind: str = "String") -> dict[str, object]:
    return {"type": "Replace", "pattern": {kind: text}, "content": content}


@pytest.mark.parametrize(
    "doubling",
    [
        [replaced("a", "aa")] * 40,
        [replaced("a", "aaaaaaaa"), {"type": "Sequence", "normalizers": [replaced("", "aa", "Regex")] * 9}],
    ],
)
def test_normalizers_that_multiply_a_text_are_refused(
    policy: Path, tmp_path: Path, doubling: list[dict[str, object]]
) -> None:
    with pytest.raises(ModelError, match=r"cannot be loaded: .* over 1,000 times as long"):
        load_tokenizer(normalized(policy, tmp_path / "grows", *doubling))


def test_the_normalizers_of_real_models_are_accepted(policy: Path, tmp_path: Path) -> None:
    llama = [{"type": "Prepend", "prepend": "▁"}, replaced(" ", "▁")]
    bert = [{"type": "NFKC"}, replaced(" {2,}", " ", "Regex"), {"type": "Lowercase"}]
    load_tokenizer(normalized(policy, tmp_path / "usual", *llama, *bert))
