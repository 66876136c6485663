"""Folders of runs, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG = """# stage: ppo
# device: cpu

ppo:
  num_updates: 40
reward:
- {source: 'gold', weight: 1.0}
"""


def begin(folder: Path, config: str = CONFIG) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    return folder


def add(folder: Path, name: str, *rows: dict[str, Any]) -> None:
    with (folder / name).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def metrics(update: int, **more: Any) -> dict[str, Any]:
    figures = {"reward/score_mean": update / 4, "objective/kl": update / 10, "time/update": 2.0}
    return {"update": update, **figures, **more}


def sample(update: int, response: str, **more: Any) -> dict[str, Any]:
    return {"update": update, "prompt": "The boat", "response": response, "score": 1.25, "stopped": True, **more}
