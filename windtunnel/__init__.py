"""The Python interface: ``windtunnel.load("outputs/latest")`` returns a trained run as an object,
and ``windtunnel.train("variant=mhsa")`` trains one."""

import importlib

__all__ = ["Model", "load", "train"]
_MODULES = {"Model": "harness.trained", "load": "harness.trained", "train": "windtunnel.training"}


def __getattr__(name: str) -> object:
    """Import a name when it is used, because importing torch takes a second."""
    if name not in _MODULES:
        raise AttributeError(
            f"module windtunnel has no attribute {name}; allowed are {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(_MODULES[name]), name)
