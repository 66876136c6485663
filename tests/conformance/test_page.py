"""The page of results."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path

from ppo_conformance.__main__ import main
from ppo_conformance.page import page

ROOT = Path(__file__).resolve().parents[2]


def result(check, case, status, message=""):
    return {"check": check, "case": case, "status": status, "message": message, "reproduce": f"run {check}:{case}"}


def report(name, *results):
    profile = {"kl": "k1 k3"}
    return {"adapter": name, "version": "1.2", "profile": profile, "seconds": 3.4, "results": [*results]}


def written(tmp_path, *reports):
    paths = [tmp_path / f"{place}.json" for place, _ in enumerate(reports)]
    for path, each in zip(paths, reports, strict=True):
        path.write_text(json.dumps(each))
    return [*map(str, paths)]


def test_the_table_counts_what_is_offered(tmp_path, capsys):
    one = report("one", result("vector/kl", "a", "passed"), result("vector/kl", "b", "passed"))
    two = report("two", result("vector/kl", "a", "passed"), result("vector/kl", "b", "deviates", "at loss: 1, got 2"),
                 result("vector/kl", "c", "not offered"), result("vector/gae", "a", "not offered"))  # fmt: skip
    assert main(["page", *written(tmp_path, one, two)]) == 0
    out = capsys.readouterr().out
    assert "| | one 1.2 | two 1.2 |" in out
    assert "| vector/kl | 2 | **1 of 2** |" in out
    assert "| vector/gae | – | – |" in out
    assert "**one 1.2**, 3 s: kl: k1 k3" in out
    assert "- **two**: at loss: 1, got 2\n  `run vector/kl:b`" in out


def test_a_note_replaces_the_messages_of_its_checks(tmp_path, capsys):
    both = [result("vector/kl", case, "deviates", "at loss") for case in "ab"]
    other = result("vector/gae", "a", "error", "ValueError: no")
    notes = tmp_path / "notes.json"
    notes.write_text(json.dumps({"one": [{"checks": ["vector/kl:*"], "text": "k3 is bounded"}]}))
    assert main(["page", *written(tmp_path, report("one", *both, other)), "--notes", str(notes)]) == 0
    out = capsys.readouterr().out
    assert "- **one**: k3 is bounded (`vector/kl:a, vector/kl:b`)\n  `run vector/kl:a`" in out
    assert "at loss" not in out
    assert "- **one**: ValueError: no" in out


def test_a_report_that_cannot_be_read_is_named(tmp_path, capsys):
    assert main(["page", str(tmp_path / "none.json")]) == 2
    assert "none.json cannot be read" in capsys.readouterr().err


def test_the_documentation_has_the_committed_results():
    reports = [
        json.loads(path.read_text("utf-8")) for path in sorted((ROOT / "conformance" / "results").glob("*.json"))
    ]
    notes = json.loads((ROOT / "conformance" / "notes.json").read_text("utf-8"))
    written = (ROOT / "docs" / "conformance.md").read_text("utf-8").partition("<!-- results -->")[2]
    assert written.partition("<!-- end of results -->")[0].strip() == page(reports, notes)
    for report in reports:
        patterns = [pattern for note in notes.get(report["adapter"], []) for pattern in note["checks"]]
        different = [each for each in report["results"] if each["status"] in ("deviates", "error")]
        names = [f"{each['check']}:{each['case']}" for each in different]
        assert all(any(fnmatchcase(name, pattern) for pattern in patterns) for name in names), report["adapter"]
