"""The documentation site: every page is in the navigation, and the generated pages are up to date."""

import math
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from handbook.__main__ import SCALING, WITH_RESULTS
from handbook.demo import DemoRecord, draw_demo, duration, read_demo, results_block, with_results
from handbook.pages import generated_pages
from handbook.scaling import SCALING_PICTURES, TABLES, draw_scaling, with_scaling
from handbook.token import TokenUpdate, compute_update, read_record
from handbook.token_pictures import PICTURES, draw_pictures
from kedge.cli import app
from kedge.config.explain.describe import all_fields
from kedge_lab.demo.recipe import DURATION

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def pages_of(navigation: Any) -> list[str]:
    """The files of mkdocs' nested lists and mappings."""
    if isinstance(navigation, str):
        return [navigation]
    parts = navigation.values() if isinstance(navigation, dict) else navigation
    return [page for part in parts for page in pages_of(part)]


def test_the_navigation_lists_every_page_once() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = pages_of(site["nav"])
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md")), "add new pages to nav in mkdocs.yml"
    assert site["strict"] is True


@pytest.mark.parametrize("name", generated_pages())
def test_generated_pages_are_up_to_date(name: str) -> None:
    fresh = (DOCS / name).read_text(encoding="utf-8") == generated_pages()[name]
    assert fresh, f"docs/{name} is out of date: run `make docs-pages`"


