"""The Python interface: ``windtunnel.load("outputs/latest")`` returns a trained run as an object."""

from windtunnel.model import Model, load

__all__ = ["Model", "load"]
