"""Settings in a model's folder that would take hours, crash a library, or change the form of its outputs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from kedge.errors import ModelError
from kedge.models import load_language_model, load_tokenizer
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
