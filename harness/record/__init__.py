"""Record that a run leaves behind: its folder, the rows of its record, checkpoints, the closing table, figures, W&B."""
