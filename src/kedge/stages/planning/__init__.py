"""`kedge plan` for one machine: what a stage will hold and how long it will take."""
