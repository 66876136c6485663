"""Every architecture of transformers works as the committed table says, or is refused in one line."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from kedge.models import LanguageModel
from tests.models.registry.outcome import Fault, Kind, read_table
from tests.models.registry.trials import ARCHITECTURES, outcome

REGENERATE = "run `python -m tests.models.registry {}` and look at the difference"

# One of each sort: packed, with a window, a bias by distance, states along the sequence, states beside attention,
# experts with noise, compressed keys, sinks, positions that depend on the length, and those that are refused.
QUICK: dict[Kind, tuple[str, ...]] = {
    "policies": (
        "bert",
        "bloom",
        "deepseek_v3",
        "gemma3_text",
        "gpt_oss",
        "inkling_text",
        "mixtral",
        "opt",
        "phi3 (longrope)",
        "qwen3_next",
        "zamba",
        "recurrent_gemma",
    ),
    "reward_models": ("bert", "convbert", "gpt2", "modernbert-decoder"),
}


def assert_as_committed(kind: Kind, architecture: str) -> None:
    committed = read_table()[kind].get(architecture)
    assert committed is not None, f"no outcome is committed: {REGENERATE.format(repr(architecture))}"
    assert asdict(outcome(kind, architecture)) == committed, REGENERATE.format(repr(architecture))


@pytest.mark.parametrize(("kind", "architecture"), [(kind, name) for kind in QUICK for name in QUICK[kind]])
def test_one_architecture_of_each_sort(kind, architecture):
    assert_as_committed(kind, architecture)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "architecture"), [(kind, name) for kind in QUICK for name in ARCHITECTURES[kind]])
def test_every_architecture(kind, architecture):
    assert_as_committed(kind, architecture)


def test_a_small_error_in_one_logit_is_a_fault(monkeypatch):
    right = LanguageModel.logits

    def wrong(self, hidden):
        logits = right(self, hidden).clone()
        logits[..., 7] += 1e-3
        return logits

    monkeypatch.setattr(LanguageModel, "logits", wrong)
    with pytest.raises(Fault, match=r"forward: up to 0\.001 from plain transformers"):
        outcome("policies", "llama")
