"""In tests the algorithm's shapes and types are checked at every call; `unchecked` switches that off.

A user runs without those checks, so the tests of kedge's own messages must too; and they would slow a training down.
"""

import sys
from collections.abc import Iterator
from types import ModuleType

import jaxtyping
import pytest
from beartype import BeartypeConf, beartype
from hypothesis import settings

# An int is a float, as PEP 484 has it and every caller expects.
typechecker = ModuleType("kedge_typechecker")
typechecker.check = beartype(conf=BeartypeConf(is_pep484_tower=True))
sys.modules[typechecker.__name__] = typechecker
jaxtyping.install_import_hook("kedge.algorithm", "kedge_typechecker.check")

settings.register_profile("kedge", deadline=None, derandomize=True, max_examples=40, database=None)
settings.load_profile("kedge")


@pytest.fixture
def unchecked() -> Iterator[None]:
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
