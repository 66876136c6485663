"""Settings in a model's folder that would take hours, crash a library, or change the form of its outputs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from kedge.config import load_config
from kedge.errors import ModelError
from kedge.models import load_language_model, load_tokenizer
from kedge.models.sources import loading_reason
from kedge.stages.planning.plan import plan_machine
from tests.tiny import save_tiny_policy


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
