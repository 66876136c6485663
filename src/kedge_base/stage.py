"""The description of a stage: a command that trains, samples or evaluates.

The command line, the Python API, resuming, the report, the doctor and the plan read descriptions instead of comparing
names, so that a stage is described in one place. This module and the descriptions do not import torch, and this module
only imports kedge's errors, so that all packages can import it.

Another package registers a stage through an entry point of its distribution:

    [project.entry-points."kedge.stages"]
    walk = "kedge_walk.description:WALK"

where `kedge_walk/description.py` holds only

    from kedge_base.stage import Flag, Stage

    WALK = Stage(
        "walk",
        help="Teach a robot to walk.",
        run="kedge_walk.training:run_walk",               # (config, *, resume=, callback=) -> result
        sections=(("walk",), ("runtime", "checkpoint")),
        adds_sections={"walk": "kedge_walk.settings:WalkConfig"},     # a `kedge.config.schema.section.Section`
        needs={"walk.robot": "--robot"},
        flags=(Flag(("--robot",), "walk.robot", "NAME", "The robot."),),
        ...
    )

It is then the command `kedge walk`, its settings are `walk.*` (in the code `config.walk`), and the names in `python`
are attributes of `kedge`. Text of the form `module:name` is imported when needed: the function `run` when the stage
starts; settings and presets together with `kedge.config`. The module with settings therefore only imports from
`kedge.config.schema`, and the module with presets only from `kedge.config.presets.recipe`, and the package's
`__init__.py` has `import kedge.config`, so that its modules can be imported in any order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

from kedge_base.errors import ConfigError
from kedge_base.registry import loaded, registered

OWN = "kedge.stages.descriptions:OWN"
"""The stages of the training package, if installed: a checkout needs no entry points for them."""

Config = Any
"""A `kedge.config.Config`, which this package cannot import."""


@dataclass(frozen=True)
class Flag:
    """An option of a stage's command that sets a field.

    Attributes:
        names: `--model`, and other names of the same option.
        field: The dotted name of the field.
        metavar: Placeholder of the value in the help.
        help: One line.
        repeats: The option may be given several times; the field is a list.
        takes_text: Its values may also be texts themselves, such as prompts.
        only_with: The field that must also be set.
        otherwise: End of the error if that field is not set: the alternative.
    """

    names: tuple[str, ...]
    field: str
    metavar: str
    help: str
    repeats: bool = False
    takes_text: bool = False
    only_with: str = ""
    otherwise: str = ""

    @property
    def parameter(self) -> str:
        """The name of the parameter of the command's function."""
        return self.names[0].removeprefix("--").replace("-", "_")


