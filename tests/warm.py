"""The process from which trials and runs to be killed are forked: it has imported all that they need.

Importing torch, transformers and kedge takes ten times as long as most of the tests that follow. It imports the tests'
configuration first, so that kedge is imported as in every test: with its shapes checked.
"""

from __future__ import annotations

import gc
import importlib
import pkgutil
import tempfile
from pathlib import Path

import tests.conftest  # noqa: F401  before kedge

import kedge  # isort: skip
from kedge.models.sources.quiet import quiet_transformers
from tests.code_swap import live_functions
from tests.tiny import tiny_causal_lm

PACKAGES = Path(kedge.__file__).resolve().parents[1]

SLOW = [
    "pytest",
    "pdb",
    "xml.etree.ElementTree",
    "hypothesis",
    "rich.console",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.gpt_neox.modeling_gpt_neox",
]
# A logger or an adapter needs its library, which may not be installed; and adapters put stand-ins in place of modules.
LEFT_OUT = ("kedge.__main__", "kedge.logs.loggers.", "ppo_conformance.adapters.")

MODULES = [module.name for module in pkgutil.walk_packages([str(PACKAGES)])]
for name in [*SLOW, *(name for name in MODULES if not name.startswith(LEFT_OUT))]:
    importlib.import_module(name)

LIVE = live_functions(PACKAGES)

# With the first model that is saved, transformers compiles its tables of weights' names. kedge saves and trains nothing
# here: what it caches would hide a mutation.
with tempfile.TemporaryDirectory() as folder, quiet_transformers():
    tiny_causal_lm().save_pretrained(folder)
gc.freeze()  # pytest collects garbage several times, and what is imported before a fork is none
