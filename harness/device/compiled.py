"""A model's forward pass, compiled into a limited number of graphs, and the time of compiling."""

import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

MAX_GRAPHS = 8
"""Limit of graphs of a model. Six are usual: training and scoring, for a stream's first, second
and later segments."""


class Compiled:
    """Calls a model in compiled graphs, or without them once it would need more than
    ``MAX_GRAPHS``; ``fully_compiled`` is then False. A scoring graph serves batches of any shape,
    and always collects statistics. The carried state is contiguous and no view, because each
    other memory layout would need a graph of its own. Padded texts have so many lengths that
    they are not compiled."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.graphs = torch.compile(model)
        self.fully_compiled = True

    def __call__(self, tokens: Tensor, state: object = None, *, collect_stats: bool = False):
        scoring = not torch.is_grad_enabled()
        # torch.compile makes a separate graph for a batch of size 1
        duplicated = scoring and len(tokens) == 1
        if duplicated:
            tokens = tokens.expand(2, -1).contiguous()
            state = tree_map_only(Tensor, lambda s: torch.cat([s, s]), state)
        out = self._forward(tokens, state, scoring=scoring, collect_stats=collect_stats)
        state = tree_map_only(Tensor, _contiguous_copy, self.model.trim(out.state))
        if not duplicated:
            return out._replace(state=state)
        stats = {name: {key: x / 2 for key, x in sums.items()} for name, sums in out.stats.items()}
        return out._replace(
            logits=out.logits[:1], state=tree_map_only(Tensor, lambda s: s[:1], state), stats=stats
        )

    def _forward(self, tokens: Tensor, state: object, *, scoring: bool, collect_stats: bool):
        from torch._dynamo import config, exc, maybe_mark_dynamic  # late: slow to import

        if self.fully_compiled:
            for x in tree_leaves((tokens, state)) if scoring else ():
                if isinstance(x, Tensor):
                    maybe_mark_dynamic(x, list(range(x.dim())))
            try:
                with config.patch(recompile_limit=MAX_GRAPHS, fail_on_recompile_limit_hit=True):
                    return self.graphs(tokens, state, collect_stats=collect_stats or scoring)
            except exc.FailOnRecompileLimitHit:
                self.fully_compiled = False
                print(
                    f"runtime.compile: more than {MAX_GRAPHS} graphs would be needed; the run "
                    "continues uncompiled"
                )
        return self.model(tokens, state, collect_stats=collect_stats)


def _contiguous_copy(x: Tensor) -> Tensor:
    """Return ``x``, copied if it is a view of another tensor or not contiguous."""
    if x._is_view() or not x.is_contiguous():
        return x.clone(memory_format=torch.contiguous_format)
    return x


@contextlib.contextmanager
def compile_clock(*, compiled: bool) -> Iterator[SimpleNamespace]:
    """Context whose object counts the ``seconds`` of compiling in its block. Imports the
    compiler if ``compiled``."""
    clock = SimpleNamespace(seconds=0.0)
    if not compiled:
        yield clock
        return
    from torch._dynamo.callback import callback_handler

    def start(_arguments: object) -> None:
        clock.began = time.perf_counter()

    def end(_arguments: object) -> None:
        clock.seconds += time.perf_counter() - clock.began

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
    try:
        yield clock
    finally:
        callback_handler.remove_start_callback(start)
        callback_handler.remove_end_callback(end)
