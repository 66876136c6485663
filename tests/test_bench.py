"""The benchmark: identical workloads for all systems, figures, tables, and the page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from bench.__main__ import chosen
from bench.cases import ALIKE, DEFAULT, PADDING_SHARES, PEER, SFT, SHARED, Results, cpu_cases, family_cases, gpu_cases
from bench.figures import flop_limit, growths, ratios, spread
from bench.page import write_page
from bench.peers import peers_section, tasks, write_rows
from bench.processes import BenchError, Finished, environment, run_alone
from bench.recipe import DEMONSTRATIONS_FILE, FACTS_FILE, PROMPTS_FILE, Workload
from bench.record import Record
from bench.sampling import sampling_section
from bench.systems import Measurement, settings
from bench.tables import Table
from bench.targets import TARGETS, target_table
from bench.workload import build_models, build_tokenizer, draw_rows, make_workload, source_texts
from kedge.config import load_config
from kedge.data import encode_example, encode_prompt, read_rows
from kedge.models import load_tokenizer
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workload")
    make_workload(Workload(num_prompts=64), folder)
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_peer_is_given_the_ids_that_kedge_makes_of_the_text(workload: Path) -> None:
    tokenizer = load_tokenizer(str(workload / "policy"))
    rows = lines(workload / PROMPTS_FILE)
    table = read_rows(rows, "prompts", tokenizer=tokenizer)
    assert table.rejected == []
    assert [encode_prompt(tokenizer, prompt.text) for prompt in table.records] == [row["input_ids"] for row in rows]
    assert {16 <= len(row["input_ids"]) <= 64 for row in rows} == {True}
    assert json.loads((workload / FACTS_FILE).read_text())["parameters"] == pytest.approx(5.8e6, rel=0.01)


def test_demonstrations_are_as_long_as_responses(workload: Path) -> None:
    tokenizer = load_tokenizer(str(workload / "policy"))
    table = read_rows(lines(workload / DEMONSTRATIONS_FILE), "demonstrations", tokenizer=tokenizer)
    assert table.rejected == []
    lengths = [len(encode_example(tokenizer, row.prompt, row.completion).completion) for row in table.records]
    assert max(lengths) <= 64
    assert 15 < mean(lengths) < 30  # a geometric length of mean 24, capped at 64, has mean 22.4 and deviation 17


def test_no_response_ends_where_none_is_to(workload: Path) -> None:
    tokenizer = load_tokenizer(str(workload / "policy"))
    rows = draw_rows(Workload(hazard=0, num_prompts=4, max_response=9), tokenizer, source_texts(3))
    assert {len(encode_example(tokenizer, row["prompt"], row["completion"]).completion) for row in rows} == {9}


def test_the_policy_ends_with_the_hazards_probability() -> None:
    for hazard, expected in ((24.0, 1 / 24), (0.0, 0.0)):
        policy, reward = build_models(Workload(hazard=hazard), 2048)
        with torch.no_grad():
            logits = policy(torch.randint(3, 2048, (4, 32))).logits
        # The other logits vary slightly around 0, so e^x has a mean above 1.
        assert logits.softmax(-1)[..., 1].mean().item() == pytest.approx(expected, rel=0.1, abs=1e-6)
        assert reward.config.num_labels == 1


def test_a_vocabulary_is_filled_up_to_its_size() -> None:
    tokenizer = build_tokenizer(source_texts(1), 20_000)
    assert len(tokenizer) == 20_000
    text = "def main() -> None:"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(tokenizer.encode(text)) < 8192


@pytest.mark.parametrize(("skew", "low", "high"), [(0.0, 64, 64), (1.0, 28, 37), (3.0, 12, 22)])
def test_prompts_are_skewed_to_the_short_end(workload: Path, skew: float, low: float, high: float) -> None:
    recipe = Workload(num_prompts=300, min_prompt=1, prompt_skew=skew, max_response=2, hazard=0)
    rows = draw_rows(recipe, load_tokenizer(str(workload / "policy")), source_texts(3))
    assert low <= mean(len(row["input_ids"]) for row in rows) <= high


def test_the_hazards_of_the_padding_case_leave_its_share() -> None:
    for share, hazard in PADDING_SHARES.values():
        # The mean of a capped geometric length, as a sum over its tail.
        expected = sum((1 - 1 / hazard) ** token for token in range(64)) if hazard else 64
        assert 1 - expected / 64 == pytest.approx(share, abs=0.01)


def test_a_child_is_watched_from_outside(tmp_path: Path) -> None:
    rows = tmp_path / "metrics.jsonl"
    child = (
        "import sys, time\nkept = b'x' * (300 * 2**20)\n"
        "for row in range(3):\n    time.sleep(0.1); open(sys.argv[1], 'a').write('{}\\n')"
    )
    # In a separate process: a child's peak counts from its fork, and this process has torch loaded.
    parent = (
        "import json, sys\nfrom dataclasses import asdict\nfrom pathlib import Path\n"
        "from bench.processes import run_alone\n"
        "child, folder, rows = sys.argv[1], *map(Path, sys.argv[2:])\n"
        "finished = run_alone([sys.executable, '-c', child, str(rows)], log=folder / 'log', rows=rows, num_threads=1)\n"
        "print(json.dumps(asdict(finished)))"
    )
    command = [sys.executable, "-c", parent, child, str(tmp_path), str(rows)]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    finished = Finished(**json.loads(printed))
    assert len(finished.arrivals) == 3
    assert finished.arrivals[0] > 0.1
    assert finished.arrivals[2] - finished.arrivals[0] >= 0.19
    assert 0.29 < finished.peak_memory < 0.4


def test_the_most_gpu_memory_during_an_update_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '1024\\n20480\\n512\\n'\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    child = [sys.executable, "-c", "import time; time.sleep(1)"]
    assert run_alone(child, log=tmp_path / "log", num_threads=1, gpu=True).peak_memory == 20


def test_a_failing_child_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"exit code 1, out of memory$"):
        run_alone([sys.executable, "-c", "raise SystemExit('out of memory')"], log=tmp_path / "log", num_threads=1)


def test_all_children_have_the_same_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    given = environment(2)
    assert {name: value for name, value in given.items() if name.startswith(("OMP", "MKL"))} == {"OMP_NUM_THREADS": "2"}


def test_the_measuring_process_loads_no_torch() -> None:
    code = "import sys, bench.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_first_updates_are_dropped() -> None:
    rows = [
        {"time/rollout": float(index), "time/update": 2.0, "tokens_per_second": 10.0 * index} for index in range(1, 6)
    ]
    result = Measurement.of(Finished((9.0, 14.0, 16.0, 19.0, 20.0), 1.5), rows, num_dropped=2)
    assert (result.seconds, result.first_update, result.peak_memory) == (2.0, 9.0, 1.5)  # gaps 2, 3, 1
    assert result.phases == {"rollout": 4.0, "reward": 0.0, "experience": 0.0, "train": 0.0}
    assert result.num_tokens == 80.0
    with pytest.raises(BenchError, match="2 updates were logged"):
        Measurement.of(Finished((9.0, 14.0), 1.5), rows[:2], num_dropped=2)


def measured(seconds: float, *, tokens: float = 2000, memory: float = 1.0, first: float = 5.0) -> Measurement:
    return Measurement(
        seconds, dict.fromkeys(("rollout", "reward", "experience", "train"), seconds / 4), tokens, memory, first
    )


def test_ratios_are_within_a_round() -> None:
    slow, fast = [measured(8.0), measured(16.0), measured(9.0)], [measured(4.0), measured(4.0), measured(3.0)]
    assert spread(ratios(slow, fast, "seconds")) == (3.0, 2.0, 4.0)
    assert growths([measured(4.0)], [measured(3.0, tokens=1000)]) == [0.5]


def test_the_limit_of_the_arithmetic() -> None:
    assert flop_limit(num_epochs=4, separate_critic=False) == pytest.approx(5.0)
    assert flop_limit(num_epochs=4, separate_critic=True) == pytest.approx(28 / 3)


def whole_record() -> Record:
    """Every case, with equal values except where targets need others."""
    seconds = {PEER: 10.0, ALIKE: 4.5, DEFAULT: 1.0, SHARED: 5.7, SFT: 1.0, "75 %": 1.1}
    memory = {PEER: 3.0, DEFAULT: 1.2}
    results: Results = {
        case.name: {
            name: [measured(seconds.get(name, 1.0), memory=memory.get(name, 1.0)) for _ in range(case.num_rounds)]
            for name in case.jobs
        }
        for case in cpu_cases(num_rounds=2)
    }
    return Record({"processor": "one"}, {"kedge's": "torch 2"}, 2, results)


def test_the_targets_say_what_was_reached() -> None:
    table = target_table(whole_record().results)
    assert [row[-1] for row in table.rows] == ["required", "aim", "aim", "required", "missed", "required", "aim"]
    assert table.rows[0][-2] == "2.22× (2.22 to 2.22)"
    assert table.rows[5][-2] == "+10 % (+10 to +10)"
    assert len(TARGETS) == len(table.rows)


def test_what_was_not_measured_is_a_dash() -> None:
    assert {tuple(row[-2:]) for row in target_table({}).rows} == {("–", "–")}


def test_a_table_is_markdown() -> None:
    text = Table("T", ["system", "s"], [["kedge", "1.00"]]).markdown()
    assert text.splitlines() == ["| system | s    |", "| ------ | ---- |", "| kedge  | 1.00 |"]


def test_the_page_has_every_case_and_says_what_ran_on_a_gpu(tmp_path: Path) -> None:
    record = whole_record()
    record.save(tmp_path / "results" / "cpu.json")
    page = write_page(Record.load(tmp_path / "results" / "cpu.json"), None)
    assert page == write_page(record, None)
    headings = [line for line in page.splitlines() if line.startswith("### ")]
    assert len(headings) == 9  # three comparisons, the SFT steps, five growths
    assert [line for line in page.splitlines() if line.startswith(f"| {PEER}")][-1].count("|") == 4
    assert "`make bench-gpu` writes a table here" in page


def test_the_page_tells_a_gpus_figures() -> None:
    [case] = gpu_cases(num_rounds=1)
    # 6 × 1e9 parameters × 2000 tokens × 5 SFT steps in 1 s, of a GPU with four times that rate.
    card = {"card": "A card", "flops": 2.4e14, "parameters": 10**9}
    gpu = Record({}, {}, 1, {"gpu": {name: [measured(1.0)] for name in case.jobs}}, card)
    [row] = [line for line in write_page(whole_record(), gpu).splitlines() if "25 %" in line and DEFAULT in line]
    assert [cell.strip() for cell in row.split("|")][1:-1] == [DEFAULT, "1.00", "2,000", "1.00", "25 %", "1.00"]


def test_the_page_has_the_cost_of_each_relative() -> None:
    [case] = family_cases(num_rounds=1)
    runs = {name: [replace(measured(5.2), flop_limit=4.68)] for name in case.jobs} | {SFT: [measured(1.3)]}
    page = write_page(whole_record(), None, Record({"processor": "another"}, {}, 1, {"family": runs}))
    [row] = [line for line in page.splitlines() if line.startswith("| RLOO")]
    assert [cell.strip() for cell in row.split("|")][2:6] == ["4.00", "4.68", "117 %", "5.20"]
    assert "- processor: another" in page
    assert "| RLOO" not in write_page(whole_record(), None)


ALL_CASES = [*cpu_cases(num_rounds=1), *gpu_cases(num_rounds=1), *family_cases(num_rounds=1)]


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)
def test_kedge_understands_its_settings(case: Any) -> None:
    for job in case.jobs.values():
        load_config(overrides=settings(job))


def test_a_case_that_is_not_there_is_one_line() -> None:
    cases = cpu_cases(num_rounds=1)
    assert [case.name for case in chosen(cases, ["epochs", "full"])] == ["full", "epochs"]
    with pytest.raises(BenchError, match="unknown case 'speed'; expected one of variable, full"):
        chosen(cases, ["speed"])


def test_workloads_do_not_share_a_folder() -> None:
    recipes = {job.workload for case in cpu_cases(num_rounds=1) for job in case.jobs.values()}
    assert len({recipe.name for recipe in recipes}) == len(recipes) > 5
    assert replace(Workload(), seed=1).name != Workload().name


def test_the_peers_version_is_the_one_that_make_installs() -> None:
    assert f"trl=={PEER.removeprefix('TRL ')}" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_settings_of_an_instruction_model_are_those_of_its_stages() -> None:
    for task in tasks("model", "fp32"):
        stage, fields = task.kedge[0], [part for part in task.kedge if "=" in part]
        preset = task.kedge[task.kedge.index("--preset") + 1] if "--preset" in task.kedge else None
        config = load_config(None, fields, preset=preset, stage=stage)
        assert config.runtime.precision == "fp32"
        if stage == "ppo":
            assert config.responses_per_update == 32
            assert (config.ppo.num_epochs, config.ppo.num_minibatches) == (1, 1)
            assert config.ppo.kl_coef == {"grpo": 0.04, "rloo": 0.03}[task.trl]  # as in peer_trainers.py
    assert 'beta={"grpo": 0.04, "rloo": 0.03}[options.trainer]' in (ROOT / "bench/peer_trainers.py").read_text()


def test_an_instruction_model_gets_the_rows_of_every_stage(tmp_path: Path) -> None:
    write_rows(tmp_path, num_steps=2)
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    assert len(read_rows(lines(tmp_path / "prompts.jsonl"), "prompts", tokenizer=tokenizer).records) == 12
    assert len(read_rows(lines(tmp_path / "demonstrations.jsonl"), "demonstrations", tokenizer=tokenizer).records) == 24
    pairs = read_rows(lines(tmp_path / "comparisons.jsonl"), "comparisons", tokenizer=tokenizer)
    assert len(pairs.records) == 24
    assert pairs.rejected == []


def test_the_section_on_an_instruction_model_has_ratios_round_by_round() -> None:
    runs = {
        "kedge": [{"seconds": 2.0, "memory": 1.0}, {"seconds": 4.0, "memory": 2.0}, {"seconds": 3.0, "memory": 1.0}],
        "TRL": [{"seconds": 8.0, "memory": 4.0}, {"seconds": 8.0, "memory": 4.0}, {"seconds": 9.0, "memory": 2.0}],
    }
    record = {"machine": {"processor": "a"}, "versions": {}, "precision": "fp32", "steps": 4, "results": {"SFT": runs}}
    section = peers_section(record)
    row = next(line for line in section.splitlines() if line.startswith("| SFT"))
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "SFT", "3.0", "8.0", "3.00× (2.00 to 4.00)", "1.0", "4.0", "0.50 (0.25 to 0.50)",
    ]  # fmt: skip
    assert section in write_page(whole_record(), None, None, record)
    assert "## An instruction model" not in write_page(whole_record(), None)


def test_the_section_on_sampling_has_tokens_a_second() -> None:
    ours = [{"seconds": 2.0, "tokens": 400, "memory": 1.0}, {"seconds": 4.0, "tokens": 400, "memory": 2.0}]
    theirs = [{"seconds": 4.0, "tokens": 400, "memory": 3.0}, {"seconds": 4.0, "tokens": 200, "memory": 3.0}]
    results = {"kedge": ours, "transformers": theirs}
    record = {"machine": {"processor": "a"}, "versions": {}, "precision": "fp32", "results": results}
    section = sampling_section(record)
    found = [[cell.strip() for cell in row.strip("|").split("|")] for row in section.splitlines() if row[:1] == "|"]
    assert found[2:] == [["kedge", "150", "–", "1.5"], ["transformers", "75", "2.00× (2.00 to 2.00)", "3.0"]]
    assert section in write_page(whole_record(), None, sampling=record)