@dataclass(frozen=True)
class Stage:
    """A stage. Only the name is positional.

    Attributes:
        name: As on the command line and in a run's `config.yaml`.
        help: The summary of its command, one or two lines.
        run: Its function: `(config, *, resume=, callback=) -> result` if it resumes, else `(config) -> result`; and its
            `arguments`.
        sections: Sections with fields that have bare names; a name is looked up in each tuple in turn.
        dotted: Further sections that it reads, whose fields only have dotted names.
        unread: Fields of these sections that have no effect on it, and therefore no bare names.
        needs: Required fields, each with its flag.
        needs_with: Fields that, if set, change the stage's task, each with the remaining required fields.
        flags: Its own options, in the order of the help. All stages have --config, --preset, --out and --seed.
        title: Its name in sentences of a report; kedge's own stages have it in `kedge_inspect.page.looks`.
        arguments: Parameters of its function that may be Python objects, and the fields that they replace.
        starts_from: The fields that name the model to start from, the first that is set; empty without such a model.
        inputs: Further fields that name a file, model or function that it reads. Of those in `adds_sections`, a resumed
            run checks that it is unchanged.
        makes_model: Its result is a model, in `model/`.
        resumes: It has checkpoints and `--resume`.
        is_ranked: Several processes can run it together.
        is_swept: `kedge sweep` runs it.
        adapts: It can train an adapter.
        samples: It samples with the settings of `rollout`.
        trains: The sections with the optimizers of the trained models.
        unit: Unit of a row of `metrics.jsonl`: an `update` or a `step`.
        length: The field that a longer run raises.
        bounds: Fields that end a run early; null for never. They may also be raised.
        stretched: The schedules that a longer run stretches, in words; None for those of `trains`.
        best_metrics: Metrics of `checkpoint.keep_best`, each with whether higher is better; a name that ends with a
            slash stands for all that start with it.
        evaluations: The field without which metrics named `eval/…` are not measured.
        best_by_default: The metric of `checkpoint.keep_best=auto` in a run with evaluations; None for none.
        check: Raises `ConfigError` for a configuration that the stage cannot run.
        remedies: Settings that need less memory, with their values, by the phase in which it ran out; None for those
            that follow from the other attributes.
        next_calls: The calls that usually follow: `(config, model, start, judge) -> list[Call]`.
        plan: Prints the memory of a run before it starts, and refuses one that cannot fit: `(config, name, *, anyway)`,
            and its result is `planned=` of `run`. Empty for a stage whose plan is registered in `kedge.plans`, or that
            has none.
        looks: Its view in reports and in the doctor: a `kedge_inspect.look:Look`.
        adds_sections: Sections of the configuration that come with it: the name and its class.
        presets: A tuple of presets for this stage only; it takes no others.
        python: Names that `kedge` has because of it.
    """

    name: str
    _: KW_ONLY
    help: str
    run: str
    sections: tuple[tuple[str, ...], ...]
    needs: Mapping[str, str]
    dotted: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    needs_with: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    flags: tuple[Flag, ...] = ()
    title: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    starts_from: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    makes_model: bool = True
    resumes: bool = True
    is_ranked: bool = False
    is_swept: bool = False
    adapts: bool = False
    samples: bool = False
    trains: tuple[str, ...] = ()
    unit: str = "step"
    length: str = ""
    bounds: tuple[str, ...] = ()
    stretched: Callable[[Config], list[str]] | None = None
    best_metrics: Mapping[str, bool] = field(default_factory=dict)
    evaluations: str = ""
    best_by_default: Callable[[Config], str] | None = None
    check: Callable[[Config], None] | None = None
    remedies: Callable[[Config, str], list[tuple[str, Any]]] | None = None
    next_calls: str = ""
    plan: str = ""
    looks: str = ""
    adds_sections: Mapping[str, str] = field(default_factory=dict)
    presets: str = ""
    python: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_plan(self) -> bool:
        """True if its memory can be planned before it starts."""
        return bool(self.plan) or self.name in registered("kedge.plans")

    def find_plan(self) -> Callable[..., Any]:
        """Import the plan of a stage that has one."""
        return imported(self.plan) if self.plan else loaded("kedge.plans", self.name)

    def needed(self, config: Config) -> dict[str, str]:
        """Return the fields that this configuration requires, with their flags, without checking that they are set."""
        for changing, names in self.needs_with.items():
            if value_of(config, changing) is not None:
                return {name: flag for name, flag in self.needs.items() if name in names}
        return dict(self.needs)

    def is_best_metric(self, name: str) -> bool:
        """True for a metric by which the best checkpoint can be chosen."""
        return name in self.best_metrics or name.startswith(
            tuple(each for each in self.best_metrics if each[-1] == "/")
        )

    def starting_model(self, config: Config) -> str | None:
        """The name of the model that the stage starts from; None if the configuration names no model."""
        names = (value_of(config, name) for name in self.starts_from)
        return next((str(name) for name in names if name), None)


imported = resolve_name
"""Import the object that a text of the form `module:name` refers to."""


def value_of(config: Config, dotted: str) -> Any:
    """Return the value of a field by its dotted name."""
    section, _, name = dotted.partition(".")
    value = getattr(config, section)
    return value.model_dump()[name] if name else value


@cache
def registered_stages() -> tuple[Stage, ...]:
    """Load the stages that packages have registered; one that fails to load is left out, with a line on stderr."""
    return tuple(_loaded())


def _loaded() -> Iterator[Stage]:
    for entry in registered("kedge.stages").values():
        try:
            found = entry.load()
            for stage in found if isinstance(found, tuple) else [found]:
                if not isinstance(stage, Stage):
                    raise TypeError(f"it is of type {type(stage).__name__}, not a Stage")
                yield stage
        except Exception as error:  # another package's code must not break kedge's own commands
            print(f"kedge: the stage {entry.name} of {entry.value} cannot be loaded: {error}", file=sys.stderr)


@cache
def stages() -> Mapping[str, Stage]:
    """All stages by name: the ones that make a model, then the others; kedge's own come before registered ones."""
    own = imported(OWN) if find_spec("kedge") else ()
    found = (*own, *registered_stages())
    return {each.name: each for each in sorted(found, key=lambda stage: not stage.makes_model)}


def find_stage(name: str) -> Stage:
    """The stage with this name.

    Raises:
        ConfigError: It does not exist.
    """
    if name not in list(stages()):
        raise ConfigError(f"stage {name!r} does not exist; choose one of {', '.join(stages())}")
    return stages()[name]
