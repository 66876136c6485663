"""Fills in what the cases of `vectors/` expect, or checks it."""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import sys
from typing import Any

from ppo_conformance import vectors
from ppo_conformance.oracle.expect import expect
from ppo_conformance.protocol import CHOICES


def fill(topic: str) -> str:
    """Return the text of a topic's file with new expectations."""
    found = copy.deepcopy(vectors.read(topic))
    for case in found["cases"]:
        names = list(case.get("vary", {}))
        case["expected"] = []
        for values in itertools.product(*case.get("vary", {}).values()):
            choices = dict(zip(names, values, strict=True))
            assert all(value in CHOICES[name].values for name, value in choices.items()), choices
            expected = expect(found["method"], case, {**case["settings"], **choices})
            case["expected"].append({"choices": choices, **expected})
    return text_of(found) + "\n"


def text_of(value: Any, indent: str = "") -> str:
    """JSON with one line per row of a table."""
    inner = indent + "  "
    if isinstance(value, dict) and value:
        lines = [f"{inner}{json.dumps(name)}: {text_of(entry, inner)}" for name, entry in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(entry, (list, dict)) for entry in value):
        return "[\n" + ",\n".join(inner + text_of(entry, inner) for entry in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False)


def main() -> int:
    """Write the vectors, or with `--check` return 1 and name the files that differ."""
    parser = argparse.ArgumentParser(prog="python -m ppo_conformance.oracle", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file differs")
    check, behind = parser.parse_args().check, []
    for topic in vectors.topics():
        path, text = vectors.FOLDER / f"{topic}.json", fill(topic)
        if path.read_text("utf-8") != text:
            behind.append(path.name)
            if not check:
                path.write_text(text, "utf-8")
    print(f"{'differ' if check else 'written'}: {', '.join(behind) or 'none'}")
    return int(check and bool(behind))


if __name__ == "__main__":
    sys.exit(main())
