"""The sources cannot run code from data: no pickle, no eval, no unsafe YAML, no model code by default."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import kedge
from kedge.config import Config
from kedge.config.loading.yaml_text import parse_value, to_yaml
from kedge_base.errors import ConfigError

PACKAGES = Path(kedge.__file__).parents[1]
SOURCES = sorted(path for name in ("kedge*", "ppo_conformance") for path in PACKAGES.glob(f"{name}/**/*.py"))
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "code"}
FORBIDDEN_CALLS = {
    *("eval", "exec", "compile", "__import__", "input"),
    *("torch.load", "torch.save", "torch.jit.load", "torch.hub.load", "np.load", "numpy.load", "pandas.read_pickle"),
    *("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "yaml.UnsafeLoader", "yaml.FullLoader"),
    *("yaml.Loader", "yaml.dump", "os.system", "os.popen", "os.execv", "subprocess.getoutput"),
}
# Files and modules are imported by name only for functions that a user names, the packages' own modules, stages of
# installed packages, and adapters. `generators` seeds NumPy and torch as soon as somebody imports them.
IMPORTING = {"importlib.import_module", "importlib.util", "spec.loader.exec_module", "runpy", "imp"}
IMPORTERS = {
    *("kedge/__init__.py", "kedge/rewards/__init__.py"),
    *(f"kedge_base/{name}.py" for name in ("generators", "importing", "packages", "stage")),
    *(f"ppo_conformance/{name}.py" for name in ("checks/tokens", "results")),
}
# A verifier runs programs that the policy wrote: in a sandbox, by the one module that runs there. The other
# compiles that module and writes its job; neither reads what comes back as anything but plain data.
IN_THE_SANDBOX = {
    "kedge_tasks/confined.py": {"compile", "eval", "exec"},
    "kedge_tasks/sandbox.py": {"compile", "marshal", "marshal.dumps"},
}
SAFELY = {"kedge/config/loading/yaml_text.py": {"yaml.dump"}}
"""With a dumper that writes no objects."""


def names_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name and dotted name in the code, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
            yield node.lineno, str(node.module)
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Load):
            yield node.lineno, ast.unparse(node)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGES).as_posix())
def test_no_source_can_run_data(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    name = path.relative_to(PACKAGES).as_posix()
    allowed = IN_THE_SANDBOX.get(name, set()) | SAFELY.get(name, set())
    for line, name in ((line, name) for line, name in names_in(tree) if name not in allowed):
        assert name.partition(".")[0] not in FORBIDDEN_MODULES, f"{path.name}:{line}"
        assert name not in FORBIDDEN_CALLS, f"{path.name}:{line}"
        assert path.relative_to(PACKAGES).as_posix() in IMPORTERS or name not in IMPORTING, f"{path.name}:{line}"
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword):
            trusted = node.arg == "trust_remote_code" and isinstance(node.value, ast.Constant) and node.value.value
            assert not trusted, f"{path.name}:{node.value.lineno}"
            assert node.arg != "shell", f"{path.name}:{node.value.lineno}"
            assert node.arg != "allow_pickle", f"{path.name}:{node.value.lineno}"


def test_the_check_finds_forbidden_names() -> None:
    code = "import torch\nfrom pickle import loads\nimport dill as d\ntorch.load(x)\neval(y)\n"
    found = {name for _, name in names_in(ast.parse(code))}
    assert {"pickle.loads", "pickle", "dill", "torch.load", "eval"} <= found


def test_remote_code_is_not_trusted_by_default() -> None:
    assert Config().runtime.trust_remote_code is False


def test_yaml_writes_no_objects() -> None:
    with pytest.raises(yaml.representer.RepresenterError):
        to_yaml({"out": Path("run")})


@pytest.mark.parametrize(
    "tag", ["python/object/apply:os.getcwd []", "python/name:os.system", "python/module:os", "python/tuple [a]"]
)
def test_yaml_makes_no_objects(tag: str) -> None:
    with pytest.raises(ConfigError, match="could not determine a constructor for the tag"):
        parse_value(f"!!{tag}", "x")
