"""`python -m bench.cluster` and `plan_cluster`: what they print and refuse."""

from __future__ import annotations

import re

import pytest

from bench.cluster import plan_cluster
from bench.cluster.__main__ import main
from kedge_base.errors import ConfigError


def test_a_plan_names_phases_memory_bottleneck_layout_and_band(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--parameters", "8B", "--cards", "16", "--response-tokens", "900", "--longest-response", "4096"]
    assert main([*options, "--epochs", "1", "--critic", "none"]) == 0
    text = capsys.readouterr().out
    phases = ("rollout", "passes", "training", "weight sync", "other", "waiting")
    seconds = [float(re.findall(rf"^  {phase} +([\d.]+) s", text, re.MULTILINE)[0]) for phase in phases]
    assert sum(seconds) > 0
    assert "cheapest that fits: " in text
    assert re.search(r"memory per training card: [\d.]+ of 80 GB", text)
    assert re.search(r"^bottleneck: rollout, bound by ", text, re.MULTILINE)
    assert "(0.8 to 1.25 times)" in text
    assert "NeMo-RL 0.4 Llama-3.1-8B, on policy, 16 H100: 97.7 s" in text
    same = plan_cluster(parameters="8B", cards=16, response_tokens=900, longest_response=4096, epochs=1, critic="none")
    assert text == f"{same}\n"
    assert same.best.layout.cards == 16


def test_a_layout_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--cards", "64", "--rollout-cards", "32", "--tensor-parallel", "4", "--staleness", "1"]
    assert main(["--parameters", "32B", *layout]) == 0
    assert "cheapest that fits: 32 cards train, 32 sample, servers of 4 cards, one step off; H100\n" in (
        capsys.readouterr().out
    )


def test_numbers_of_cards_are_tried(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--parameters", "70B", "--card", "h200", "--longest-response", "2000"]) == 0
    text = capsys.readouterr().out
    # 16 bytes per parameter: 70B do not fit into 8 · 141 GB.
    assert "  8 cards: nothing fits\n" in text
    assert text.count("card-hours per 1,000  ") >= 5


def test_own_figures_make_another_card(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--card-flops", "4000", "--card-bandwidth", "13", "--card-memory", "288", "--card-link", "1800"]
    common = ["--parameters", "8B", "--cards", "8", "--card"]
    assert main([*common, "R200", *own, "--card-network", "100"]) == 0
    assert "R200\n" in capsys.readouterr().out
    assert main([*common, "H100", "--card-memory", "94"]) == 0
    text = capsys.readouterr().out
    assert "of 94 GB" in text
    assert "all figures, since none is of an update like this one" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give either a model (folder or config.json) or its number of parameters (7B)"),
        (["--parameters", "8B", "--model", "m"], "give either a model"),
        (["--parameters", "8X"], "a number of parameters is written 7B, 1.5B or 350M"),
        (["--model", "no-such"], "no-such: No such file or directory; --model is a folder"),
        (["--parameters", "8B", "--card", "B300"], "no card is called 'B300': name one of H100, H200"),
        (["--parameters", "8B", "--card-memory", "-1"], "own figures of a card are flops, bandwidth"),
        (["--parameters", "8B", "--longest-response", "100"], "the longest response cannot be shorter"),
        (["--parameters", "8B", "--responses", "0"], "responses must be at least 1; it is 0"),
        (["--parameters", "8B", "--response-tokens", "nan"], "response_tokens must be at least 1"),
        (["--parameters", "8B", "--staleness", "2"], "staleness is 0 (synchronous) or 1 (one step off)"),
        (["--parameters", "8B", "--cards", "8", "--rollout-cards", "8"], "8 rollout cards of 8 leave"),
        (["--parameters", "8B", "--cards", "1", "--staleness", "1"], "one step off needs cards"),
        (["--parameters", "8B", "--cards", "6", "--tensor-parallel", "4"], "servers of 4 cards need a"),
        (
            ["--parameters", "8B", "--cards", "32", "--tensor-parallel", "16"],
            "no layout is possible: serv",
        ),
        (
            ["--parameters", "70B", "--cards", "8"],
            "no layout of 8 H100 fits a policy of 70.0B parameters: on 8 cards, a training card needs 18",
        ),
    ],
)
def test_an_impossible_plan_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}")
    assert error.count("\n") == 1


def test_a_policy_that_is_too_large_is_told_how_many_cards_are_enough() -> None:
    with pytest.raises(ConfigError, match=r"; (32|64) cards are enough$"):
        plan_cluster(parameters="70B", cards=8)
