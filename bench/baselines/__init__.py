"""Baselines that our variants are measured against, and how: the reference model, packages from outside, the proof that
both must pass, and the rounds in which all are timed in turn."""
