r"""Verifiers against answers that others made: which they accept, corrupted ones included, and how fast they are.

    python -m bench.graders [--gsm8k train.jsonl] [--svamp SVAMP.json] [--mbpp mbpp.jsonl] [--page]

The files are those of https://github.com/openai/grade-school-math, https://github.com/arkilpatel/SVAMP and
https://github.com/google-research/google-research (mbpp); without any, the hostile expressions alone are measured. The
table is printed; with all three files it also goes into docs/verifiers.md, and the figures into
bench/results/graders.json.

- References: GSM8K's solutions as responses to themselves; SVAMP's number in a sentence and after `####`, as a float
  and as an integer, against a row with a float and one with an integer as text; MBPP's programs in the sandbox.
- Verdicts per second are those of the fastest of three runs: of processor time, but of elapsed time for programs, which
  are processes, as many at a time as there are cores. That figure needs an idle machine; the record has its load.
- Corruptions: each of GSM8K's and SVAMP's answers once in each way that changes it. No row of theirs has a unit, so for
  a wrong unit the row is given one (42 %, $42) and the response another. A unit that the row does not ask for is meant
  to be accepted.
- Hostile expressions: what would take minutes, gigabytes or a deep recursion, as answers to `math`, compared with an
  expression and with a number. Of the two processor times, the longer one is shown.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from bench.machine import describe_machine
from bench.processes import BenchError
from bench.tables import renewed
from kedge.rewards.source import Verdict
from kedge_base.errors import KedgeError, RewardError
from kedge_base.run_folder.output import replace_file
from kedge_tasks.sandbox import open_sandbox
from kedge_tasks.verify import code, gsm8k, math, number
from kedge_tasks.verify.programs import check_code

ROOT: Final = Path(__file__).parents[1]
RECORD: Final = ROOT / "bench" / "results" / "graders.json"
PAGE: Final = ROOT / "docs" / "verifiers.md"
SEED: Final = 0
RUNS: Final = 3

FORMS: Final = ("The answer is {}.", "#### {}")
NUMBERS: Final[Mapping[str, Callable[[int, random.Random], int]]] = {
    "off by one": lambda value, draw: value + draw.choice((-1, 1)),
    "other sign": lambda value, _: -value,
    "times ten": lambda value, _: 10 * value,
    "permuted digits": lambda value, draw: _signed(value, "".join(draw.sample(str(abs(value)), len(str(abs(value)))))),
    "an extra digit": lambda value, draw: _signed(value, _inserted(str(abs(value)), draw)),
}
EARLIER: Final = "right, then another last"
CORRECTED: Final = "`####` right, then another"
WRONG_UNIT: Final = "wrong unit"
UNASKED_UNIT: Final = "unit where the row has none"
KINDS: Final = (*NUMBERS, EARLIER, CORRECTED, WRONG_UNIT, UNASKED_UNIT)
UNITS: Final = (("{}%", "${}"), ("${}", "{}%"), ("${}", "€{}"))
"""A row's unit, and another."""

HOSTILE: Final[Mapping[str, str]] = {
    "9^{9^{9^9}}": "9^{9^{9^9}}",
    "((…x…))": "(" * 400 + "x" + ")" * 400,
    r"\{0,…,2999\}": r"\{" + ",".join(map(str, range(3000))) + r"\}",
    "10^{10^{10}}+x": "10^{10^{10}}+x",
    r"\int_0^1x^{1000000}dx!": r"\int_0^{1}x^{1000000}dx!",
    "(x+1)(x+1)…": "(" + "x+1)(" * 60 + "x)",
    r"\sum_{k=1}^{10^9}k^k": r"\sum_{k=1}^{10^9} k^{k}",
    "1000000!!": "1000000!!",
}
"""Expressions by the name that a table shows."""

_Row = TypeVar("_Row")


class Problem(NamedTuple):
    """A word problem's solution without its last line, its number, and the row's column `answer`."""

    steps: str
    value: int
    answer: Any


