"""The packages that a user would otherwise install, each built for the same job: byte in, logits out, sizes as asked.

Imports are late, because a package need not be installed. Each is built as its documentation says, at its fastest setting
where it has several that compute the same, with dropout off and the feed-forward (where there is one) four times as wide
as the model. ``arguments`` go into the row, so that it can be traced.

    python -m pip install -e .[peers]
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from types import ModuleType

from torch import nn

from bench.baselines.reference_model import ReferenceModel, WindowModel

REFERENCE_MODEL = "reference_model"
INSTALL = "not installed; python -m pip install -e .[peers]"
APART = ("performer-pytorch", "linformer")
"""Packages that are in no extra, because their layers fail the check of causality: they are named, and not timed."""
MEMORY_PACKAGE = "product-key-memory"


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Sizes of a product-key memory, for ours and the packages' alike."""

    half_keys: int  # C; the table has C * C slots
    top_k: int  # slots that a head reads per byte
    heads: int  # of the memory
    d_query: int  # width of a head's query, two half-keys together


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What all entries have in common."""

    vocabulary: int  # V
    d_model: int  # D
    layers: int
    heads: int
    context: int  # T, bytes of a segment, all of which its last byte sees
    persistent: int  # N, memory key-values of a head
    window: int  # bytes that LocalTransformer sees back, in blocks
    memory: Memory  # of the layer below the top one, as in our variant with one


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A peer; what is built maps bytes ``[B, T]`` to logits ``[B, T, V]``."""

    package: str  # as pip calls it
    backend: str  # fused if it asks for fused attention, else plain
    arguments: Callable[[Sizes], dict]  # of what is built
    build: Callable[[Sizes, dict], nn.Module]  # from the sizes and those arguments
    device: str | None = None  # the only kind of device that it takes part on, or None for all

    def built(self, sizes: Sizes) -> nn.Module:
        """The module; RuntimeError with what the package says where it cannot be had with these sizes."""
        arguments = self.arguments(sizes)
        try:
            return self.build(sizes, arguments)
        except ImportError as error:
            raise RuntimeError(f"{self.package}: {missing(self.package)} ({error})") from error
        except Exception as error:  # a package's complaint is no mistake of the user's
            raise RuntimeError(f"cannot be built with {arguments}: {type(error).__name__}: {error}") from error


