"""Model: what a notebook needs of a trained network, in float32: scores, text and attention maps of bytes."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import harness  # noqa: F401 - sets what must be set before kernels are compiled
from bench.planning import open_trained
from harness.device.runtime import Runtime
from harness.loop.sampling import numbers_of, sampled
from harness.loop.scoring import score_stream
from harness.model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class Model:
    """A trained network, with the byte of each number of its vocabulary, and variant, data, scores and source of its run."""

    network: LanguageModel
    symbols: bytes
    about: dict

    def score(self, text: bytes, *, streams: int = 1, segment: int = 512, context: int = 0) -> float:
        """Bits per byte of ``text`` but its first byte, of which there is no prediction.

        Args:
            streams, segment, context: how the text is cut, as ``eval`` has it; ``about["protocol"]`` has the run's own. By
                default one stream reads it all with carried state.

        Raises:
            ValueError: a byte that the vocabulary lacks, or fewer than two bytes.
        """
        split = numbers_of(text, self.symbols, key="text").to(torch.uint8)
        if len(split) < 2:
            raise ValueError("text: has one byte; a score needs two, for there is no prediction of the first")
        runtime = Runtime(device=self._device, precision="float32", compile=False)
        cut = {"streams": streams, "segment": segment, "context": context}
        return score_stream(self.network, split, runtime=runtime, **cut).bits_per_byte

    def generate(self, prompt: bytes, *, n_bytes: int, seed: int | None = None, **choice) -> bytes:
        """So many bytes that the model writes after ``prompt``; ``choice`` is ``temperature`` and ``top_k``, as
        ``harness.loop.sampling.draw`` has them."""
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        numbers = numbers_of(prompt, self.symbols, key="prompt")
        drawn = sampled(self.network, numbers, symbols=len(self.symbols), generator=generator, **choice)
        return bytes(self.symbols[number] for number in itertools.islice(drawn, n_bytes))

    @torch.no_grad()
    def attention(self, text: bytes) -> dict[str, Tensor]:
        """What each byte of ``text`` takes of each: ``[H, T, T]`` for each sublayer that says so, by its name, on the CPU.

        A row is what one byte sees. It sums to 1 where weights are a softmax, less what learned vectors take.
        """
        tokens = numbers_of(text, self.symbols, key="text")[None].to(self._device)
        _, seen = self.network.inspect(tokens)
        return {name: part.weights[0].cpu() for name, part in seen.items() if part.weights is not None}

    @property
    def _device(self) -> torch.device:
        return next(self.network.parameters()).device


def load(path: str | Path, *, device: str = "cpu", trust: Sequence[str] = ()) -> Model:
    """The model of a run folder: its best weights, on a ``device`` of torch's. Nothing in the folder is believed; ``trust``
    names the modules beside ours that its mechanisms may come from. ValueError names the folder or file, and what is wrong."""
    opened = open_trained(Path(path), key="path", trust=list(trust))
    about = opened.saved | {"protocol": opened.plan.protocol()}
    return Model(network=opened.model().to(device).eval(), symbols=opened.symbols(), about=about)