class Task(NamedTuple):
    """A program as a response, and the columns of its row that `code` reads."""

    response: str
    test_list: Sequence[str]
    test_imports: Sequence[str]
    test_setup_code: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table. Returns 2 on an error."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.graders", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gsm8k", type=Path, help="GSM8K's train.jsonl or test.jsonl")
    parser.add_argument("--svamp", type=Path, help="SVAMP.json")
    parser.add_argument("--mbpp", type=Path, help="MBPP's mbpp.jsonl")
    parser.add_argument("--page", action="store_true", help="write the page from the record, and measure nothing")
    options = parser.parse_args(arguments)
    try:
        record = json.loads(RECORD.read_text(encoding="utf-8")) if options.page else measure(options)
        if not options.page and options.gsm8k and options.svamp and options.mbpp:
            text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
            replace_file(RECORD, [text.encode()])
            options.page = True
        if options.page:
            PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8"), "graders", table(record)), encoding="utf-8")
    except (BenchError, KedgeError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    print(table(record))
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All that the given files allow. They are read before anything is measured."""
    solved = read(options.gsm8k, gsm8k_problem) if options.gsm8k else []
    plain = read(options.svamp, svamp_problem) if options.svamp else []
    tasks = read(options.mbpp, mbpp_task) if options.mbpp else []
    rows: list[dict[str, Any]] = []
    if solved:
        answers = [each.answer for each in solved]
        rows.append(judged("GSM8K's solutions, `gsm8k`", lambda: gsm8k(answers, answers)))
    if plain:
        pairs = svamp_pairs(plain)
        rows.append(
            judged(f"SVAMP's numbers in {len(pairs) // len(plain)} forms, `number`", lambda: number(*columns(pairs)))
        )
    if tasks:
        rows.append(programs(tasks))
    wrong = corruptions({"gsm8k": solved, "svamp": plain}) if solved or plain else []
    machine = describe_machine(len(os.sched_getaffinity(0)))
    return {"machine": machine, "seed": SEED, "references": rows, "corrupted": wrong, "hostile": hostile(HOSTILE)}


# Rows


def read(path: Path, parse: Callable[[Mapping[str, Any]], _Row]) -> list[_Row]:
    """The rows of a JSON or JSON-lines file.

    Raises:
        BenchError: It cannot be read, or a row is another one.
    """
    try:
        text = path.read_text(encoding="utf-8")
        is_array = text.lstrip().startswith("[")
        found = json.loads(text) if is_array else [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise BenchError(f"{path}: not a file of JSON rows: {error}") from error
    if not found:
        raise BenchError(f"{path}: no rows")
    rows = []
    for place, row in enumerate(found, start=1):
        try:
            rows.append(parse(row))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BenchError(f"{path}, row {place}: not as expected: {error!r}") from error
    return rows


def gsm8k_problem(row: Mapping[str, Any]) -> Problem:
    """A row of GSM8K."""
    steps, _, value = row["answer"].rpartition("####")
    return Problem(steps, int(value.replace(",", "")), row["answer"])


def svamp_problem(row: Mapping[str, Any]) -> Problem:
    """A row of SVAMP, whose answers are whole numbers written as floats."""
    if row["Answer"] != int(row["Answer"]):
        raise ValueError(f"the answer {row['Answer']} is not a whole number")
    return Problem("", int(row["Answer"]), row["Answer"])


def mbpp_task(row: Mapping[str, Any]) -> Task:
    """A row of MBPP, whole or sanitized."""
    response = f"```python\n{row['code']}\n```"
    return Task(response, row["test_list"], row.get("test_imports", ()), row.get("test_setup_code", ""))


# References


def svamp_pairs(problems: Sequence[Problem]) -> list[tuple[str, Any]]:
    """Responses and the row's answer: all forms of the right number."""
    return [
        (form.format(written), answer)
        for form in FORMS
        for each in problems
        for written in (each.answer, each.value)
        for answer in (each.answer, str(each.value))
    ]


def columns(pairs: Sequence[tuple[str, Any]]) -> tuple[list[str], list[Any]]:
    """Responses and answers, as a verifier takes them."""
    return [response for response, _ in pairs], [answer for _, answer in pairs]


def programs(tasks: Sequence[Task]) -> dict[str, Any]:
    """The verdicts on MBPP's programs in the sandbox, but for rows that are refused before a run."""
    place = open_sandbox("auto")
    usable = [each for each in tasks if not is_refused(each)]
    if not usable:
        raise BenchError("MBPP: `code` refuses all rows")
    responses, tests, imports, setups = (list(column) for column in zip(*usable, strict=True))

    def verify() -> list[Verdict]:
        return code(responses, tests, test_imports=imports, test_setup_code=setups, sandbox=place.name)

    load = round(os.getloadavg()[0], 1)
    found = judged(f"MBPP's programs, `code` in {place.name}", verify, clock=time.perf_counter)
    return {**found, "refused": len(tasks) - len(usable), "load": load}


def is_refused(task: Task) -> bool:
    """True if `code` cannot use the row."""
    try:
        with redirect_stderr(io.StringIO()):  # the name of the sandbox, each time
            check_code([task.test_list], [task.test_imports], [task.test_setup_code])
    except RewardError:
        return True
    return False


def judged(
    label: str,
    verify: Callable[[], Sequence[Verdict]],
    *,
    runs: int = RUNS,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, Any]:
    """How many answers a verifier accepts, and the seconds of its fastest run."""
    seconds: list[float] = []
    found: Sequence[Verdict] = ()
    for _ in range(runs):
        started = clock()
        found = verify()
        seconds.append(clock() - started)
    accepted = sum(float(each) == 1.0 for each in found)
    return {"answers": label, "count": len(found), "accepted": accepted, "seconds": round(min(seconds), 3)}


# Corruptions


def corruptions(data: Mapping[str, Sequence[Problem]]) -> list[dict[str, Any]]:
    """How many corrupted answers are accepted, by kind; GSM8K's by `gsm8k`, SVAMP's by `number`."""
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        texts: dict[str, list[tuple[str, str]]] = {}
        for name, problems in data.items():
            draw = random.Random(f"{SEED} {name} {kind}")
            texts[name] = [pair for each in problems if (pair := corrupt(kind, each, draw)) is not None]
        solutions = columns([(response, f"#### {answer}") for response, answer in texts["gsm8k"]])
        plain = columns(texts["svamp"])
        rows.append(judged(kind, lambda given=(solutions, plain): [*gsm8k(*given[0]), *number(*given[1])], runs=1))
    return rows


def corrupt(kind: str, problem: Problem, draw: random.Random) -> tuple[str, str] | None:
    """A response that is wrong, and the row's answer; None if this kind leaves the value as it is.

    Args:
        kind: One of `KINDS`.
        problem: The problem.
        draw: Draws what the kind leaves open.
    """
    steps, value, _ = problem
    if kind in NUMBERS:
        drawn = (NUMBERS[kind](value, draw) for _ in range(20))
        other = next((each for each in drawn if each != value), None)
        return None if other is None else (f"{steps}#### {other}", str(value))
    other = value + draw.randint(1, 9)
    asked, given = draw.choice(UNITS)
    return {
        EARLIER: (f"{steps}It is {value}, and then {other}.", str(value)),
        CORRECTED: (f"{steps}#### {value}\nNo, it is\n#### {other}", str(value)),
        WRONG_UNIT: (f"{steps}#### {given.format(value)}", asked.format(value)),
        UNASKED_UNIT: (f"{steps}#### {given.format(value)}", str(value)),
    }[kind]


def _signed(value: int, digits: str) -> int:
    return -int(digits) if value < 0 else int(digits)


def _inserted(digits: str, draw: random.Random) -> str:
    place = draw.randint(0, len(digits))
    return digits[:place] + draw.choice("0123456789") + digits[place:]


# Hostile expressions


def hostile(expressions: Mapping[str, str]) -> list[dict[str, Any]]:
    """The verdict of `math` on each, compared with an expression and with a number, and the longer processor time."""
    math([r"\boxed{x+1}"], ["1+x"])  # loads the library
    rows: list[dict[str, Any]] = []
    for name, expression in expressions.items():
        for reference in ("1+x", "12"):
            started = time.process_time()
            [verdict] = math([rf"\boxed{{{expression}}}"], [reference])
            seconds = round(time.process_time() - started, 2)
            rows.append({"expression": name, "reference": reference, "verdict": verdict.reason, "seconds": seconds})
    return rows


# The page


def table(record: Mapping[str, Any]) -> str:
    """Accepted answers of each kind, verdicts per second, and the hostile expressions by verdict."""
    lines = ["| answers | accepted | verdicts per second |", "|---|---|---|"]
    for row in record["references"]:
        refused = f", {row['refused']:,} refused" if row.get("refused") else ""
        lines.append(f"| {row['answers']}{refused} | {_share(row)} | {_rounded(row['count'] / row['seconds'])} |")
    lines += [f"| {row['answers']} | {_share(row)} | |" for row in record["corrupted"]]
    for verdict in dict.fromkeys(row["verdict"] for row in record["hostile"]):
        slowest: dict[str, float] = {}
        for row in record["hostile"]:
            if row["verdict"] == verdict:
                slowest[row["expression"]] = max(row["seconds"], slowest.get(row["expression"], 0.0))
        names = ", ".join(f"`{name}` {seconds:.2f} s" for name, seconds in slowest.items())
        accepted = len(slowest) if verdict == "right" else 0
        lines.append(f"| `math`, {verdict}: {names} | {accepted} of {len(slowest)} | |")
    return "\n".join(lines)


def _share(row: Mapping[str, Any]) -> str:
    return f"{row['accepted']:,} of {row['count']:,}"


def _rounded(rate: float) -> str:
    """Two significant digits: `12,000`."""
    return f"{float(f'{rate:.2g}'):,.0f}"


if __name__ == "__main__":
    sys.exit(main())