def test_every_field_has_an_entry_with_its_documentation() -> None:
    page = (DOCS / "fields.md").read_text(encoding="utf-8")
    entries = dict(re.findall(r"^### `([\w.]+)`\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL))
    assert list(entries) == [*(name for name, _ in all_fields() if "." not in name),
                             *(name for name, _ in all_fields() if "." in name)]  # fmt: skip
    assert "Default: `0.2`." in entries["ppo.clip_range"]
    assert "; accepts never, keep_start, or keep_end." in entries["data.truncate"]
    # Rows are packed: docs/other-libraries.md.
    assert [name for name, entry in entries.items() if "Default: " not in entry or "padded to" in entry] == []


def svg_texts(path: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def update() -> TokenUpdate:
    return compute_update(read_record())


def advantages_by_loop(row: dict[str, Any], beta: float, decay: float) -> list[float]:
    """The definition: the sum of all later TD residuals, discounted by λ per step (γ = 1)."""
    pairs = list(zip(row["logprobs"], row["ref_logprobs"], strict=True))
    rewards = [-beta * (own - reference) for own, reference in pairs]
    rewards[-1] += row["score"]
    next_values = [*row["values"][1:], 0.0]
    residuals = [rewards[t] + next_values[t] - row["values"][t] for t in range(len(rewards))]
    return [sum(decay ** (k - t) * residuals[k] for k in range(t, len(residuals))) for t in range(len(residuals))]


def test_the_tokens_values_follow_from_the_definitions(update: TokenUpdate) -> None:
    record = read_record()
    rows, settings, t = record["responses"], record["settings"], record["token"]
    assert (settings["gamma"], settings["kl_coef"]) == (1.0, 0.1)
    raw = [advantages_by_loop(row, 0.1, settings["gae_lambda"]) for row in rows]
    flat = [advantage for row in raw for advantage in row]
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((advantage - mean) ** 2 for advantage in flat) / len(flat))
    row, raw_advantages = rows[record["row"]], raw[record["row"]]
    advantage = (raw_advantages[t] - mean) / std
    assert update.of(update.raw_advantages) == pytest.approx(raw_advantages, abs=1e-5)
    assert update.at(update.advantages) == pytest.approx(advantage, abs=1e-4)
    assert update.at(update.returns) == pytest.approx(raw_advantages[t] + row["values"][t], abs=1e-5)
    assert update.sequence_kl == pytest.approx(sum(row["logprobs"]) - sum(row["ref_logprobs"]), abs=1e-4)
    ratios = [1.0, *(math.exp(epoch[t] - row["logprobs"][t]) for epoch in row["epochs"])]
    losses = [-min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage) for ratio in ratios[:-1]]
    assert update.losses == pytest.approx(losses, abs=1e-4)
    assert update.clipped == [ratio > 1.2 for ratio in ratios[:-1]]
    returns = [a + v for row, advantages in zip(rows, raw, strict=True)
               for a, v in zip(advantages, row["values"], strict=True)]  # fmt: skip
    middle = sum(returns) / len(returns)
    spread = math.sqrt(sum((value - middle) ** 2 for value in returns) / len(returns))
    assert update.value_loss == pytest.approx(0.5 * (raw_advantages[t] / spread) ** 2, abs=1e-3)


def test_the_figures_show_the_records_values(update: TokenUpdate, tmp_path: Path) -> None:
    draw_pictures(update, tmp_path)
    for name in PICTURES:
        drawn, kept = (svg_texts(folder / f"{name}.svg") for folder in (tmp_path, DOCS / "pictures"))
        assert drawn == kept, f"docs/pictures/{name}.svg is out of date: run `make docs-pages`"
    clip = (DOCS / "pictures" / "clip.svg").read_text(encoding="utf-8")
    assert all(f"ρ = {float(epoch[update.row, update.token]):.2f}" in clip for epoch in update.ratios)


@pytest.fixture(scope="module")
def demo() -> DemoRecord:
    return read_demo()


def test_the_demos_table_and_figure_show_its_record(demo: DemoRecord, tmp_path: Path) -> None:
    for page in WITH_RESULTS:
        text = page.read_text(encoding="utf-8")
        assert with_results(text, demo) == text, f"{page.name} is out of date: run `make docs-pages`"
    assert f"on two cores: {demo.seconds:.0f} s" in results_block(demo)
    draw_demo(demo, tmp_path)
    drawn, kept = (svg_texts(folder / "demo.svg") for folder in (tmp_path, DOCS / "pictures"))
    assert drawn == kept, "docs/pictures/demo.svg is out of date: run `make docs-pages`"
    assert f"PPO policy {demo.gold_quality['ppo']:.3g}" in kept


def test_the_tables_and_figures_of_scaling_show_the_cost_model(tmp_path: Path) -> None:
    pages = {page: page.read_text(encoding="utf-8") for page in SCALING}
    assert all(any(f"<!-- {name}:begin -->" in text for text in pages.values()) for name in TABLES)
    for page, text in pages.items():
        assert with_scaling(text) == text, f"{page} is out of date: run `make docs-pages`"
    draw_scaling(tmp_path)
    for name in SCALING_PICTURES:
        drawn, kept = (svg_texts(folder / f"{name}.svg") for folder in (tmp_path, DOCS / "pictures"))
        assert drawn == kept, f"docs/pictures/{name}.svg is out of date: run `make docs-pages`"


def test_the_demos_critic_learns(demo: DemoRecord) -> None:
    assert demo.explained_variance >= 0.5


def test_the_demos_duration_is_the_same_everywhere(demo: DemoRecord) -> None:
    """Every sentence that names the demo and a number of minutes states the recorded duration."""
    pages = {page: page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *DOCS.glob("*.md"))}
    commands = {name: command.help or "" for name, command in get_command(app).commands.items()}  # pyright: ignore
    texts = [re.sub(r"\s+", " ", text) for text in (*pages.values(), *commands.values())]
    sentence = r"[^.|`]*\b(?:demo|summarizer)\b[^.|`]*\b\w+(?: to \w+)? minutes?[^.|`]*"
    stated = [found for text in texts for found in re.findall(sentence, text)]
    assert duration(demo) == DURATION
    assert len(stated) >= 3
    assert [found for found in stated if DURATION not in found] == []


def test_the_site_is_built_and_read_offline() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "font: false" in text
    assert "://" not in "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs the extra `docs`")
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    site = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    run = subprocess.run(site, cwd=ROOT, capture_output=True, text=True, env={"NO_MKDOCS_2_WARNING": "true"})
    assert (run.returncode, run.stderr) == (0, "")
    pages = [page.read_text(encoding="utf-8") for page in (tmp_path / "site").glob("*.html")]
    assert len(pages) > 15
    assert [found for page in pages for found in re.findall(r"<(?:script|link|img)[^>]*?https?://[^>]*", page)] == []
