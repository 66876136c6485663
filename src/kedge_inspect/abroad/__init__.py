"""Runs of other libraries: their logs become a `RunRecord`, which reports and the doctor read like one of kedge's.

`runs.read_any_run` reads a run of any library.
"""
