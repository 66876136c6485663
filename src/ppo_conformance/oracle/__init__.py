"""The formulas of the papers as slow loops in plain Python, and the vectors that they make.

`python -m ppo_conformance.oracle` writes `vectors/`; with `--check` it says whether the files are what it would write.
"""
