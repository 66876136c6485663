"""Names of fields as users write them: dotted, or bare where only one section has the field."""

from collections.abc import Sequence
from typing import get_args

from kedge.config.explain.describe import all_fields, find_field, section_type, unknown
from kedge.config.schema.root import Config
from kedge.config.stages import find_stage
from kedge.errors import ConfigError

__all__ = ["full_name", "initial_critic"]


CRITICS = find_field("ppo.critic")
"""The field with the kinds of critics."""


def initial_critic(critic: str | None) -> dict[str, str | None]:
    """The field that `--critic` and `kedge.ppo(critic=…)` set: the kind of critic, or else a trained one's name."""
    kinds = () if CRITICS is None else get_args(CRITICS.annotation)
    return {"ppo.critic" if critic in kinds else "ppo.critic_init": critic}


def full_name(name: str, stage: str | None = None) -> str:
    """The dotted name of a field; dotted names and names at the top level are returned unchanged.

    Args:
        name: As the user wrote it.
        stage: Looks the bare name up in the sections that this stage reads, one group after the other; None looks it up
            in all sections.

    Raises:
        ConfigError: The bare name is unknown or ambiguous, or the stage does not exist.
    """
    if "." in name or find_field(name) is not None or section_type(name) is not None:
        return name
    groups = _ALL_SECTIONS if stage is None else find_stage(stage).sections
    for group in groups:
        owners = [f"{section}.{name}" for section in group if find_field(f"{section}.{name}")]
        if len(owners) > 1:
            raise ConfigError(f"{name} is a field of several sections; write {' or '.join(owners)}")
        if owners:
            return owners[0]
    elsewhere = [dotted for dotted, _ in all_fields() if dotted.partition(".")[2] == name]
    if elsewhere:
        raise ConfigError(f"{name} is not a setting of {stage}; the field is {' or '.join(elsewhere)}")
    raise ConfigError(unknown(name, _known(groups), kind=f"a setting of {stage}" if stage else "a field"))


_ALL_SECTIONS = (tuple(name for name in Config.model_fields if section_type(name)),)


def _known(groups: Sequence[Sequence[str]]) -> list[str]:
    sections = {section for group in groups for section in group}
    fields = [dotted for dotted, _ in all_fields() if dotted.partition(".")[0] in sections or "." not in dotted]
    return [*fields, *sections]
