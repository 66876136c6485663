"""The loops of docs/own-loop.md run, and the one without a trainer learns."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import kedge
from tests.tiny import save_tiny_policy, tiny_causal_lm, tiny_reward_model, tiny_tokenizer

PAGE = Path(__file__).resolve().parent.parent / "docs" / "own-loop.md"
LISTINGS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
WITH_TRAINER = {name: code for code in LISTINGS for name in re.findall(r'out="runs/([\w/-]+)"', code)[-1:]}
TUTORIALS = ["sentiment", "toxicity", "summaries/ppo", "best-of-n", "sentences"]
NUM_UPDATES = 3


def save_tiny_classifier(folder: Path) -> None:
    config = tiny_reward_model().config
    config.num_labels = 2
    config.id2label, config.label2id = {0: "fine", 1: "toxic"}, {"fine": 0, "toxic": 1}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        type(tiny_reward_model())(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with what the listings name, and trainers that make few updates."""
    save_tiny_policy(tmp_path / "path" / "or" / "hub-id")
    save_tiny_classifier(tmp_path / "path" / "to" / "classifier")
    reviews = [{"text": "a happy little sea", "label": 1}, {"text": "the rope broke", "label": 0}]
    dialogues = [{"dialogue": f"A: Boat {n}? B: No.", "summary": f"No boat {n}."} for n in range(12)]
    for name, rows in {"reviews": reviews, "dialogues": dialogues}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "prompts.txt").write_text("".join(f"The boat {n}\n" for n in range(80)), encoding="utf-8")
    trainer = kedge.PpoTrainer
    monkeypatch.setattr(kedge, "PpoTrainer", lambda **given: trainer(**{**given, "num_updates": NUM_UPDATES}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", WITH_TRAINER)
def test_every_listing_with_a_trainer_runs(name: str, folder: Path) -> None:
    exec(compile(WITH_TRAINER[name], name, "exec"), {})
    run = folder / "runs" / name
    assert len((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == NUM_UPDATES
    assert (run / "model" / "model.safetensors").exists()


def test_the_tutorials_have_at_most_forty_lines() -> None:
    assert WITH_TRAINER.keys() >= set(TUTORIALS)
    assert {name: code.count("\n") for name, code in WITH_TRAINER.items() if code.count("\n") > 40} == {}


def loop() -> Any:
    listing = next(code for code in LISTINGS if code.startswith("import copy"))
    names: dict[str, Any] = {}
    exec(compile(listing, "own-loop.md", "exec"), names)
    return names["train"]


@pytest.mark.filterwarnings("ignore:.*pad_token_id")
def test_a_tokenizer_without_a_pad_token_and_a_model_with_several_ends_will_do() -> None:
    tokenizer, policy, seen = tiny_tokenizer(), tiny_causal_lm(), list[str]()
    tokenizer.pad_token = None
    policy.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(3, 200)]

    def score(prompts: list[str], completions: list[str]) -> list[float]:
        seen.extend(completions)
        return [float(len(text)) for text in completions]

    with torch.random.fork_rng():
        torch.manual_seed(0)
        loop()(policy, tokenizer, ["The boat", "A sailor who went"] * 4, score, num_updates=1, max_new_tokens=8)
    assert len(seen) == 8
    # Responses go on behind the other ends, up to EOS or the limit; none has padding in it.
    assert max(map(len, seen)) >= 8
    assert not any("<eos>" in text for text in seen)


def test_the_loop_of_the_documentation_learns() -> None:
    means: list[float] = []

    def letters(prompts: list[str], completions: list[str]) -> list[float]:
        scores = [float(sum(letter.islower() for letter in text)) for text in completions]
        means.append(sum(scores) / len(scores))
        return scores

    prompts = ["The boat", "A sailor who", "My rope", "Once"] * 8
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"num_updates": 12, "learning_rate": 4e-3, "max_new_tokens": 8}
        loop()(tiny_causal_lm(), tiny_tokenizer(), prompts, letters, **sizes)
    assert len(means) == 12
    assert sum(means[-3:]) > 2 * sum(means[:3]) > 0
