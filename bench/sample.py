"""Text that a run writes: ``python -m bench.sample run=outputs/latest prompt="The " bytes=500 temperature=0.8``.

Byte after byte with carried state, so a byte takes the same time however long the text is, once the window is full. What
is no UTF-8, and control codes, are shown as ``\\xff``: a model may write anything, and a terminal obeys some of it.
"""

import codecs
import itertools
import sys
import time
from pathlib import Path

import hydra
from omegaconf import DictConfig

from bench import CONF
from harness.compose.cli import run_command

TYPES = {"bytes": int, "seed": int, "prompt": str, "temperature": float, "top_k": int | None, "top_p": float | None}


@hydra.main(version_base="1.3", config_path=CONF, config_name="sample")
def main(cfg: DictConfig) -> None:
    import torch  # late, as everything slow

    from bench.planning import open_trained
    from harness.device import runtime
    from harness.loop.sampling import numbers_of, sampled
    from harness.plan.settings import checked

    asked = {key: checked(cfg[key], kind, key=key) for key, kind in TYPES.items()}
    number, prompt = asked["bytes"], asked["prompt"].encode("utf-8", "surrogateescape")
    if number < 1:
        raise ValueError(f"bytes={number}: must be at least 1")
    opened = open_trained(Path(cfg.run), key="run", runtime=cfg.runtime, trust=cfg.trust)
    model, symbols = opened.model(), opened.symbols()
    device = runtime.start(opened.plan.runtime)
    numbers, generator = numbers_of(prompt, symbols, key="prompt"), torch.Generator().manual_seed(asked["seed"])
    choice = {key: asked[key] for key in ("temperature", "top_k", "top_p")}
    drawn = sampled(model.to(device.device), numbers, symbols=len(symbols), generator=generator, **choice)
    shown, first = Shown(), next(drawn)  # reads the prompt
    print(shown.text(prompt), end="")
    began = time.perf_counter()
    for symbol in itertools.chain([first], itertools.islice(drawn, number - 1)):
        print(shown.text(symbols[symbol : symbol + 1]), end="", flush=True)
    speed = (number - 1) / (time.perf_counter() - began)
    print(shown.text(b"", final=True))
    speed = f", {speed:,.0f} bytes per second" if number > 1 else ""
    print(f"\n{number:,} bytes{speed} on {device.device}", file=sys.stderr)


class Shown:
    """Bytes as a terminal may be given them: what is no UTF-8, and control codes but the end of a line and the tabulator,
    as ``\\x`` and two digits."""

    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def text(self, more: bytes, *, final: bool = False) -> str:
        """What can be shown of ``more`` and of what came before; an open character waits for its end, or for ``final``."""
        text = self._decoder.decode(more, final)
        return "".join(c if c in "\n\t" or c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in character.encode())


if __name__ == "__main__":
    run_command(main)
