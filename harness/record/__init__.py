"""Files and output of a run: its folder, record and checkpoints, tables for the terminal and
CSV, and W&B."""
