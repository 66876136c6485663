"""Name and version of the distribution, in a separate file so that the build can read them without importing torch."""

DISTRIBUTION = "kedge-rl"
"""The name for pip; `kedge` on PyPI is another project."""

__version__ = "0.1.0"
