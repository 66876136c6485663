"""Damaged and malicious model folders: each loads or fails with one line naming it; code in them never runs."""

from __future__ import annotations

import itertools
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kedge.models import load_language_model, load_scalar_model, load_tokenizer
from tests.fuzz.folders import BOOBY_TRAP, Damage, booby_trapped_pickle, copied, damages, edit_json
from tests.fuzz.outcome import case_counts, debris, fuzz, kedge, line_or_result
from tests.tiny import save_tiny_policy, save_tiny_reward_model, tiny_tokenizer

SETTINGS = ["generate.max_new_tokens=2", "runtime.num_threads=1"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid policy, reward model and prompts."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = tiny_tokenizer(vocab_size=260)
    save_tiny_policy(folder / "policy", tokenizer=tokenizer)
    save_tiny_reward_model(folder / "reward", tokenizer=tokenizer)
    (folder / "prompts.jsonl").write_text('{"prompt": "Why?"}\n')
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files missing from a damaged folder are not fetched from the hub."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def generate(base: Path, out: Path, policy: Path | None = None, reward: Path | None = None) -> tuple[int, str]:
    """Run `kedge generate`; if it fails it must leave nothing in its folder."""
    arguments = ["--model", str(policy or base / "policy"), "--prompts", str(base / "prompts.jsonl")]
    arguments += ["--reward", str(reward or base / "reward"), "--out", str(out), *SETTINGS]
    code, said = kedge("generate", *arguments)
    assert code == 0 or debris(out) == []
    return code, said


@case_counts(25, 300)
def test_policies(num_cases: int, base: Path, tmp_path: Path, record_property) -> None:
    numbers = itertools.count()

    def check(damage: Damage) -> None:
        _, change = damage
        folder = copied(base / "policy", tmp_path / "policy")
        change(folder)
        generate(base, tmp_path / f"out-{next(numbers)}", policy=folder)

    fuzz(num_cases, damages(base / "policy"), check, record_property)


@case_counts(15, 200)
def test_reward_models(num_cases: int, base: Path, tmp_path: Path, record_property) -> None:
    numbers = itertools.count()

    def check(damage: Damage) -> None:
        _, change = damage
        folder = copied(base / "reward", tmp_path / "reward")
        change(folder)
        generate(base, tmp_path / f"out-{next(numbers)}", reward=folder)

    fuzz(num_cases, damages(base / "reward"), check, record_property)


def retensor(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Change a folder's tensors."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def reconfigure(**values: Any) -> Callable[[Path], None]:
    """Change a folder's `config.json`."""
    return lambda folder: edit_json(folder / "config.json", lambda config: config.update(values))


def rehead(folder: Path, header: bytes) -> None:
    """Put another header in front of a folder's tensors."""
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


DAMAGED_POLICIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "cannot be loaded"),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "no tokenizer": (
        lambda folder: [path.unlink() for path in folder.glob("tokenizer*")],
        "tokenizer of",
    ),
    "a header of 2⁶³ bytes": (
        lambda folder: (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}"),
        "cannot be loaded",
    ),
    "a header nested without end": (lambda folder: rehead(folder, b"[" * 10**6), "cannot be loaded"),
    "offsets beyond the file": (
        lambda folder: rehead(folder, b'{"x": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}'),
        "cannot be loaded",
    ),
    "another width": (reconfigure(hidden_size=32), "weight shapes differ from config.json; first: "),
    "a layer too many": (reconfigure(num_hidden_layers=3), "lacks weights"),
    "a layer too few": (reconfigure(num_hidden_layers=1), "layers.1.input_layernorm.weight and 8 more, for which"),
    "a billion layers": (reconfigure(num_hidden_layers=10**9), "config.json has 1,000,000,000 layers"),
    "no heads": (reconfigure(num_attention_heads=0), "model "),
    "an unknown kind": (reconfigure(model_type="unheard-of"), "unheard-of"),
    "no model at all": (lambda folder: (folder / "config.json").write_text("[]"), "config.json"),
    "weights that are NaN": (
        retensor(lambda tensors: tensors["model.norm.weight"].fill_(torch.nan)),
        "the weights contain NaN or infinity; first: model.norm.weight",
    ),
    "a tokenizer with more tokens": (
        lambda folder: tiny_tokenizer(vocab_size=290).save_pretrained(folder),
        "but the model has 260 embeddings; use the model's own tokenizer",
    ),
    "a tokenizer without tokens": (
        lambda folder: edit_json(folder / "tokenizer.json", _without_tokens),
        "the prompt has no tokens",
    ),
    "a broken tokenizer.json": (
        lambda folder: (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE"}}'),
        "tokenizer of",
    ),
    "a tokenizer's length that is a list": (
        lambda folder: edit_json(folder / "tokenizer_config.json", lambda config: config.update(model_max_length=[])),
        "tokenizer of",
    ),
    "a context of two tokens": (reconfigure(max_position_embeddings=2), "context length 2; both must be at least 4"),
    "a context that the response fills": (reconfigure(max_position_embeddings=4), "tokens long, at most 2 fit"),
    "an index that points outside": (
        lambda folder: _index(folder, "../weights.safetensors"),
        "expected .safetensors files in the same folder",
    ),
    "an index that points to a pickle": (
        lambda folder: _index(folder, "pytorch_model.bin"),
        "refers to 'pytorch_model.bin'; expected .safetensors files in the same folder",
    ),
    "an invalid index": (
        lambda folder: (folder / "model.safetensors.index.json").write_text("[]"),
        "model.safetensors.index.json cannot be read",
    ),
    "an attention from the hub": (reconfigure(attn_implementation="someone/kernel"), "someone/kernel"),
}


def _without_tokens(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"] |= {"vocab": {}, "merges": []}
    tokenizer["added_tokens"] = []


def _index(folder: Path, file: str) -> None:
    (folder / "model.safetensors").unlink()
    weights = {"weight_map": {"model.norm.weight": file}, "metadata": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weights))


@pytest.mark.parametrize("name", DAMAGED_POLICIES)
def test_policies_that_cannot_be_used(name: str, base: Path, tmp_path: Path) -> None:
    damage, said = DAMAGED_POLICIES[name]
    damage(copied(base / "policy", tmp_path / "policy"))
    code, line = generate(base, tmp_path / "out", policy=tmp_path / "policy")
    assert code == 2
    assert said in line


DAMAGED_REWARDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "two labels": (
        lambda folder: (
            reconfigure(id2label={"0": "bad", "1": "good"}, label2id={"bad": 0, "good": 1})(folder),
            retensor(lambda tensors: tensors.update({"score.weight": torch.zeros(2, 16)}))(folder),
        ),
        "a reward model needs exactly one label; this model has 2",
    ),
    "no head": (retensor(lambda tensors: tensors.pop("score.weight")), "has no trained scalar head"),
    "a head of another width": (
        retensor(lambda tensors: tensors.update({"score.weight": torch.zeros(1, 8)})),
        "weight shapes differ from config.json; first: score.weight is (1, 8), expected (1, 16)",
    ),
    "a shift that is text": (reconfigure(kedge_score_shift="much"), "kedge_score_shift is 'much'"),
    "a shift that is NaN": (reconfigure(kedge_score_shift=float("nan")), "kedge_score_shift is nan"),
    "a shift beyond the largest float": (reconfigure(kedge_score_shift=10**400), "kedge_score_shift is 1000"),
    "a language model": (
        lambda folder: (
            reconfigure(architectures=["LlamaForCausalLM"])(folder),
            retensor(lambda tensors: tensors.pop("score.weight"))(folder),
        ),
        "has no trained scalar head",
    ),
}


