"""An opened run: the plan, the provenance and the best weights of a run folder, and its model.

``open_trained`` serves the commands; ``load`` returns the model for notebooks."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from harness.cache import user_path
from harness.check.select_backend import with_backend
from harness.compose.cli import MISTAKES, explain
from harness.compose.untrusted_config import CONF, read_config
from harness.data import corpora
from harness.data.corpora import Corpus
from harness.device.runtime import Runtime
from harness.device.torch_settings import configure_torch
from harness.loop.sampling import generate, token_ids
from harness.loop.state import load_weights
from harness.model import LanguageModel
from harness.objective.scoring import score_stream
from harness.plan.build import Plan, literal, plan_run
from harness.plan.settings import parse_setting
from harness.record import checkpoint
from harness.record.exported import WEIGHTS, load_exported
from harness.record.folder import identity_of, read_provenance, why_unfinished
from harness.record.rows import CONFIG, RECORD


def read_run(path: Path, *, key: str) -> tuple[dict, dict]:
    """Return a run folder's provenance and its best checkpoint; ValueError naming ``key`` if either
    is missing."""
    best = path / checkpoint.FOLDER / checkpoint.BEST
    weights = path / WEIGHTS
    if not (best.exists() or weights.exists()) or not (path / RECORD).exists():
        raise ValueError(
            f"{key}={path}: must be a run folder with {checkpoint.FOLDER}/{checkpoint.BEST} and "
            f"{RECORD}{why_unfinished(path)}"
        )
    provenance = read_provenance(path, key=key)
    if weights.exists():
        try:
            return provenance, load_exported(weights)
        except ValueError as error:
            raise ValueError(f"{key}={error}") from error
    return provenance, checkpoint.load_best(path, identity_of(provenance))


def plan_of_run(path: Path, *, key: str, runtime: DictConfig, trust: list | str) -> Plan:
    """Return the plan of a run folder, with ``runtime`` as its section of that name; ValueError
    naming folder, file and key. The folder is untrusted: its configuration may have plain values
    only, and classes only of ours and of ``trust``."""
    origin = f"{key}={path}"
    config = read_config(path / CONFIG, label=origin)
    for name in ("trial", "space"):  # older run folders have these keys, for a point of a search
        config.pop(name, None)
    try:
        config = literal(config)
        config.update(
            {
                "runtime": runtime,
                "trust": trust,
                "record": OmegaConf.load(CONF / "record/default.yaml"),
            }
        )
        return plan_run(config)
    except MISTAKES as error:
        raise ValueError(f"{origin}: {CONFIG}: {explain(error)}") from error


class TrainedRun(NamedTuple):
    """An opened run folder: its plan, the first row of its record (``provenance``), the content of
    its best checkpoint, and the configuration key that named the folder."""

    folder: Path
    plan: Plan
    provenance: dict
    best: dict
    key: str

    def require_causal(self) -> None:
        """Raise ValueError for a run whose model does not predict the next byte."""
        objective = self.plan.objective
        if not objective.predicts_next:
            raise ValueError(
                f"{self.key}={self.folder}: was trained with objective={objective.name}; allowed "
                "are runs of causal_lm, which predict the next byte"
            )

    def model(self, *, span: int | None = None) -> LanguageModel:
        """Return the model with the best weights, on the CPU, at ``span`` or the run's; ValueError
        if weights do not fit."""
        weights = self.best["model"]
        model = self.plan.make_model(classes=len(weights.get("head.weight", ())))
        load_weights(model, weights, source=self.key)
        if span is not None and span != self.plan.model.span:
            for _, sublayer in model.sublayers():
                sublayer.set_span(span)
        return model

    def on_device(self, *, span: int | None = None) -> tuple[LanguageModel, Runtime]:
        """Return the model on the plan's device, with the backend selected there, and the device's
        runtime."""
        device_runtime = configure_torch(self.plan.runtime)
        model = self._replace(plan=with_backend(self.plan, device_runtime)).model(span=span)
        return model.to(device_runtime.device), device_runtime

    def corpus(self) -> Corpus:
        """Return the run's corpus; ValueError if it differs from the one that the run read."""
        corpus = corpora.load(**vars(self.plan.data))
        expected = self.provenance["data"]["sha256"]
        if corpus.sha256 != expected:
            raise ValueError(
                f"data: its SHA-256 must be {expected}, as when the run read it; it is "
                f"{corpus.sha256}"
            )
        return corpus

    def symbols(self) -> bytes:
        """Return the byte of each token id. A vocabulary of fewer than 256 ids is read from the
        corpus."""
        if self.plan.data.vocabulary == 256:
            return bytes(range(256))
        return self.corpus().symbols


