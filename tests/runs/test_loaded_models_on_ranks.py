"""Models in memory, of which several ranks save one copy."""

from __future__ import annotations

import threading

import pytest

from kedge.runs import loaded_models
from kedge.runs.loaded_models import LoadedModel, NamedModels
from kedge_base.errors import OutputError
from tests.tiny import tiny_causal_lm, tiny_tokenizer


@pytest.fixture
def named(tmp_path):
    found = NamedModels(tmp_path / "run" / "in_memory_models")
    tokenizer = tiny_tokenizer()
    found.name(LoadedModel(tiny_causal_lm("llama", len(tokenizer)), tokenizer), "model")
    return found


def test_the_other_ranks_wait_for_the_first_one(named, monkeypatch):
    """Each used to save a copy in the same place, and to remove that of the others first."""
    monkeypatch.setattr(loaded_models, "is_first_rank", lambda: threading.current_thread().name != "other")
    seen = []

    def wait() -> None:
        with named.saved():
            seen.extend(sorted(path.name for path in (named.folder / "model").iterdir()))

    other = threading.Thread(target=wait, name="other")
    other.start()
    other.join(0.2)
    assert other.is_alive()
    with named.saved():
        other.join(20)
        assert seen == sorted(path.name for path in (named.folder / "model").iterdir())
    assert "model.safetensors" in seen


def test_a_first_rank_that_saves_nothing_is_not_waited_for_without_end(named, monkeypatch):
    monkeypatch.setattr(loaded_models, "is_first_rank", lambda: False)
    monkeypatch.setattr(loaded_models, "LONGEST_WAIT", 0.1)
    with pytest.raises(OutputError, match="has not been saved by the first rank"), named.saved():
        pass
