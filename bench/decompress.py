"""Decodes a file of ``bench.compress``: ``python -m bench.decompress run=outputs/latest
file=F.awt out=F``."""

from bench.compress import decompress as main
from harness.compose.cli import run_command

if __name__ == "__main__":
    run_command(main)
