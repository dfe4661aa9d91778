"""Typed words, composed by Hydra into a job or a sweep; a mistake is one message and exit code 2."""
