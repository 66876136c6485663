"""The command `ppo-conformance`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ppo_conformance import bugs, page
from ppo_conformance.protocol import CHOICES, UserError
from ppo_conformance.results import adapter_names, as_table, load_adapter, run, select


def parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    whole = argparse.ArgumentParser(
        prog="ppo-conformance", description="Conformance suite for trainers of language models."
    )
    commands = whole.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text)

    running = command("run", "run the checks; exit code 1 if something deviates")
    running.add_argument("--adapter", required=True, help="a name, see `list`, or a Python file with a class Adapter")
    running.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help="such as vector/gae or '*:padded'"
    )
    running.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    command("list", "list adapters, choices of profiles, and checks")
    command("bugs", "re-made bugs of trainers, and the checks that find them")
    paging = command("page", "a table of libraries and checks, and what differs, from several reports")
    paging.add_argument("reports", nargs="+", type=Path, help="reports of `run --json`, one for each library")
    paging.add_argument("--notes", type=Path, help="JSON: what differs, by library and pattern of checks")
    return whole


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, 1 if something deviates, 2 for a mistake of the user."""
    options, rest = parser().parse_known_args(arguments)
    try:
        if rest:
            raise UserError(f"unknown arguments: {' '.join(rest)}")
        return {"run": running, "list": listing, "bugs": bugs.main, "page": page.main}[options.command](options)
    except UserError as mistake:
        print(f"ppo-conformance: {mistake}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has enough; Python would complain once more at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def running(options: argparse.Namespace) -> int:
    """Run the checks on an adapter and print the table."""
    checks = select(options.only)
    if options.json and not options.json.absolute().parent.is_dir():
        raise UserError(f"there is no folder {options.json.absolute().parent}")
    report = run(load_adapter(options.adapter), options.adapter, checks)
    if options.json:
        report.write(options.json)
    print(as_table(report))
    return int(not report.conforms)


def listing(_: argparse.Namespace) -> int:
    """Print adapters, choices and checks."""
    print("adapters:", *adapter_names())
    print("\nchoices of profiles (the first value is assumed):")
    for name, choice in CHOICES.items():
        print(f"  {name}: {' | '.join(choice.values)}\n      {choice.meaning}")
    print("\nchecks:")
    for check in select([]):
        print(f"  {check.name}: {check.purpose}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
