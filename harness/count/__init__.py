"""Counters of what a mechanism costs: floating-point operations, bytes moved, bytes in memory."""
