"""The formulas of the papers as slow loops, and the vectors that they make; the reference trainer uses them too.

`python -m ppo_conformance.oracle` writes `vectors/`; with `--check` it says whether the files are what it would write.
"""
