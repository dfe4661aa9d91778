"""A model's forward, compiled into few graphs."""

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

MOST_GRAPHS = 8
"""Of one model: training and scoring, each where streams begin, after one segment and later."""


class Compiled:
    """Calls a model in compiled graphs; eagerly once it would need more than ``MOST_GRAPHS``, after printing so.

    Scoring has one graph for all numbers of streams and lengths, and always collects statistics. Carried state is
    contiguous and no view, so that its layout makes no further graph.

    Attributes:
        whole: whether all calls so far were compiled.
    """

    def __init__(self, model: nn.Module):
        self.model, self.graphs, self.whole = model, torch.compile(model), True
        self.trim = getattr(model, "trim", lambda state: state)

    def __call__(self, tokens: Tensor, state: object = None, *, collect_stats: bool = False):
        scoring, alone = not torch.is_grad_enabled(), len(tokens) == 1
        if scoring and alone:  # a size of one would be a graph of its own
            tokens, state = tokens.expand(2, -1).contiguous(), tree_map_only(Tensor, lambda s: torch.cat([s, s]), state)
        out = self._called(tokens, state, scoring=scoring, collect_stats=collect_stats)
        state = tree_map_only(Tensor, _alone, self.trim(out.state))
        if not (scoring and alone):
            return out._replace(state=state)
        stats = {name: {key: x / 2 for key, x in own.items()} for name, own in out.stats.items()}
        return out._replace(logits=out.logits[:1], state=tree_map_only(Tensor, lambda s: s[:1], state), stats=stats)

    def _called(self, tokens: Tensor, state: object, *, scoring: bool, collect_stats: bool):
        from torch._dynamo import config, exc, maybe_mark_dynamic  # late: slow to import

        if self.whole:
            for x in tree_leaves((tokens, state)) if scoring else ():
                if isinstance(x, Tensor):
                    maybe_mark_dynamic(x, list(range(x.dim())))
            try:
                with config.patch(recompile_limit=MOST_GRAPHS, fail_on_recompile_limit_hit=True):
                    return self.graphs(tokens, state, collect_stats=collect_stats or scoring)
            except exc.FailOnRecompileLimitHit:
                self.whole = False
                print(f"runtime.compile: more than {MOST_GRAPHS} graphs would be needed; the run goes on uncompiled")
        return self.model(tokens, state, collect_stats=collect_stats)


def _alone(x: Tensor) -> Tensor:
    """``x``, contiguous and no view of another tensor."""
    return x.clone(memory_format=torch.contiguous_format) if x._is_view() or not x.is_contiguous() else x
