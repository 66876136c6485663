"""Sharded models that the first rank loads for all equal whole ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.loading import save_models
from tests.ranks.processes import torchrun


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_parts_from_the_first_rank_are_those_of_whole_models(count: int, tmp_path: Path) -> None:
    save_models(tmp_path)
    code, output = torchrun(count, "tests.ranks.loading", str(tmp_path))
    assert code == 0, output
    assert output.count("compared all models") == count, output
