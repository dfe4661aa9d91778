"""Model: a trained network for notebooks. It scores text, generates text and returns attention maps, in float32."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import harness  # noqa: F401 - applies settings that must precede compiling kernels
from bench.planning import open_trained
from harness.cache import user_path
from harness.device.runtime import Runtime
from harness.loop.sampling import generate, token_ids
from harness.loop.scoring import score_stream
from harness.model import LanguageModel


@dataclass(frozen=True, kw_only=True, repr=False)
class Model:
    """A trained network, the byte of each token id, and ``about``: its run's provenance and scoring protocol."""

    network: LanguageModel
    symbols: bytes
    about: dict

    def __repr__(self) -> str:
        n_parameters = sum(parameter.numel() for parameter in self.network.parameters())
        variant, data = self.about["variant"], self.about["data"]["name"]
        return f"Model(variant={variant}, data={data}, parameters={n_parameters:,})"

    def score(self, text: bytes, *, streams: int = 1, segment: int = 512, context: int = 0) -> float:
        """Return bits per byte of ``text`` without its first byte, which the model does not predict.

        ``streams``, ``segment`` and ``context`` are those of ``eval`` in ``conf/evaluate.yaml``. By default one stream
        reads all of ``text`` with carried state. ValueError if ``text`` has a byte that is not in the vocabulary, or
        fewer than two bytes."""
        split = token_ids(text, self.symbols, key="text").to(torch.uint8)
        if len(split) < 2:
            raise ValueError("text: has one byte; a score needs two, because a model does not predict the first")
        runtime = Runtime(device=self._device, precision="float32", compile=False)
        layout = {"streams": streams, "segment": segment, "context": context}
        return score_stream(self.network, split, runtime=runtime, **layout).bits_per_byte

    def generate(self, prompt: bytes, *, n_bytes: int, seed: int | None = None, **options) -> bytes:
        """Return ``n_bytes`` bytes that the model generates after ``prompt``. ``options`` are ``temperature`` and
        ``top_k`` of ``harness.loop.sampling.draw``."""
        return bytes(self.stream(prompt, n_bytes=n_bytes, seed=seed, **options))

    def stream(self, prompt: bytes, *, n_bytes: int, seed: int | None = None, **options) -> Iterator[int]:
        """Yield the bytes that ``generate`` returns, each as soon as it is known."""
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        tokens = token_ids(prompt, self.symbols, key="prompt")
        continuation = generate(self.network, tokens, n_symbols=len(self.symbols), generator=generator, **options)
        for token_id in itertools.islice(continuation, n_bytes):
            yield self.symbols[token_id]

    @torch.no_grad()
    def attention(self, text: bytes) -> dict[str, Tensor]:
        """Return the attention map ``[H, T, T]`` of each sublayer that has one, by name, on the CPU. Row t has the
        weights of all bytes for query t. In softmax attention they and the weights of learned vectors sum to 1."""
        tokens = token_ids(text, self.symbols, key="text")[None].to(self._device)
        _, inspections = self.network.inspect(tokens)
        weights = {name: inspection.weights for name, inspection in inspections.items()}
        return {name: maps[0].cpu() for name, maps in weights.items() if maps is not None}

    @property
    def _device(self) -> torch.device:
        return next(self.network.parameters()).device


def load(path: str | Path, *, device: str = "cpu", trust: Sequence[str] = ()) -> Model:
    """Load the best weights of a run folder onto a ``device`` of torch. No code in the folder is executed. ``trust``
    names further modules from which its mechanisms may be imported. ValueError if the folder has no readable run."""
    opened = open_trained(user_path(str(path), key="path"), key="path", trust=list(trust))
    about = opened.provenance | {"protocol": opened.plan.protocol()}
    return Model(network=opened.model().to(device).eval(), symbols=opened.symbols(), about=about)