def open_trained(
    folder: object,
    *,
    key: str,
    runtime: DictConfig | None = None,
    trust: list | str,
) -> TrainedRun:
    """Open a run folder, which is untrusted. ``runtime`` is by default
    ``conf/runtime/default.yaml`` in float32 on the CPU. ValueError naming ``key``, the folder
    and the mistake."""
    path = user_path(parse_setting(folder, str, key=key), key=key)
    if runtime is None:
        defaults = OmegaConf.load(CONF / "runtime/default.yaml")
        on_cpu = {"device": "cpu", "precision": "float32", "compile": False}
        runtime = OmegaConf.merge(defaults, on_cpu)
    provenance, best = read_run(path, key=key)
    plan = plan_of_run(path, key=key, runtime=runtime, trust=trust)
    return TrainedRun(path, plan, provenance, best, key)


@dataclass(frozen=True, kw_only=True, repr=False)
class Model:
    """A trained network in float32, which scores and generates text and returns attention maps,
    the byte of each token id, and ``about``: its run's provenance and scoring protocol."""

    network: LanguageModel
    symbols: bytes
    about: dict

    def __repr__(self) -> str:
        n_parameters = sum(parameter.numel() for parameter in self.network.parameters())
        return (
            f"Model(variant={self.about['variant']}, data={self.about['data']['name']}, "
            f"parameters={n_parameters:,})"
        )

    def score(
        self, text: bytes, *, streams: int = 1, segment: int = 512, context: int = 0
    ) -> float:
        """Return bits per byte of ``text`` without its first byte, which the model does not
        predict.

        ``streams``, ``segment`` and ``context`` are those of ``eval`` in ``conf/evaluate.yaml``. By
        default one stream reads all of ``text`` with carried state. ValueError if ``text`` has a
        byte that is not in the vocabulary, or fewer than two bytes."""
        split = token_ids(text, self.symbols, key="text").to(torch.uint8)
        if len(split) < 2:
            raise ValueError(
                "text: has one byte; a score needs two, because a model does not predict the first"
            )
        device = self.network.embedding.weight.device
        score = score_stream(
            self.network,
            split,
            runtime=Runtime(device=device, precision="float32", compile=False),
            streams=streams,
            segment=segment,
            context=context,
        )
        return score.bits_per_byte

    def generate(self, prompt: bytes, *, n_bytes: int, seed: int | None = None, **options) -> bytes:
        """Return ``n_bytes`` bytes that the model generates after ``prompt``. ``options`` are
        ``temperature`` and ``top_k`` of ``harness.loop.sampling.draw``."""
        return bytes(self.stream(prompt, n_bytes=n_bytes, seed=seed, **options))

    def stream(
        self, prompt: bytes, *, n_bytes: int, seed: int | None = None, **options
    ) -> Iterator[int]:
        """Yield the bytes that ``generate`` returns, each as soon as it is known."""
        generator = None
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
        tokens = token_ids(prompt, self.symbols, key="prompt")
        continuation = generate(
            self.network, tokens, n_symbols=len(self.symbols), generator=generator, **options
        )
        for token_id in itertools.islice(continuation, n_bytes):
            yield self.symbols[token_id]

    @torch.no_grad()
    def attention(self, text: bytes) -> dict[str, Tensor]:
        """Return the attention map ``[H, T, T]`` of each sublayer that has one, by name, on the
        CPU. Row t has the weights of all bytes for query t. In softmax attention they and the
        weights of learned vectors sum to 1."""
        tokens = token_ids(text, self.symbols, key="text")[None]
        _, inspections = self.network.inspect(tokens.to(self.network.embedding.weight.device))
        return {
            name: i.weights[0].cpu() for name, i in inspections.items() if i.weights is not None
        }


def load(path: str | Path, *, device: str = "cpu", trust: Sequence[str] = ()) -> Model:
    """Load the best weights of a run folder onto a ``device`` of torch. No code in the folder is
    executed. ``trust`` names further modules from which its mechanisms may be imported.
    ValueError if the folder has no readable run."""
    opened = open_trained(str(path), key="path", trust=list(trust))
    opened.require_causal()
    about = opened.provenance | {"protocol": opened.plan.protocol()}
    return Model(network=opened.model().to(device).eval(), symbols=opened.symbols(), about=about)
