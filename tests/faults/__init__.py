"""Faults: how a run dies, and that nothing is lost, wrong or run for a stranger when it does."""
