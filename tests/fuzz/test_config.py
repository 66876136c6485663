"""Malformed configuration files and overrides: each is valid, or fails with one line before anything is loaded."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import strategies as st

from kedge.config import Config, load_config, resolved_yaml, schedule_in_words, with_values
from kedge.config.explain.describe import all_fields, section_type
from kedge_base.stage import find_stage
from kedge_plan import hollow as hollow  # reads the stages: before `entered` replaces them
from tests.fuzz.outcome import case_counts, debris, fuzz, kedge, line_or_result
from tests.fuzz.values import JSON, TEXTS

FIELDS = [name for name, _ in all_fields()]
SECTIONS = [name for name in Config.model_fields if section_type(name)]
STAGES = ("sft", "reward", "ppo", "rlhf", "generate", "evaluate")

misspelt = st.builds(
    lambda name, at, letter: name[: at % len(name)] + letter + name[at % len(name) + 1 :],
    st.sampled_from(FIELDS + SECTIONS),
    st.integers(0, 40),
    st.characters(),
)
names = st.sampled_from(FIELDS) | st.sampled_from(SECTIONS) | misspelt | TEXTS
# The required fields of every stage, so that cases get past the check for missing fields.
COMPLETE: dict[str, Any] = {
    "model": "no/such/model",
    "reward": ["f.py:g"],
    "data": {"prompts": "p.jsonl", "demonstrations": "d.jsonl", "comparisons": "c.jsonl"},
    "evaluate": {"judge": "f.py:g"},
}
documents = st.dictionaries(names, JSON, max_size=3).map(lambda extra: {**COMPLETE, **extra})


@st.composite
def yaml_bytes(draw: st.DrawFn) -> bytes:
    """A YAML file, valid or damaged."""
    text = yaml.safe_dump(draw(documents), allow_unicode=draw(st.booleans()))
    content = text.encode("utf-8", "surrogatepass")
    damage = draw(st.sampled_from(["none", "none", "bom", "crlf", "nul", "cut", "utf-16", "bytes", "twice", "tag"]))
    at = draw(st.integers(0, len(content)))
    if damage == "bom":
        return b"\xef\xbb\xbf" + content
    if damage == "crlf":
        return content.replace(b"\n", b"\r\n")
    if damage == "utf-16":
        return text.encode("utf-16", "surrogatepass")
    if damage == "twice":
        return content * 2
    if damage == "cut":
        return content[:at]
    inserted = {"nul": b"\x00", "bytes": draw(st.binary(max_size=5)), "tag": draw(st.sampled_from(TAGS))}
    return content[:at] + inserted.get(damage, b"") + content[at:]


TAGS = [
    b" !!python/object/apply:os.system ['touch trap'] ",
    b" !!python/name:os.system ",
    b" !!python/module:antigravity ",
    b" !!timestamp x ",
    b" !!bool x ",
    b" !!int '' ",
    b" !!float '' ",
    b" !!binary /w== ",
    b" !!set {a, b} ",
    b" !!omap [a: 1] ",
    b" &a [*a] ",
    b" *unknown ",
    b" <<: 3 ",
    b" ? [a] ",
    b" %YAML 9.9\n--- ",
    b"\n---\n",
]


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Config]]:
    """Stand-ins for the stages: a configuration that gets there has passed all checks."""
    configs: list[Config] = []
    for stage in STAGES:
        module = types.ModuleType(f"kedge.stages.{stage}")
        function = find_stage(stage).run.partition(":")[2]
        setattr(module, function, lambda config, **_: configs.append(config))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    yield configs
    assert not (tmp_path / "trap").exists()


@case_counts(60, 600)
def test_files(num_cases: int, entered: list[Config], tmp_path: Path, record_property) -> None:
    path = tmp_path / "run.yaml"

    def check(content: bytes) -> None:
        path.write_bytes(content)
        config = line_or_result(load_config, path)
        if isinstance(config, Config):
            check_usable(config, tmp_path)

    fuzz(num_cases, yaml_bytes(), check, record_property)


def check_usable(config: Config, folder: Path) -> None:
    """An accepted configuration can be written, read back, changed and described."""
    written = folder / "config.yaml"
    written.write_text(resolved_yaml(config), encoding="utf-8")
    assert load_config(written) == config
    assert with_values(config, {"runtime.seed": 3}).runtime.seed == 3
    schedule_in_words(config, 100)


@case_counts(60, 600)
def test_commands(num_cases: int, entered: list[Config], tmp_path: Path, record_property) -> None:
    path = tmp_path / "run.yaml"

    def check(case: tuple[str, bytes, list[tuple[str, str]]]) -> None:
        stage, content, overrides = case
        path.write_bytes(content)
        entered.clear()
        arguments = [f"{name}={value}" for name, value in overrides]
        arguments = [text for text in arguments if not text.startswith("-") and "\x00" not in text]
        code, said = kedge(stage, "--config", str(path), *arguments, "--out", str(tmp_path / "out"))
        assert len(entered) == (code == 0), said
        assert debris(tmp_path / "out") == []

    files = yaml_bytes() | st.just(yaml.safe_dump(COMPLETE).encode())
    overrides = st.lists(st.tuples(names, TEXTS | JSON.map(str) | yaml_bytes().map(repr)), max_size=2)
    fuzz(num_cases, st.tuples(st.sampled_from(STAGES), files, overrides), check, record_property)


@case_counts(40, 300)
def test_misspelt_names(num_cases: int, record_property) -> None:
    def check(name: str) -> None:
        said = line_or_result(load_config, None, [f"{name}=1"])
        if name.strip() not in {*FIELDS, *SECTIONS} and "=" not in name:
            assert isinstance(said, str)
            last = name.rpartition(".")[2]
            assert "did you mean" in said or len(last) < 6 or not last.isascii() or " " in name, said

    fuzz(num_cases, misspelt, check, record_property)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (BOMB, "line 2: aliases such as *a are not supported; write the value out"),
        (MERGES, "line 2: aliases such as *a are not supported; write the value out"),
        (f"{BOMB}data: {{prompts: *j}}\n", "aliases such as *a are not supported"),
        (f"{BOMB}? *j\n: 1\n", "aliases such as *a are not supported"),
        ("reward: {source: f.py:g, settings: &s {again: *s}}\n", "aliases such as *s are not supported"),
        ("reward: {source: f.py:g, settings: {a: " + "[" * 60 + "]" * 60 + "}}\n", "nests deeper than 50 levels"),
        ("reward:\n- source: f.py:g\n  settings: {a: 1, a: 2}\n", ":3: reward.settings.a is given twice; keep one"),
        ("reward:\n- source: f.py:g\n  source: f.py:h\n", ":3: reward.source is given twice; keep one"),
        ("ppo: {gamma: !!timestamp x}\n", "a value does not fit its tag"),
        ("ppo: {gamma: !!bool x}\n", "a value does not fit its tag"),
        ("ppo: {gamma: !!int ''}\n", "a value does not fit its tag"),
        (f"ppo: {{gamma: !!float '1{':59' * 300}.5'}}\n", "a value does not fit its tag"),
        (f"ppo: {{gamma: 1{':59' * 300}.5}}\n", "ppo.gamma must be a number ≥ 0 and ≤ 1; it is 1:59:59"),
        (f"ppo: {{num_updates: {'9' * 5000}}}\n", "cannot be read as YAML (Exceeds the limit"),
        (f"ppo: {{num_updates: 0x{'f' * 5000}}}\n", "ppo.num_updates=a value too long or too deep to show: whole"),
        ("ppo: {num_updates: 9223372036854775808}\n", "=9223372036854775808: whole numbers must be below 2⁶³"),
        ("rollout: {stop_token: 9223372036854775808}\n", "whole numbers must be below 2⁶³"),
        ('model: "\\ud800"\n', "model=\\ud800: the value holds a lone surrogate, which UTF-8 cannot write"),
        ('reward: {source: f.py:g, settings: {a: ["\\ud800"]}}\n', "holds a lone surrogate"),
        ('reward: {source: f.py:g, name: "\\ud800"}\n', "holds a lone surrogate"),
        ("x" * 1000 + ": 1\n", f"{'x' * 60}… is not a field"),
        (
            "".join(f"x{n}: 1\n" for n in range(500)),
            ", x9, x10 and 489 more)",
        ),
        ("# " + "x" * 2**20, "is larger than 1,048,576 bytes"),
        (
            "rollout: {num_prompts: 1000000000039}\nppo: {num_minibatches: 7}\n",
            "= 1,000,000,000,039 responses; expected at most 1,000,000",
        ),
        (
            "rollout: {num_prompts: 999983}\nppo: {num_minibatches: 7}\n",
            "the nearest divisors are 1 and 999983",
        ),
        ("model: m\n---\nmodel: n\n", "cannot be read as YAML (line 2: but found another document)"),
    ],
)
def test_what_fuzzing_found(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(content, encoding="utf-8")
    line = line_or_result(load_config, path)
    assert isinstance(line, str)
    assert said in line


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/stdin", "pipe"])
def test_files_without_an_end(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    line = line_or_result(load_config, name)
    assert isinstance(line, str)
    assert line == f"{name}: is not a regular file"


@pytest.mark.parametrize("out", ["a\x00b", "x" * 300, "~nobody-of-that-name/x", "loop/x", "/dev/null/x", "file/x"])
def test_folders_that_cannot_be_made(out: str, entered: list[Config], tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").touch()
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**COMPLETE, "out": out}), encoding="utf-8")
    code, said = kedge("ppo", "--config", str(path))
    assert (code, len(entered)) == (2, 0), said
