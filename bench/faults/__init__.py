"""What `kedge doctor` is proven by: runs of the demo's world with one fault put in on purpose, and healthy ones.

base        the models that every run starts from, made once per seed
rewards     faulty reward functions
judge       the gold judge as a reward function
bugs        mistakes in the code, put in for the length of a run
changes     data and models as they should not be
case        a run: its settings, data and bug, and the rule that must find it
faulty      the faults
healthy     the healthy runs
demo        the demo itself
running     each in a process of its own, and what the doctor says of it
matrix      who was found by what, as a table in docs/doctor.md
"""
