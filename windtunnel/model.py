"""Model: a trained network for notebooks, in float32: scores, text and attention maps of bytes."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import harness  # noqa: F401 - applies settings that must precede compiling kernels
from bench.planning import open_trained
from harness.device.runtime import Runtime
from harness.loop.sampling import numbers_of, sampled
from harness.loop.scoring import score_stream
from harness.model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class Model:
    """A trained network, the byte of each index of its vocabulary, and variant, data, scores and source of its run."""

    network: LanguageModel
    symbols: bytes
    about: dict

    def score(self, text: bytes, *, streams: int = 1, segment: int = 512, context: int = 0) -> float:
        """Return bits per byte of ``text`` without its first byte, for which there is no prediction.

        Args:
            streams, segment, context: how the text is cut, as in ``eval``; the run's own are in ``about["protocol"]``.
                By default one stream reads the whole text with carried state.

        Raises:
            ValueError: ``text`` has a byte that the vocabulary lacks, or fewer than two bytes.
        """
        split = numbers_of(text, self.symbols, key="text").to(torch.uint8)
        if len(split) < 2:
            raise ValueError("text: has one byte; a score needs two, for there is no prediction of the first")
        runtime = Runtime(device=self._device, precision="float32", compile=False)
        cut = {"streams": streams, "segment": segment, "context": context}
        return score_stream(self.network, split, runtime=runtime, **cut).bits_per_byte

    def generate(self, prompt: bytes, *, n_bytes: int, seed: int | None = None, **choice) -> bytes:
        """Return ``n_bytes`` bytes that the model generates after ``prompt``; ``choice`` is ``temperature`` and
        ``top_k`` of ``harness.loop.sampling.draw``."""
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        numbers = numbers_of(prompt, self.symbols, key="prompt")
        drawn = sampled(self.network, numbers, symbols=len(self.symbols), generator=generator, **choice)
        return bytes(self.symbols[number] for number in itertools.islice(drawn, n_bytes))

    @torch.no_grad()
    def attention(self, text: bytes) -> dict[str, Tensor]:
        """Return the attention map ``[H, T, T]`` of ``text`` for each sublayer that has one, by its name, on the CPU.

        Row t has the weights of the bytes that byte t sees. Softmax weights sum to 1, less the learned vectors' share.
        """
        tokens = numbers_of(text, self.symbols, key="text")[None].to(self._device)
        _, seen = self.network.inspect(tokens)
        return {name: part.weights[0].cpu() for name, part in seen.items() if part.weights is not None}

    @property
    def _device(self) -> torch.device:
        return next(self.network.parameters()).device


def load(path: str | Path, *, device: str = "cpu", trust: Sequence[str] = ()) -> Model:
    """Load the best weights of a run folder onto a ``device`` of torch. Nothing in the folder is trusted; ``trust``
    names modules beside ours that its mechanisms may come from. A ValueError names folder or file, and problem."""
    opened = open_trained(Path(path), key="path", trust=list(trust))
    about = opened.provenance | {"protocol": opened.plan.protocol()}
    return Model(network=opened.model().to(device).eval(), symbols=opened.symbols(), about=about)
