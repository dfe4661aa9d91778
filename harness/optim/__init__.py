"""Optimizers, parameter groups, learning-rate schedule and training budget."""

from harness.optim.adagrad import ClippedAdagrad
from harness.optim.muon import Muon

__all__ = ["ClippedAdagrad", "Muon"]