@pytest.mark.parametrize("name", DAMAGED_REWARDS)
def test_reward_models_that_cannot_be_used(name: str, base: Path, tmp_path: Path) -> None:
    damage, said = DAMAGED_REWARDS[name]
    damage(copied(base / "reward", tmp_path / "reward"))
    code, line = generate(base, tmp_path / "out", reward=tmp_path / "reward")
    assert code == 2
    assert said in line


@pytest.mark.parametrize("names", [["pytorch_model.bin"], ["model.bin", "pytorch_model-00001-of-00001.bin"]])
def test_pickles_are_never_loaded(names: list[str], base: Path, tmp_path: Path) -> None:
    folder, trap = copied(base / "policy", tmp_path / "policy"), tmp_path / "trap"
    (folder / "model.safetensors").unlink()
    for name in [*names, "training_args.bin", "optimizer.pt", "value_head.safetensors"]:
        (folder / name).write_bytes(booby_trapped_pickle(trap))
    index = {"weight_map": {"model.norm.weight": names[-1]}, "metadata": {}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    code, line = generate(base, tmp_path / "out", policy=folder)
    assert code == 2
    assert "safetensors" in line
    assert not trap.exists()


def test_the_trap_works(tmp_path: Path) -> None:
    import pickle

    pickle.loads(booby_trapped_pickle(tmp_path / "trap")).close()
    assert (tmp_path / "trap").exists()


def test_an_invalid_value_head(base: Path, tmp_path: Path) -> None:
    folder, trap = copied(base / "policy", tmp_path / "policy"), tmp_path / "trap"
    arguments = ["ppo", "--model", str(folder), "--prompts", str(base / "prompts.jsonl")]
    arguments += ["--reward", str(base / "reward"), "--out", str(tmp_path / "out"), "runtime.num_threads=1"]
    arguments += ["ppo.critic=shared", "rollout.num_prompts=1", "ppo.num_updates=1"]
    (folder / "value_head").mkdir()
    heads = [booby_trapped_pickle(trap), b"", b"\xff" * 100]
    for content in heads:
        (folder / "value_head/model.safetensors").write_bytes(content)
        code, line = kedge(*arguments)
        assert code == 2
        assert "not a value head of the model in this folder" in line
        assert debris(tmp_path / "out") == []
    for weight in (torch.zeros(1, 8), torch.full((1, 16), torch.nan), torch.zeros(16)):
        save_file({"weight": weight, "bias": torch.zeros(1)}, folder / "value_head/model.safetensors")
        code, line = kedge(*arguments)
        assert code == 2, line
        assert "value head" in line
    assert not trap.exists()


@pytest.mark.parametrize("kind", ["policy", "reward"])
def test_code_in_a_model_folder_does_not_run(kind: str, base: Path, tmp_path: Path) -> None:
    folder, trap = copied(base / kind, tmp_path / kind), tmp_path / "trap"
    names = ("configuration_own", "modeling_own", "tokenization_own", "__init__", "generate", "setup", "conftest")
    for name in names:
        (folder / f"{name}.py").write_text(BOOBY_TRAP.format(path=str(trap)))
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(BOOBY_TRAP.format(path=str(trap)))
    auto = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.Own",
        "AutoModelForSequenceClassification": "modeling_own.Own",
    }
    for model_type in ("llama", "own"):
        reconfigure(model_type=model_type, auto_map=auto)(folder)
        edit_json(
            folder / "tokenizer_config.json",
            lambda config: config.update(
                auto_map={"AutoTokenizer": ["tokenization_own.Own", "tokenization_own.Own"]}, tokenizer_class="Own"
            ),
        )
        code, line = generate(base, tmp_path / f"out-{model_type}", **{kind: folder})
        assert not trap.exists()
        assert code == 0 or "trust_remote_code" in line, line


