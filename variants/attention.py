"""Multi-head causal attention over the last S positions, once for all variants that are a kind of it.

    q, k, v = W_q x, W_k x, W_v x;   s_tx = (q_t . k_x + position) / sqrt(K);   y = W_o concat_h(softmax(s) v)

(1706.03762, 3.2). Projections, cache, positions and the softmax over a window are here; a mechanism is a part of it:

- ``reach`` says how far a head looks: ``FixedReach`` (all S), or a learned span (``adaptive_span.py``);
- ``persistent`` adds key-value vectors to the same softmax (``all_attention.py``).

Past keys and values (``cache: kv``) or past inputs (``cache: hidden``, Transformer-XL's, 1901.02860, 3.2) are carried,
detached, as far back as the window reaches. Shapes describe the state: a shorter past is simply fewer keys. On the CPU's
kernel every head of ``cache: kv`` carries its own, so that the state goes by the mean span and not by the longest.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from variants.context import Keys, before, by_part, last
from variants.contract import Out, Part, Place, State, Sublayer
from variants.kernels import fused, triton_window, window, window_cpu
from variants.kernels.window import Past, Persistent, Window


class Reach(Part):
    """How far each head looks. The base class looks S keys back, everywhere, with a hard edge.

    ``columns`` are decided in ``project_`` and rounded up, so that a forward pass never waits for a parameter's value.
    """

    ramp: int = 0
    fusable: bool = True

    def __init__(self, place: Place):
        super().__init__()
        self.span, self.heads = place.span, place.heads
        self.columns: tuple[int, ...] = (place.span,) * place.heads

    def forward(self, x: Tensor) -> Tensor | None:
        """Spans z in keys for the sublayer's input ``x [B, T, D]``: ``[H]``, ``[B, H, T]``, or None for a hard window."""
        return None

    def loss(self, z: Tensor | None) -> Tensor | None:
        """What the spans cost, nats per byte, already weighted."""
        return None

    def project_(self) -> None:
        """Parameters into their range, and ``columns`` from them."""

    def seen(self, z: Tensor | None) -> dict[str, Tensor]:
        """Statistics of one segment that add."""
        return {}

    def metrics(self, seen: dict[str, Tensor]) -> dict[str, float | Tensor]:
        return {}

    def carried(self) -> tuple[int, ...]:
        """Keys that may be visible at the next segment, for each head, after an optimizer step between."""
        return self.columns

    def set_span(self, span: int) -> None:
        """Look ``span`` keys back from now on."""
        self.span, self.columns = span, (span,) * self.heads

    def keys_per_byte(self) -> float:
        """Visible keys of a warm query, the mean over heads."""
        return float(self.span)

    def ideal_flops(self) -> int:
        """Forward FLOPs per byte of deciding the spans."""
        return 0


FixedReach = Reach


