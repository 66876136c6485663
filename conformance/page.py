"""Keeps of the results what is offered, and writes the page of them: `python conformance/page.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

reports = sorted((HERE / "results").glob("*.json"))
for path in reports:
    report = json.loads(path.read_text("utf-8"))
    results = [
        json.dumps(each, ensure_ascii=False) for each in report.pop("results") if each["status"] != "not offered"
    ]
    head = json.dumps(report, ensure_ascii=False)[:-1]
    path.write_text(f'{head}, "results": [\n' + ",\n".join(results) + "\n]}\n", "utf-8")
command = [sys.executable, "-m", "ppo_conformance", "page", *map(str, reports), "--notes", str(HERE / "notes.json")]
text = subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8").stdout
target, begin, end = HERE.parent / "docs" / "conformance.md", "<!-- results -->", "<!-- end of results -->"
before, _, rest = target.read_text("utf-8").partition(begin)
target.write_text(f"{before}{begin}\n\n{text}\n{end}{rest.partition(end)[2]}", "utf-8")
