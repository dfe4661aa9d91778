"""The Python interface: ``windtunnel.load("outputs/latest")`` returns a trained run as an object."""

from harness.trained import Model, load

__all__ = ["Model", "load"]
