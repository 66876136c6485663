"""Runs with a judge behind an API: evaluate, ppo and rlhf, their limits, a kill, and where the key is not."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kedge.cli import app
from kedge.config import load_config
from kedge.rewards import RewardTerm
from kedge.runs.judges import with_judges
from kedge_base.errors import ConfigError, KedgeError
from kedge_base.run_folder.record_format import read_json_lines
from kedge_tasks.judge import read_usage
from tests.forking import forked_kedge, started_kedge
from tests.lab.evaluation.speakers import run_kedge, save_speaker
from tests.tasks.judge.standin import Reply, StandIn, likes_e, quoted, said
from tests.tiny import save_tiny_policy

KEY = "sk-Secret0123456789abcdef"
PROMPTS = [{"prompt": f"Deck {number}:", "completion": "e" * number or "x"} for number in range(6)]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with StandIn().running() as stand_in:
        yield stand_in


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return written(tmp_path / "prompts.jsonl", PROMPTS)


def evaluation(tmp_path: Path, prompts: Path, judge: str) -> list[object]:
    model = tmp_path / "policy"
    if not model.exists():
        save_speaker(model)  # writes "eeee"
    given = ("--model", model, "--prompts", prompts, "--judge", judge, "--out", tmp_path / "run")
    return ["evaluate", *given, "generate.max_new_tokens=4"]


def evaluated(tmp_path: Path, prompts: Path, server: StandIn, *more: object) -> Any:
    return forked_kedge(*evaluation(tmp_path, prompts, server.judge), *more)


def evaluated_here(tmp_path: Path, prompts: Path, judge: str, *more: str) -> Any:
    """Run the command in this process, which is faster."""
    return CliRunner().invoke(app, [*map(str, evaluation(tmp_path, prompts, judge)), *more])


def test_a_judge_scores_both_sides_of_an_evaluation(tmp_path, prompts, server):
    done = evaluated_here(tmp_path, prompts, server.judge)
    assert done.exit_code == 0, done.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    # Four letters e against 0 to 5: wins over 0 to 3, a tie, a loss.
    assert [summary[name] for name in ("won", "tied", "lost", "judge")] == [4, 1, 1, "m"]
    assert summary["score"]["value"] == 5.0
    assert summary["judge_usage"] == {"requests": 11, "tokens": 165, "cost": None, "unanswered": 0}
    assert "11 requests, 165 tokens" in done.stdout


def test_a_pairwise_judge_sees_both_orders_and_its_biases_are_shown(tmp_path, prompts, server):
    def first_or_longer(body: Mapping[str, Any]) -> Reply:
        _, first, second = quoted(body)
        return said({"reasoning": "", "winner": "A" if len(first) >= len(second) or len(first) == 3 else "B"})

    server.answer = first_or_longer
    done = evaluated_here(tmp_path, prompts, server.judge, "evaluate.judge_mode=pairwise")
    assert done.exit_code == 0, done.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    # Against 3 letters, the first wins in both orders; the equal texts tie without a request.
    assert [summary[name] for name in ("won", "tied", "lost")] == [3, 2, 1]
    assert len(server.requests) == 10
    assert summary["position_bias"]["contradicted"] == pytest.approx(1 / 6)
    assert summary["longer_wins"]["value"] == pytest.approx(4.5 / 5)
    # With their stop tokens, references have 2, 2, 3, 4, 5 and 6 tokens. Where lengths differ, we win 3.5 of 5 and
    # are longer in 3 of 5: 0.6 · 0.7 + 0.4 · 0.3.
    assert summary["longer_wins_expected"] == pytest.approx(0.54)
    assert "54% expected" in done.stdout


@pytest.mark.parametrize(("stage", "mode"), [("ppo", "score"), ("rlhf", "pairwise")])
def test_an_evaluation_in_the_folder_of_a_run_has_its_own_answers_and_limits(tmp_path, prompts, server, stage, mode):
    (tmp_path / "config.yaml").write_text(f"# stage: {stage}\n")
    done = evaluated_here(tmp_path, prompts, server.judge, f"evaluate.judge_mode={mode}")
    assert done.exit_code == 0, done.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["judge_usage"]["requests"] == len(server.requests) > 0
    assert not list(tmp_path.glob("judges*"))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"rubric": 3}, "rubric 3 cannot be read"),
        ({"max_tokens": "many"}, "judge.max_tokens"),
        ({"folder": "x"}, "judge.folder"),
        ({"limits": {}}, "judge.limits"),
    ],
)
def test_a_wrong_setting_of_a_term_is_a_mistake_in_the_configuration(settings, line):
    term = RewardTerm("openai:m@http://127.0.0.1:1/v1", settings=settings)
    with pytest.raises(ConfigError, match=line):
        with_judges([term], load_config())


def test_a_term_has_its_own_rubric_and_limit(tmp_path):
    (tmp_path / "rubric.txt").write_text("Count.")
    own = {"rubric": str(tmp_path / "rubric.txt"), "max_tokens": 9, "ranks": True}
    term = RewardTerm("openai:m@http://127.0.0.1:1/v1", settings=own)
    [judge, function] = with_judges([term, "rewards.py:score"], load_config(None, ["judge.max_requests=7"]))
    assert [judge.settings[name] for name in own] == ["Count.", 9, True]
    assert judge.settings["limits"]["max_requests"] == 7
    assert function.settings == {}


def test_a_limit_ends_an_evaluation_which_the_same_command_continues(tmp_path, prompts, server):
    done = evaluated(tmp_path, prompts, server, "judge.max_requests=7")
    assert done.returncode == 2
    [line] = [line for line in done.stderr.splitlines() if "max_requests" in line]
    assert "judge.max_requests=7 is reached" in line
    assert len(server.requests) == 7
    done = evaluated(tmp_path, prompts, server, "judge.max_requests=11")
    assert done.returncode == 0, done.stderr
    assert len(server.requests) == 11


def test_a_killed_evaluation_is_repeated_with_its_answers(tmp_path, prompts, server):
    killed_at(server, 7, evaluation(tmp_path, prompts, server.judge), tmp_path)
    for path in (tmp_path / "run").iterdir():
        if not path.name.startswith("judges.sqlite"):
            path.unlink()
    done = evaluated(tmp_path, prompts, server, "judge.concurrency=1")
    assert done.returncode == 0, done.stderr
    asked = [str(body["messages"]) for body in server.requests]
    assert len(set(asked)) == 11
    assert len(asked) <= 11 + 8  # those that were on their way


def killed_at(server: StandIn, number: int, command: list[object], folder: Path) -> None:
    """Kill a run once the server has got a request with this number."""
    reached = threading.Event()

    def slow(body: Mapping[str, Any]) -> Reply:
        if len(server.requests) >= number:
            reached.set()
            time.sleep(0.3)
        return likes_e(body)

    server.answer = slow
    with started_kedge(*command, cwd=folder) as process:
        assert reached.wait(60)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    server.answer = likes_e


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"more": "judge.rubric=none.txt"}, "rubric none.txt cannot be read"),
        ({"more": "judge.max_cost=5"}, "price_in"),
        ({"more": "judge.max_cost={cost: 5, price_in: 1}"}, "price_out"),
        ({"more": "generate.num_responses=2"}, "gives 1 to 10"),
        ({"judge": "openai:other@{url}"}, "has no such model; it has m"),
        ({"judge": "openai:m@127.0.0.1:80"}, "is not of the form openai:MODEL@URL"),
        ({"judge": "openai:m@http://127.0.0.1:1/v1"}, "is the server running"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_loaded(tmp_path, prompts, server, settings, line):
    judge = settings.get("judge", server.judge).format(url=server.url)
    more = [settings["more"]] if "more" in settings else []
    done = evaluated_here(tmp_path, prompts, judge, *more)
    assert isinstance(done.exception, KedgeError)
    assert line in str(done.exception)
    assert server.requests == []
    assert not (tmp_path / "run").exists()


def trained(tmp_path: Path, prompts: Path, server: StandIn, *more: object, out: str = "ppo") -> list[object]:
    model = tmp_path / "base"
    if not model.exists():
        save_tiny_policy(model)
    return [
        *("ppo", "--model", model, "--prompts", prompts, "--reward", server.judge, "--out", tmp_path / out),
        *("rollout.num_prompts=4", "rollout.max_new_tokens=6", "ppo.num_updates=4", "ppo.num_minibatches=2"),
        *("checkpoint.every=1", "runtime.report=false", *more),
    ]


def test_a_limit_ends_a_run_also_where_failures_give_a_score(tmp_path, prompts, server):
    command = trained(tmp_path, prompts, server, "judge.max_requests=6", "reward_functions.on_error=0.5")
    done = forked_kedge(*command)
    assert done.returncode == 2
    assert "judge.max_requests=6 is reached" in done.stderr
    assert len(server.requests) == 6
    [row] = read_json_lines(tmp_path / "ppo" / "metrics.jsonl")
    assert row["reward/m_given_up"] == 0


def test_a_killed_ppo_run_asks_nothing_twice(tmp_path, prompts, server):
    with StandIn().running() as twin:
        whole = forked_kedge(*trained(tmp_path, prompts, twin, out="whole"))
    assert whole.returncode == 0, whole.stderr
    killed_at(server, 7, trained(tmp_path, prompts, server), tmp_path)
    done = forked_kedge("ppo", "--resume", tmp_path / "ppo", "judge.max_requests=500")
    assert done.returncode == 0, done.stderr
    scores = [
        [row["reward/score_mean"] for row in read_json_lines(tmp_path / run / "metrics.jsonl")]
        for run in ("ppo", "whole")
    ]
    assert scores[0] == scores[1]
    asked = [str(body["messages"]) for body in server.requests]
    assert set(asked) == {str(body["messages"]) for body in twin.requests}
    assert len(asked) <= len(set(asked)) + 8  # those that were on their way


@pytest.mark.slow
def test_rlhf_labels_with_a_judge_and_its_stages_share_the_limits(tmp_path, prompts, server):
    model = save_tiny_policy(tmp_path / "base")
    demonstrations = written(
        tmp_path / "d.jsonl", [{"prompt": row["prompt"], "completion": " the sea"} for row in PROMPTS]
    )
    compared = [{"prompt": row["prompt"], "chosen": " the sea", "rejected": " rope"} for row in PROMPTS]
    command = (
        *("rlhf", "--model", model, "--demonstrations", demonstrations, "--out", tmp_path / "chain"),
        *("--comparisons", written(tmp_path / "c.jsonl", compared), "--prompts", prompts, "--reward", server.judge),
        *("rlhf.num_rounds=2", f"rlhf.labeler={server.judge}", "rlhf.num_prompts=4", "rlhf.num_responses=3"),
        *("rollout.num_prompts=4", "rollout.max_new_tokens=6", "ppo.num_updates=1", "ppo.num_minibatches=2"),
        *("sft.batch_size=4", "reward_model.batch_size=4", "data.eval_fraction=0.2", "runtime.report=false"),
    )
    done = forked_kedge(*command, "judge.max_requests=6")
    assert done.returncode == 2
    assert "judge.max_requests=6 is reached" in done.stderr
    assert len(server.requests) == 6
    done = forked_kedge("rlhf", "--resume", tmp_path / "chain", "judge.max_requests=500")
    assert done.returncode == 0, done.stderr
    rankings = list(read_json_lines(tmp_path / "chain" / "comparisons-2.jsonl"))
    assert rankings
    for row in rankings:
        counts = [text.count("e") for text in row["responses"]]
        levels = sorted(set(counts), reverse=True)
        assert row["ranks"] == [levels.index(count) + 1 for count in counts]
    kinds = [body["response_format"]["json_schema"]["name"] for body in server.requests]
    assert {"score", "winner"} == set(kinds)
    assert [path.parent.name for path in tmp_path.rglob("judges.sqlite")] == ["chain"]
    used = read_usage(tmp_path / "chain" / "judges.sqlite")
    assert used is not None
    assert used["requests"] == len(server.requests) == len({str(body["messages"]) for body in server.requests})


def test_the_key_is_in_no_file_output_or_process_listing(tmp_path, prompts, server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    listed: list[bytes] = []

    def leaky(body: Mapping[str, Any]) -> Reply:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                listed.append(path.read_bytes())
            except OSError:  # ended
                continue
        if len(server.requests) > 8:
            return Reply({"error": {"message": f"rate limit for {KEY}"}}, 500)
        return said({"reasoning": f"I know {KEY}", "score": 3})

    server.answer = leaky
    command = trained(tmp_path, prompts, server, "judge.retries=0", "reward_functions.retries=0", "runtime.report=true")
    done = run_kedge(*map(str, command))
    assert done.returncode == 2
    assert re.search(r"500 .*rate limit for \[key\]", done.stderr)
    assert set(server.keys) == {f"Bearer {KEY}"}
    assert KEY not in done.stdout + done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"config.yaml", "judges.sqlite", "reward.log"} <= {path.name for path in files}
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    assert listed
    assert not any(KEY.encode() in each for each in listed)
