"""The Python door: ``windtunnel.load("outputs/latest")`` is a trained run as an object."""

from windtunnel.model import Model, load

__all__ = ["Model", "load"]
