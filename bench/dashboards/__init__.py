"""The layout of the W&B dashboard, and the W&B objects that are made of it."""
