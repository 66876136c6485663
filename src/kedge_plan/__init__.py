"""`kedge plan` for one machine: a stage's memory and time."""
