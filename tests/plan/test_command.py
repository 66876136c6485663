"""`kedge plan --cluster` and `kedge.plan_cluster`: what they print, and what they refuse."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import kedge as package
from kedge.cli import main
from kedge.errors import ConfigError


def kedge(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kedge", "plan", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_a_plan_names_phases_memory_bottleneck_layout_and_band(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--parameters", "8B", "--cards", "16", "--response-tokens", "900", "--longest-response", "4096"]
    assert kedge(monkeypatch, "--cluster", *options, "--epochs", "1", "--critic", "none") == 0
    text = capsys.readouterr().out
    phases = ("rollout", "passes", "training", "weight sync", "other", "waiting")
    seconds = [float(re.findall(rf"^  {phase} +([\d.]+) s", text, re.MULTILINE)[0]) for phase in phases]
    assert sum(seconds) > 0
    assert "cheapest that fits: " in text
    assert re.search(r"memory per training card: [\d.]+ of 80 GB", text)
    assert re.search(r"^bottleneck: rollout, bound by ", text, re.MULTILINE)
    assert "(0.8 to 1.25 times)" in text
    assert "NeMo-RL 0.4 Llama-3.1-8B, on policy, 16 H100: 97.7 s" in text
    same = package.plan_cluster(
        parameters="8B", cards=16, response_tokens=900, longest_response=4096, epochs=1, critic="none"
    )
    assert text == f"{same}\n"
    assert same.best.layout.cards == 16


def test_a_layout_can_be_given(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--cards", "64", "--rollout-cards", "32", "--tensor-parallel", "4", "--staleness", "1"]
    assert kedge(monkeypatch, "--cluster", "--parameters", "32B", *layout) == 0
    assert "cheapest that fits: 32 cards train, 32 sample, servers of 4 cards, one step off; H100\n" in (
        capsys.readouterr().out
    )


def test_numbers_of_cards_are_tried(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert kedge(monkeypatch, "--cluster", "--parameters", "70B", "--card", "h200", "--longest-response", "2000") == 0
    text = capsys.readouterr().out
    # 16 bytes per parameter: 70B do not fit into 8 · 141 GB.
    assert "  8 cards: nothing fits\n" in text
    assert text.count("card-hours per 1,000  ") >= 5


def test_own_figures_make_another_card(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--card-flops", "4000", "--card-bandwidth", "13", "--card-memory", "288", "--card-link", "1800"]
    common = ["--cluster", "--parameters", "8B", "--cards", "8", "--card"]
    assert kedge(monkeypatch, *common, "R200", *own, "--card-network", "100") == 0
    assert "R200\n" in capsys.readouterr().out
    assert kedge(monkeypatch, *common, "H100", "--card-memory", "94") == 0
    text = capsys.readouterr().out
    assert "of 94 GB" in text
    assert "all figures, since none is of an update like this one" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--parameters", "8B"],
            "kedge plan needs a stage (sft, reward, critic, ppo, rlhf), or --cluster for a cluster",
        ),
        (["generate"], "'generate' cannot be planned; kedge plan takes sft, reward, critic, ppo, rlhf"),
        (["pppo"], "'pppo' is no stage; kedge plan takes sft, reward, critic, ppo, rlhf"),
        (["ppo"], "kedge plan ppo needs model: pass --model"),
        (["ppo", "--model", "./no-such"], "model './no-such': no such folder"),
        (["ppo", "--cluster", "--parameters", "8B"], "--cluster plans PPO from a few numbers and takes no stage"),
        (["--cluster", "--parameters", "8B", "--critic", "own"], "--critic is 'own'; with --cluster it is one of"),
        (["--cluster"], "give either a model (folder or config.json) or its number of parameters (7B)"),
        (["--cluster", "--parameters", "8B", "--model", "m"], "give either a model"),
        (["--cluster", "--parameters", "8X"], "a number of parameters is written 7B, 1.5B or 350M"),
        (["--cluster", "--model", "no-such"], "no-such: No such file or directory; --model is a folder"),
        (["--cluster", "--parameters", "8B", "--card", "B300"], "no card is called 'B300': name one of H100, H200"),
        (["--cluster", "--parameters", "8B", "--card-memory", "-1"], "own figures of a card are flops, bandwidth"),
        (["--cluster", "--parameters", "8B", "--longest-response", "100"], "the longest response cannot be shorter"),
        (["--cluster", "--parameters", "8B", "--batch", "0"], "responses must be at least 1; it is 0"),
        (["--cluster", "--parameters", "8B", "--response-tokens", "nan"], "response_tokens must be at least 1"),
        (["--cluster", "--parameters", "8B", "--staleness", "2"], "staleness is 0 (synchronous) or 1 (one step off)"),
        (["--cluster", "--parameters", "8B", "--cards", "8", "--rollout-cards", "8"], "8 rollout cards of 8 leave"),
        (["--cluster", "--parameters", "8B", "--cards", "1", "--staleness", "1"], "one step off needs cards"),
        (["--cluster", "--parameters", "8B", "--cards", "6", "--tensor-parallel", "4"], "servers of 4 cards need a"),
        (
            ["--cluster", "--parameters", "8B", "--cards", "32", "--tensor-parallel", "16"],
            "no layout is possible: serv",
        ),
        (
            ["--cluster", "--parameters", "70B", "--cards", "8"],
            "no layout of 8 H100 fits a policy of 70.0B parameters: on 8 cards, a training card needs 18",
        ),
    ],
)
def test_an_impossible_plan_is_one_line(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kedge(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}")
    assert error.count("\n") == 1


def test_a_policy_that_is_too_large_is_told_how_many_cards_are_enough() -> None:
    with pytest.raises(ConfigError, match=r"; (32|64) cards are enough$"):
        package.plan_cluster(parameters="70B", cards=8)


def test_a_plan_needs_no_torch(tmp_path: Path) -> None:
    """Neither the command nor the function imports a heavy library."""
    code = (
        "import sys, kedge; kedge.plan_cluster(parameters='8B', cards=8);"
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == 0
