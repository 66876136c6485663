"""The table and the picture of bench/plan/RESULTS.md, from results."""

from __future__ import annotations

from bench.plan.cases import CASES
from bench.plan.page import with_table
from bench.plan.pictures import draw_measured

PPO, CRITIC = CASES[0], next(case for case in CASES if case.stage == "critic")
RESULTS = {
    PPO.name: {
        "live": {"planned": 110.0, "live": 100.0},
        "process": {"planned seconds": 1.0, "seconds": 2.0, "heap": 120.0, "process": 200.0},
    },
    CRITIC.name: {"live": {"planned": 59.0, "live": 50.0}},
}


def test_the_table_has_a_row_per_measured_run_and_its_errors() -> None:
    begin, end = "<!-- plan:begin -->", "<!-- plan:end -->"
    lines = with_table(f"before\n{begin}\nold\n{end}\nafter", RESULTS).splitlines()
    assert (lines[0], lines[1], lines[-2], lines[-1]) == ("before", begin, end, "after")
    rows = [line for line in lines if line.startswith("| llama")]
    assert rows[0].endswith("| 110.0 | 100.0 | +10.0 % | 120 | 200 | 1.0 s | 2.0 s |")
    assert ": kedge critic |" in rows[1]
    assert "- planned against live bytes: median 14.0 %, worst +18.0 %, of 2 runs" in lines
    assert "- time of an update: median 50.0 %, worst -50.0 %, of 1 runs" in lines
    assert any("1.20 to 1.20 times the live bytes" in line and "80 to 80 MiB" in line for line in lines)


def test_the_picture_has_a_point_per_run() -> None:
    [axes] = draw_measured(RESULTS).axes
    points = {str(line.get_label()): line.get_xydata().tolist() for line in axes.get_lines()}  # type: ignore[union-attr]
    assert points["PPO, all weights: tensors"] == [[100.0, 110.0]]
    assert points["critic: tensors"] == [[50.0, 59.0]]
    assert points["the heap that holds them"] == [[120.0, 110.0]]
