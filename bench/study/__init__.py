"""Does a critic pay? PPO with and without the value stack against critic-free algorithms, on three tasks."""
