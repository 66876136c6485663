"""Evaluates `kedge doctor` on small versions of the demo, each with one injected fault, and on healthy ones.

base        the models that every run starts from, trained once per seed
rewards     faulty reward functions
judge       the gold judge as a reward function
bugs        bugs patched into the code for the duration of a run
changes     faulty data and models
case        one run: its settings, data and bug, and the rule that should find it
faulty      the faulty cases
healthy     the healthy cases
demo        the demo itself
running     runs each case in its own process and diagnoses it
matrix      the table in RESULTS.md
"""