def version(package: str) -> str | None:
    """Of the installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def missing(package: str) -> str:
    """What is said of a package that is not installed."""
    return INSTALL.replace("-e .[peers]", package) if package in APART else INSTALL


def library(package: str) -> ModuleType:
    """What a package is imported as."""
    return import_module(package.replace("-", "_"))


def reference_arguments(sizes: Sizes) -> dict:
    same = {name: getattr(sizes, name) for name in ("vocabulary", "d_model", "layers", "heads")}
    return same | {"longest": sizes.context}


def build_reference(_sizes: Sizes, arguments: dict) -> nn.Module:
    return ReferenceModel(**arguments)


def window_arguments(sizes: Sizes) -> dict:
    return reference_arguments(sizes) | {"window": sizes.window}


def build_window(_sizes: Sizes, arguments: dict) -> nn.Module:
    return WindowModel(**arguments)


def _shape(sizes: Sizes, *, prefix: str = "") -> dict:
    d_head = sizes.d_model // sizes.heads
    return {"dim": sizes.d_model, "depth": sizes.layers, "heads": sizes.heads, f"{prefix}dim_head": d_head}


def decoder_arguments(sizes: Sizes) -> dict:
    return _shape(sizes, prefix="attn_") | {"attn_flash": True, "rotary_pos_emb": True, "verbose": False}


def memory_decoder_arguments(sizes: Sizes) -> dict:
    return decoder_arguments(sizes) | {"attn_num_mem_kv": sizes.persistent, "only_attn": True}


def build_decoder(sizes: Sizes, arguments: dict) -> nn.Module:
    found = library("x-transformers")
    decoder = found.Decoder(**arguments)
    return found.TransformerWrapper(num_tokens=sizes.vocabulary, max_seq_len=sizes.context, attn_layers=decoder)


def memory_arguments(sizes: Sizes) -> dict:
    """The package calls a half-key's width ``dim_head``."""
    memory = sizes.memory
    if memory.d_query % 2:
        raise ValueError(f"memory.d_query={memory.d_query}: allowed are even integers from 2")
    same = {"heads": memory.heads, "num_keys": memory.half_keys, "topk": memory.top_k}
    return {"dim": sizes.d_model, **same, "dim_head": memory.d_query // 2}


def build_memory(_sizes: Sizes, arguments: dict) -> nn.Module:
    return library(MEMORY_PACKAGE).PKM(**arguments)


def build_with_memory(sizes: Sizes, arguments: dict) -> nn.Module:
    return ReferenceModel(**reference_arguments(sizes), in_place={sizes.layers - 2: build_memory(sizes, arguments)})


def local_arguments(sizes: Sizes) -> dict:
    return _shape(sizes) | {"local_attn_window_size": sizes.window, "num_residual_streams": 1}


def build_local(sizes: Sizes, arguments: dict) -> nn.Module:
    made = library("local-attention").LocalTransformer
    return made(num_tokens=sizes.vocabulary, max_seq_len=sizes.context, **arguments)


def reformer_arguments(sizes: Sizes) -> dict:
    """Buckets of 64, the package's default, or a quarter of a short context; heads, k and width of a query in its memory
    are the package's own (4, 32, 256) and cannot be set."""
    memory = {"pkm_layers": (sizes.layers - 1,), "pkm_num_keys": sizes.memory.half_keys}  # it counts from 1
    return _shape(sizes) | memory | {"causal": True, "bucket_size": min(64, sizes.context // 4), "ff_chunks": 1}


def full_arguments(sizes: Sizes) -> dict:
    return reformer_arguments(sizes) | {"use_full_attn": True}


def build_reformer(sizes: Sizes, arguments: dict) -> nn.Module:
    made = library("reformer-pytorch").ReformerLM
    return made(num_tokens=sizes.vocabulary, max_seq_len=sizes.context, **arguments)


PACKAGES = {
    REFERENCE_MODEL: Peer(package="torch", backend="fused", arguments=reference_arguments, build=build_reference),
    "flex-window": Peer(package="torch", backend="flex", arguments=window_arguments, build=build_window, device="cuda"),
    "x-transformers": Peer(package="x-transformers", backend="fused", arguments=decoder_arguments, build=build_decoder),
    "x-transformers-memory": Peer(
        package="x-transformers", backend="fused", arguments=memory_decoder_arguments, build=build_decoder
    ),
    MEMORY_PACKAGE: Peer(package=MEMORY_PACKAGE, backend="fused", arguments=memory_arguments, build=build_with_memory),
    "local-attention": Peer(package="local-attention", backend="plain", arguments=local_arguments, build=build_local),
    "reformer-lsh": Peer(
        package="reformer-pytorch", backend="plain", arguments=reformer_arguments, build=build_reformer
    ),
    "reformer-full": Peer(package="reformer-pytorch", backend="plain", arguments=full_arguments, build=build_reformer),
}


def attention_arguments(sizes: Sizes) -> dict:
    d_head = sizes.d_model // sizes.heads
    return {"dim": sizes.d_model, "heads": sizes.heads, "dim_head": d_head, "causal": True}


def flash_arguments(sizes: Sizes) -> dict:
    return attention_arguments(sizes) | {"flash": True}


def local_layer_arguments(sizes: Sizes) -> dict:
    return attention_arguments(sizes) | {"window_size": sizes.window}


def projected_arguments(sizes: Sizes) -> dict:
    """Keys and values of a whole segment are projected to a quarter as many; it has no causal form."""
    known = {"dim": sizes.d_model, "heads": sizes.heads, "dim_head": sizes.d_model // sizes.heads}
    return known | {"seq_len": sizes.context, "k": -(-sizes.context // 4)}


def build_layer(_sizes: Sizes, arguments: dict, *, package: str, name: str) -> nn.Module:
    return getattr(library(package), name)(**arguments)


def layer(package: str, name: str, arguments: Callable[[Sizes], dict], *, backend: str = "plain") -> Peer:
    """A class of a package that is a layer by itself."""
    build = partial(build_layer, package=package, name=name)
    return Peer(package=package, backend=backend, arguments=arguments, build=build)


LAYERS = {
    MEMORY_PACKAGE: Peer(package=MEMORY_PACKAGE, backend="plain", arguments=memory_arguments, build=build_memory),
    "x-transformers": layer("x-transformers", "Attention", flash_arguments, backend="fused"),
    "local-attention": layer("local-attention", "LocalMHA", local_layer_arguments),
    "performer-pytorch": layer("performer-pytorch", "SelfAttention", attention_arguments),
    "linformer": layer("linformer", "LinformerSelfAttention", projected_arguments),
}
"""Peers of a layer alone, which maps ``[B, T, D]`` to the same: a memory, or attention over a segment, with no positions."""


def touched_parameters(model: nn.Module) -> int:
    """Parameters read per byte: of a table of embeddings one row, of a product-key memory one for each head and slot."""
    total = sum(parameter.numel() for parameter in model.parameters())
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            total -= module.weight.numel() - module.embedding_dim
        bag = getattr(module, "values", None)
        if isinstance(bag, nn.EmbeddingBag):
            reads = min(module.heads * module.topk, bag.num_embeddings)
            total -= bag.weight.numel() - reads * bag.embedding_dim
    return total
