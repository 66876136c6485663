"""A model or data set that is no folder and cannot be on the hub is refused within seconds, in one line."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from kedge import downloads as hub
from kedge.data.sources import rows_of
from kedge.downloads import hub_fault
from kedge.models import load_tokenizer
from kedge_base.errors import DataError, ModelError


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Exception]:
    """Empty caches, and a hub that raises the errors of this list, one per request."""
    errors: list[Exception] = []

    def ask(url: str, *, timeout: float) -> None:
        assert url.endswith(("name/resolve/main/config.json", "datasets/org/name/resolve/main/README.md"))
        assert timeout <= 10
        raise errors.pop()

    hub_fault.cache_clear()
    monkeypatch.setattr(hub, "get_hf_file_metadata", ask)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.chdir(tmp_path)
    return errors


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that `datasets` was asked to load."""
    names: list[str] = []

    def load_dataset(name: str, config: str | None, *, split: str) -> list[dict[str, str]]:
        names.append(name)
        return [{"prompt": "a"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return names


@pytest.mark.usefixtures("answers")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nope", "'nope': no such folder; a hub id has the form org/name"),
        ("no such model", "'no such model': no such folder; not a hub id (org/name)"),
    ],
)
def test_what_is_no_hub_id_is_never_asked_for(name: str, said: str, loaded: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        load_tokenizer(name)
    assert str(caught.value) == f"model {said}"
    with pytest.raises(DataError) as refused:
        list(rows_of(name))
    advice = "; for a text, pass a list, in Python: prompts=[…]" if " " in name else ""
    assert str(refused.value) == said.replace("folder", "file or folder") + advice
    assert loaded == []


def test_without_a_network_one_request_is_enough(answers: list[Exception], loaded: list[str]) -> None:
    answers += [OSError("Name or service not known")] * 2
    with pytest.raises(ModelError, match=r"'org/name': no such folder; the .* cannot be reached \(Name or s"):
        load_tokenizer("org/name")
    with pytest.raises(DataError, match=r"'org/name:test': no such file or folder; the .* cannot be reached \(Name"):
        list(rows_of("org/name:test"))
    assert answers == loaded == []


@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_offline_mode_asks_nothing(
    answers: list[Exception], monkeypatch: pytest.MonkeyPatch, kind: hub.RepositoryKind
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fault = hub_fault("org/name", kind)
    assert fault == "not in the cache, and HF_HUB_OFFLINE is set"


def test_an_answer_of_the_hub_and_a_cached_model_are_left_to_the_library(
    answers: list[Exception], monkeypatch: pytest.MonkeyPatch, loaded: list[str]
) -> None:
    answers += [EntryNotFoundError("no such file")] * 2
    assert hub_fault("org/name", "model") is None
    assert len(list(rows_of("org/name"))) == 1
    assert answers == []
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda name, file, repo_type: f"cache/{file}")
    assert hub_fault("gpt2", "model") is None


@pytest.mark.parametrize(
    ("error", "warned"),
    [(EntryNotFoundError("404"), 0), (LocalEntryNotFoundError("offline"), 1), (OSError("Name or service"), 1)],
)
def test_a_file_that_the_hub_cannot_be_asked_for_is_said_to_be_taken_as_missing(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, error: Exception, warned: int
) -> None:
    def download(name: str, file: str) -> str:
        raise error

    monkeypatch.setattr(hub, "hf_hub_download", download)
    hub.repository_file.cache_clear()
    assert hub.repository_file("org/name", "value_head/model.safetensors") is None
    assert [str(each.message)[:43] for each in recwarn] == ["org/name: taken as having no value_head/mod"] * warned
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda name, file: object())
    hub.repository_file.cache_clear()
    assert hub.repository_file("org/name", "value_head/model.safetensors") is None
    assert len(recwarn) == warned, "it is known to be missing"


@pytest.mark.usefixtures("answers")
def test_a_data_set_in_the_cache_of_datasets_is_loaded(tmp_path: Path, loaded: list[str]) -> None:
    for folder in ("imdb", "org___my_data-set2"):
        (tmp_path / "datasets" / folder).mkdir(parents=True)
    for name in ("imdb:test", "org/MyData-set2"):
        assert len(list(rows_of(name))) == 1
    assert loaded == ["imdb", "org/MyData-set2"]
