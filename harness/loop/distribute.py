"""Distribution of a model over the processes of a run, so that all of them make equal steps."""

from torch import nn

from harness.device.processes import ProcessGroup
from harness.model import LanguageModel
from harness.optim.optimizers import Optimizers


def distribute(
    model: LanguageModel, optimizers: Optimizers, processes: ProcessGroup, *, shard: str
) -> None:
    """Give the main process's weights to all processes, and each process its share of the work on
    parameters. ``shard`` is ``runtime.shard``."""
    if processes.world_size == 1:
        return
    from harness.device.distributed_parameters import DistributedParameters  # late: slow to import

    processes.broadcast_from_main_(model)
    optimizers.distributed = DistributedParameters(
        model, processes, model.residuals(), ignored=unsharded_parameters(model), shard=shard
    )


def unsharded_parameters(model: LanguageModel) -> set[nn.Parameter]:
    """Return the parameters that FSDP does not take: all but contiguous ones of two or more
    dimensions that belong to one unit (a residual sublayer, or the rest of the model). Tables are
    not taken either, because FSDP would gather them whole in each step and refuses sparse
    gradients."""
    units_of: dict[nn.Parameter, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        unit = []
        if name.startswith("layers."):
            unit = name.split(".")[:3]
        units_of.setdefault(parameter, set()).add(".".join(unit))
    tables = {
        getattr(sublayer, name) for _, sublayer in model.sublayers() for name in sublayer.tables
    }
    small = {p for p in units_of if p.ndim < 2 or not p.is_contiguous()}
    return tables | small | {p for p, units in units_of.items() if len(units) > 1}
