"""The benchmark on environments: kedge, Stable-Baselines3 and CleanRL with the same settings.

    recipes ─▶ jobs, one child process at a time ─▶ results/control.jsonl ─▶ tables

Each system runs in a separate process with one thread, and reports environment steps, CPU seconds and returns after
each of its updates. A peer's code is never part of this repository: Stable-Baselines3 is installed into a separate
environment, and CleanRL's scripts are run from a folder that is named on the command line.
"""
