"""A model that is no folder and cannot be on the hub is refused within seconds, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError

from kedge.errors import ModelError
from kedge.models import hub, load_tokenizer
from kedge.models.hub import check_hub_id


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Exception]:
    """An empty cache, and a hub that raises the errors of this list, one per request."""
    errors: list[Exception] = []

    def ask(url: str, *, timeout: float) -> None:
        assert url.endswith("config.json")
        assert timeout <= 10
        raise errors.pop()

    check_hub_id.cache_clear()
    monkeypatch.setattr(hub, "get_hf_file_metadata", ask)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    return errors


@pytest.mark.usefixtures("answers")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nope", "model 'nope': no such folder; a hub id has the form org/name"),
        ("no such model", "model 'no such model': no such folder, and not a hub id (org/name)"),
    ],
)
def test_what_is_no_hub_id_is_never_asked_for(name: str, said: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_tokenizer(name)
    assert str(caught.value) == said


def test_without_a_network_one_request_is_enough(answers: list[Exception]) -> None:
    answers.append(OSError("Name or service not known"))
    with pytest.raises(ModelError, match=r"'org/name': no such folder, and the .* cannot be reached \(Name or s"):
        load_tokenizer("org/name")
    assert answers == []


def test_offline_mode_asks_nothing(answers: list[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="not in the cache, and HF_HUB_OFFLINE is set"):
        check_hub_id("org/name")
    assert answers == []


def test_an_answer_of_the_hub_and_a_cached_model_are_left_to_transformers(
    answers: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers.append(EntryNotFoundError("no config.json"))
    check_hub_id("org/name")
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda name, file: "cache/config.json")
    check_hub_id("gpt2")
    assert answers == []
