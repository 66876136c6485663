"""The arguments of other PPO libraries, with their counterparts in kedge: one table per library."""
