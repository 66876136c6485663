"""The benchmark: kedge against TRL's PPO on the same models, prompts and lengths, and how kedge's cost scales.

    recipe ─▶ workload ─▶ cases ─▶ systems, one child process at a time ─▶ figures ─▶ tables ─▶ docs/benchmarks.md

The measuring process imports only the standard library: a child's peak memory counts from its fork, so it would include
that of a parent with torch loaded.
"""
