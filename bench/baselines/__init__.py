"""Baselines that our variants are measured against, and how: the least transformer, packages from outside, the proof
that both must
pass, and the rounds in which all are timed in turn."""
