"""Optimizers: which moves which parameter, at which rate, until when; and Muon and Adagrad with a clip."""

from harness.optim.adagrad import ClippedAdagrad
from harness.optim.muon import Muon

__all__ = ["ClippedAdagrad", "Muon"]