class PersistentVectors(Part):
    """Key-value vectors beside the context: ``forward`` gives keys and values ``[H, N, K]``, N of them a head."""

    number: int

    def forward(self) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class Attention(Sublayer):
    """Causal multi-head attention over a window of the past.

    Args:
        place: heads, span, cache, positions and dropout of the run.
        d_head: head width K, or None for D / H.
        bias: whether the four projections have biases.
        zero_init: start W_o at zero, so that the sublayer starts as the identity.
        reach: makes the ``Reach``; None for a fixed span.
        persistent: makes the ``PersistentVectors``; None for none.
    """

    def __init__(
        self,
        place: Place,
        *,
        d_head: int | None = None,
        bias: bool = False,
        zero_init: bool = False,
        reach: Callable[[Place], Reach] | None = None,
        persistent: Callable[..., PersistentVectors] | None = None,
    ):
        super().__init__()
        if d_head is None and place.d_model % place.heads:
            raise ValueError(f"model.heads={place.heads} must divide model.d_model={place.d_model}")
        if d_head is not None and d_head < 1:
            raise ValueError(f"d_head={d_head}: must be at least 1, or null")
        if place.cache not in ("kv", "hidden"):
            raise ValueError(f"model.cache={place.cache}: allowed are kv, hidden")
        self.heads, self.d_head = place.heads, d_head or place.d_model // place.heads
        inner = self.heads * self.d_head
        self.query = nn.Linear(place.d_model, inner, bias=bias)
        self.key = nn.Linear(place.d_model, inner, bias=bias)
        self.value = nn.Linear(place.d_model, inner, bias=bias)
        self.output = nn.Linear(inner, place.d_model, bias=bias)
        if zero_init:
            nn.init.zeros_(self.output.weight)
        self.position = place.position(self.d_head)
        self.reach = (reach or FixedReach)(place)
        self.persistent = persistent(place, d_head=self.d_head) if persistent else None
        self.shift = 0 if place.attend_self else 1
        self.cache, self.dropout, self.wanted_path = place.cache, place.dropout, place.path

    def forward(self, x: Tensor, state: State = None, start: Tensor | None = None, *, look: bool = False) -> Out:
        if start is None:
            start = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        z = self.reach(x)
        plain_q, k, v = self._project(x, self.query, self.key, self.value)
        own = [self.position.rotate(k, start), v]
        q = self.position.rotate(plain_q, start)
        persistent = None if self.persistent is None else Persistent(plain_q, *self.persistent())
        y, state, seen = self._over_window(x, q, own, state, start, z, persistent, look=look)
        out = self.output(rearrange(y, "B H T K -> B T (H K)"))
        return Out(out, state, self.reach.loss(z) if self.training else None, seen)

    def _project(self, x: Tensor, *linears: nn.Linear, heads: list[int] | None = None) -> list[Tensor]:
        """``[B, H, T, K]`` of all or some heads by each of the maps, queries scaled: one product with all matrices."""

        def of(name: str) -> Tensor | None:
            found = [getattr(linear, name) for linear in linears]
            if found[0] is None:
                return None
            if heads is not None:
                own = torch.tensor(heads, device=x.device)
                found = [m.unflatten(0, (self.heads, -1)).index_select(0, own).flatten(0, 1) for m in found]
            scaled = [linear is self.query for linear in linears]
            return torch.cat([m * self.d_head**-0.5 if s else m for m, s in zip(found, scaled, strict=True)])

        parts = F.linear(x, of("weight"), of("bias")).chunk(len(linears), dim=-1)
        return [rearrange(part, "B T (H K) -> B H T K", K=self.d_head) for part in parts]

    @torch.compiler.disable  # columns are Python numbers, the past has any length: a graph break around all of it
    def _over_window(
        self,
        x: Tensor,
        q: Tensor,
        own: list[Tensor],
        state: State,
        start: Tensor,
        z: Tensor | None,
        persistent: Persistent | None,
        *,
        look: bool,
    ) -> tuple[Tensor, State, dict[str, Tensor] | None]:
        """What the heads give ``[B, H, T, K]``, the state to carry, and statistics if ``look``."""
        reach = Window(self.reach.columns, self.shift, z, self.reach.ramp)
        path = self.path(x.device, training=self.training)
        keys, state = self._context(x, own, state, start, reach.past(), path)
        y = self._attend(path, q, keys, reach, persistent)
        with torch.no_grad():
            seen = self._look(path, q, keys, reach, persistent) if look else None
        return y, state, seen

    def _context(
        self, x: Tensor, own: list[Tensor], state: State, start: Tensor, past: int, path: str
    ) -> tuple[Keys, State]:
        """Keys and values, and what to carry: the last ``past`` of them, or of the inputs that they are made of."""
        apart = self._parts(past) if (path, x.device.type) == ("kernel", "cpu") else [(past, None)]
        if self.cache == "hidden":
            old = None if state is None else state[:, max(0, state.shape[1] - past) :].to(x.dtype)
            parts = [] if old is None else [self._again(old, start, *part) for part in apart]
            return Keys(*own, parts), last(past, 1, old, x)
        keys = Keys(*own, before(state, past, own[0].dtype))
        kept = [n - 1 + self.shift for n in self.reach.carried()]
        return keys, keys.last_by_head(kept) if len(keys.past) > 1 or len(apart) > 1 else keys.last(past)

    def _parts(self, past: int) -> list[tuple[int, list[int] | None]]:
        """Heads, or None for all, and how many past keys they can meet: the CPU's kernel wants no more than these."""
        groups = fused.groups(self.reach.columns)
        return [(past, None)] if len(groups) == 1 else [(columns - 1 + self.shift, heads) for columns, heads in groups]

    def _again(self, old: Tensor, start: Tensor, past: int, heads: list[int] | None) -> Past:
        """Keys and values of some heads from the last ``past`` of the inputs before position ``start``."""
        old = old[:, max(0, old.shape[1] - past) :]
        k, v = self._project(old, self.key, self.value, heads=heads)
        return Past(tuple(heads or range(self.heads)), self.position.rotate(k, start - old.shape[1]), v)

    def _attend(self, path: str, q: Tensor, keys: Keys, reach: Window, persistent: Persistent | None) -> Tensor:
        columns = max(reach.columns)
        vectors = self.position.vectors(columns) if path == "kernel" else None
        same = {"bias": self.position.bias(q, columns) if vectors is None else None, "persistent": persistent}
        if path == "kernel" and q.device.type == "cpu":
            return window_cpu.attend(q, keys.k, keys.v, reach, past=keys.past, vectors=vectors, **same)
        ways = {"kernel": partial(triton_window.attend, vectors=vectors), "fused": fused.attend}
        ways["plain"] = partial(window.attend, dropout=self.dropout if self.training else 0.0)
        return by_part(ways[path], q, keys, reach, **same)

    def path(self, device: torch.device, *, training: bool) -> str:
        """The first of these that computes the same here, or the one that was asked for; ValueError where that cannot be.

        - ``kernel``: our own, for this CPU (``window_cpu.py``) or for a GPU (``triton_window.py``);
        - ``fused``: torch's flash attention on a CPU (``fused.py``), which takes no learned vector per distance;
        - ``plain``: ``window.py``, and on a GPU the one that is taken unasked.
        """
        # The GPU's kernel has run in Triton's interpreter only: until a device has checked it, nobody gets it unasked.
        if self.wanted_path == "plain" or (self.wanted_path == "auto" and device.type != "cpu"):
            return "plain"
        obstacles = {name: self._obstacles(name, device, training=training) for name in ("kernel", "fused")}
        if self.wanted_path == "auto":
            return next((name for name, found in obstacles.items() if not found), "plain")
        if found := obstacles[self.wanted_path]:
            allowed = ["auto", "plain", *(name for name, found in obstacles.items() if not found)]
            raise ValueError(
                f"runtime.path={self.wanted_path} cannot run with {', '.join(found)}: allowed are {', '.join(allowed)}"
            )
        return self.wanted_path

    def _obstacles(self, path: str, device: torch.device, *, training: bool) -> list[str]:
        """Why a path cannot run."""
        by_vectors = path == "kernel" and self.position.vectors(1) is not None
        found = {
            f"model.dropout={self.dropout}": training and self.dropout > 0,
            "spans that depend on the input": not self.reach.fusable,
            "a position scheme whose bias depends on the query": not (self.position.constant_bias or by_vectors),
            f"runtime.device={device.type}": path == "fused" and device.type != "cpu",
        }
        reasons = [name for name, stands in found.items() if stands]
        if path == "fused":
            return reasons
        missing = triton_window.available(device, torch.float32, self.d_head) if device.type != "cpu" else None
        missing = window_cpu.available() if device.type == "cpu" else missing
        return [*reasons, missing] if missing else reasons

    def _look(
        self, path: str, q: Tensor, keys: Keys, reach: Window, persistent: Persistent | None
    ) -> dict[str, Tensor]:
        seen = {"bytes": torch.tensor(q.shape[0] * q.shape[2], dtype=torch.float64)} | self.reach.seen(reach.z)
        if persistent is not None:
            # The same attend path, fed with ones on persistent vectors and zeros on the context.
            ones = persistent._replace(v=torch.ones_like(persistent.v))
            mass = self._attend(path, q, keys.without_values(), reach, ones)[..., 0]
            seen["persistent_mass"] = mass.double().sum(dim=(0, 2))
        return seen

    def project_(self) -> None:
        self.reach.project_()

    def set_span(self, span: int) -> None:
        if span < 1 or span > self.position.longest:
            raise ValueError(f"eval.span={span}: allowed are 1 to {self.position.longest} with these positions")
        self.reach.set_span(span)

    def metrics(self, seen: dict[str, Tensor]) -> dict[str, float | Tensor]:
        found = dict(self.reach.metrics(seen))
        if "persistent_mass" in seen:
            found["persistent_mass"] = seen["persistent_mass"] / seen["bytes"]
        return found

    def ideal_flops(self) -> int:
        columns = self.reach.keys_per_byte()
        per_head = 4 * columns * self.d_head + self.position.ideal_flops(columns)
        if self.persistent is not None:
            per_head += 4 * self.persistent.number * self.d_head
        linears = (self.query, self.key, self.value, self.output)
        return round(2 * sum(m.weight.numel() for m in linears) + self.heads * per_head) + self.reach.ideal_flops()
