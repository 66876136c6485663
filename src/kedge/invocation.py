"""Whether the `kedge` command runs in this process: advice is then a command, otherwise a line of Python."""

__all__ = ["is_command_line", "mark_command_line"]

_running = False


def mark_command_line() -> None:
    """Record that the `kedge` command runs."""
    global _running
    _running = True


def is_command_line() -> bool:
    """Whether `mark_command_line` was called."""
    return _running
