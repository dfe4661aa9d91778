"""Counters of what a model costs: floating-point operations and memory."""
