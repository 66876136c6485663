"""`push`: where the finished model goes on the hub."""

from kedge.config.schema.field import field
from kedge.config.schema.section import Section

__all__ = ["PushConfig"]


class PushConfig(Section):
    """Pushing the finished model to the Hugging Face hub."""

    repo: str | None = field(
        None,
        meaning="Repository on the hub, org/name, that the finished model is pushed to; null pushes nothing. Token, "
        "name and rights are checked before the training.",
        source="kedge: nothing leaves the machine unasked",
        text="org/name",
    )
    private: bool = field(
        False,
        meaning="Whether a new repository is private; one that exists stays as it is.",
        source="Hugging Face hub",
    )
    existing: bool = field(
        False,
        meaning="Whether a repository may get a commit although its content was not pushed by kedge.",
        source="kedge: somebody's files are not overwritten unasked",
    )
