"""The benchmark: kedge beside TRL's PPO on the same models, prompts and lengths, and how kedge's cost grows.

    recipe ─▶ workload ─▶ cases ─▶ systems, one child process at a time ─▶ figures ─▶ tables ─▶ docs/benchmarks.md

The process that measures imports the standard library alone. A child's peak memory counts from its fork, so a parent
that has loaded torch would be measured along with it.
"""
