"""`python -m kedge` runs the `kedge` command."""

from kedge.cli import main

main()
