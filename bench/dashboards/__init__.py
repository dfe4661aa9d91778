"""The panels of the W&B dashboard."""
