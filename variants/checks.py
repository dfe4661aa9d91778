"""Checks of keywords: a ValueError names the key, what it was given and what is allowed."""

from collections.abc import Iterable


def check_numbers(least: int, *, null: str = "", **numbers: float | None) -> None:
    """Refuse numbers below ``least``; None passes.

    Args:
        null: how to say that null is allowed, too: ``null for ..``.
    """
    for name, number in numbers.items():
        if number is not None and number < least:
            raise ValueError(f"{name}={number}: allowed are numbers from {least}{', or ' * bool(null)}{null}")


def check_choice(allowed: Iterable[str], **choices: str) -> None:
    """Refuse what is none of the allowed words."""
    for name, choice in choices.items():
        if choice not in allowed:
            raise ValueError(f"{name}={choice}: allowed are {', '.join(allowed)}")
