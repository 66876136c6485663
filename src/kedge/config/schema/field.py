"""Fields of the configuration: type, default and bounds, and the documentation that `kedge config explain` prints."""

from dataclasses import dataclass
from typing import Any, cast

from pydantic import Field
from pydantic.fields import FieldInfo


@dataclass(frozen=True)
class FieldDoc:
    """A field's documentation; see `field` for the parts."""

    meaning: str
    source: str = ""
    too_high: str | None = None
    too_low: str | None = None
    text: str = "text"


def field(
    default: Any,
    *,
    meaning: str,
    source: str,
    too_high: str | None = None,
    too_low: str | None = None,
    text: str = "text",
    **bounds: Any,
) -> Any:
    """A pydantic field with its documentation.

    Args:
        default: The default value; `...` for none.
        meaning: One line, with the unit.
        source: The paper or project that the default comes from, or the reason for it.
        too_high: The effect of a value that is too high.
        too_low: The effect of a value that is too low.
        text: The meaning of a text, such as `a folder`.
        bounds: pydantic's `gt`, `ge`, `lt`, `le`.
    """
    extra = {"source": source, "too_high": too_high, "too_low": too_low, "text": text}
    return Field(default, description=meaning, json_schema_extra=cast(Any, extra), **bounds)


def field_doc(info: FieldInfo) -> FieldDoc:
    """The documentation of a field made by `field`; mostly empty for a plain pydantic field of another package."""
    return FieldDoc(info.description or "", **cast("dict[str, Any]", info.json_schema_extra or {}))
