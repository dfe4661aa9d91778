"""Words typed, composed by Hydra: one job, or the jobs of a sweep; mistakes are one message and exit code 2."""