def test_prompts_longer_than_the_context(base: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "sea " * 400}) + "\n")
    out = tmp_path / "out"
    arguments = ["--model", str(base / "policy"), "--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(out)]
    code, line = kedge("generate", *arguments, *SETTINGS)
    assert code == 2
    assert "tokens long, at most 254 fit" in line
    assert [path.name for path in out.iterdir()] == ["rejected.jsonl"]


@pytest.mark.parametrize("name", ["x" * 300, "a\nb", "loop", "~nobody-of-that-name/x", "file/x", "./\ud800", "a/b/c"])
def test_names_without_a_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    Path("file").touch()
    assert isinstance(line_or_result(load_tokenizer, name), str)
    tokenizer = tiny_tokenizer()
    assert isinstance(line_or_result(load_language_model, name, tokenizer=tokenizer), str)
    assert isinstance(line_or_result(load_scalar_model, name, tokenizer=tokenizer), str)


MISSING = ["x" * 300, "a\nb", "loop", "~nobody-of-that-name/x", "file/x", "./pipe"]


@pytest.mark.parametrize(
    ("flag", "name"),
    # Two lines are no name of prompts but their text.
    [
        (flag, name)
        for flag in ("--model", "--prompts", "--reward")
        for name in MISSING
        if (flag, name) != ("--prompts", "a\nb")
    ],
)
def test_the_command_reports_a_missing_path(
    flag: str, name: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    Path("file").touch()
    os.mkfifo("pipe")
    paths = {"--model": "policy", "--prompts": "prompts.jsonl", "--reward": "reward"}
    flags = {**{word: str(base / path) for word, path in paths.items()}, flag: name}
    arguments = [part for pair in flags.items() for part in pair]
    code, _ = kedge("generate", *arguments, "--out", "out", *SETTINGS)
    assert code == 2
    assert debris(Path("out")) == []


def test_folders_that_contain_pipes(base: Path, tmp_path: Path) -> None:
    folder = copied(base / "policy", tmp_path / "policy")
    os.mkfifo(folder / "extra.json")
    (folder / "folder.json").mkdir()
    (tmp_path / "data").mkdir()
    os.mkfifo(tmp_path / "data" / "pipe.jsonl")
    (tmp_path / "data" / "rows.jsonl").write_text('{"prompt": "Why?"}\n')
    arguments = ["--model", str(folder), "--prompts", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
    assert kedge("generate", *arguments, *SETTINGS)[0] == 0


@pytest.mark.slow
def test_the_real_command_on_a_damaged_folder(base: Path, tmp_path: Path) -> None:
    folder = copied(base / "policy", tmp_path / "policy")
    (folder / "tokenizer.json").write_text("{")
    command = [sys.executable, "-m", "kedge", "generate", "--model", str(folder), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [*command, "--prompts", str(base / "prompts.jsonl")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: tokenizer of '{folder}' cannot be loaded: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
