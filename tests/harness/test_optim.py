"""The optimizers of a run: parameter groups, clipping and learning rates."""

from functools import partial

import pytest
import torch
from torch import nn

from harness.optim import ClippedAdagrad, Muon
from harness.optim.budget import Schedule
from harness.optim.optimizers import Optimizers
from harness.optim.parameter_groups import assign

pytestmark = pytest.mark.numeric

ADAMW = partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.1)
MUON = partial(Muon, momentum=0.95, weight_decay=0.01)
MATRICES = {"optimizer": MUON, "lr_scale": 5.0}


class Toy(nn.Module):
    """A model with every type of parameter that the rules distinguish. Its two layers share a
    table of values."""

    def __init__(self, *, sparse: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 8)
        table = nn.EmbeddingBag(12, 8, mode="sum", sparse=sparse)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"mix": nn.Linear(8, 8), "norm": nn.LayerNorm(8), "memory": table})
            for _ in range(2)
        )
        self.span = nn.Parameter(torch.rand(2, 1, 1))
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer, span in zip(self.layers, self.span, strict=True):
            x = x + span * layer["mix"](layer["norm"](x)) + layer["memory"](tokens[:, None] % 12)
        return self.head(x)


def train(model, optimizers, *, first, last):
    for step in range(first, last):
        tokens = torch.randint(16, (32,), generator=torch.Generator().manual_seed(step))
        optimizers.zero_grad()
        nn.functional.cross_entropy(model(tokens), (tokens * 3 + 1) % 16).backward()
        optimizers.step((step + 0.5) / 10)


def names(groups):
    return {group.name: sorted(group.parameters) for group in groups}


def test_parameters_without_a_group_are_assigned_by_rules():
    groups = assign(Toy(), default=ADAMW, matrices=MATRICES)
    layers = [
        f"layers.{i}.{name}" for i in (0, 1) for name in ("mix.bias", "norm.bias", "norm.weight")
    ]
    assert names(groups) == {
        "default": sorted(
            ["embedding.weight", "head.weight", "layers.0.memory.weight", *layers, "span"]
        ),
        "matrices": ["layers.0.mix.weight", "layers.1.mix.weight"],
    }
    assert (
        set(groups[0].parameters) - groups[0].undecayed == {"head.weight"}
        and not groups[1].undecayed
    )
    assert [part["weight_decay"] for part in groups[0].build(lr=1.0).param_groups] == [0.1, 0.0]
    (group,) = assign(Toy(), default=ADAMW)
    assert set(group.parameters) - group.undecayed == {
        "head.weight",
        "layers.0.mix.weight",
        "layers.1.mix.weight",
    }
    frozen = Toy()
    frozen.span.requires_grad_(False)
    assert "span" not in names(assign(frozen, default=ADAMW))["default"]
    with pytest.raises(ValueError, match="no trainable parameter"):
        assign(frozen, default=ADAMW, groups={"spans": {"match": "span"}})


def test_tables_of_vectors_have_no_weight_decay_unless_their_group_sets_it():
    model = Toy()
    model.layers[0].register_parameter("table", nn.Parameter(torch.ones(4, 8)))
    (default,) = assign(model, default=ADAMW)
    assert "layers.0.table" in default.undecayed
    node = {"mine": {"match": ["*.table", "*.norm.weight"], "weight_decay": 0.3}}
    mine = assign(model, default=ADAMW, groups=node)[1]
    assert [part["weight_decay"] for part in mine.build(lr=1.0).param_groups] == [0.3]
    model.layers[1]["mix"].weight = model.embedding.weight  # tied: an embedding
    default, matrices = assign(model, default=ADAMW, matrices=MATRICES)
    assert "embedding.weight" in default.undecayed and sorted(matrices.parameters) == [
        "layers.0.mix.weight"
    ]


def test_a_pattern_matches_a_shared_parameter_by_any_of_its_names():
    spans = {"match": ["span", "*.norm.weight"], "optimizer": partial(ClippedAdagrad, clip=1.0)}
    nodes = {
        "values": {"match": "layers.1.memory.weight", "lr_scale": 0.5, "weight_decay": 0.0},
        "spans": spans,
    }
    groups = assign(Toy(), default=ADAMW, groups=nodes)
    assert names(groups)["values"] == ["layers.0.memory.weight"]
    assert names(groups)["spans"] == ["layers.0.norm.weight", "layers.1.norm.weight", "span"]
    parameters = [p for group in groups for p in group.parameters.values()]
    assert len(parameters) == len({id(p) for p in parameters}) == len(list(Toy().parameters()))


IMPOSSIBLE = {
    r"variant\.groups\.spans\.match='\*\.spam'.*layers\.\*\.mix\.weight": {
        "spans": {"match": ["span", "*.spam"]}
    },
    r"groups\.one and variant\.groups\.two both match layers\.0\.memory\.weight = "
    r"layers\.1\.memory\.weight": {
        "one": {"match": "layers.0.memory.*"},
        "two": {"match": "layers.1.memory.*"},
    },
    "reserved for a group of the run": {"matrices": {"match": "span"}},
    r"variant\.groups\.spans\.weight_decay=0\.1: ClippedAdagrad has no": {
        "spans": {"match": "span", "optimizer": ClippedAdagrad, "weight_decay": 0.1}
    },
    r"variant\.groups\.values: .*lr_scale = 0": {
        "values": {"match": "*.memory.weight", "optimizer": torch.optim.SparseAdam, "lr_scale": 0.0}
    },
}


@pytest.mark.parametrize("message", IMPOSSIBLE)
def test_invalid_groups_are_refused_by_key(message):
    with pytest.raises(ValueError, match=message):
        Optimizers(
            assign(Toy(), default=ADAMW, groups=IMPOSSIBLE[message]), lr=1, schedule=Schedule()
        )


def sgd_step(*, clip, groups=None, sparse=False, fraction=0.0, schedule=None, scale=1.0):
    """Take an SGD step with learning rate 1 and gradients full of ``scale``. Returns the
    decrease of each parameter."""
    model = Toy(sparse=sparse).double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assigned = assign(model, default=torch.optim.SGD, groups=groups)
    optimizers = Optimizers(assigned, lr=1.0, schedule=schedule or Schedule(), clip=clip)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, scale)
    if sparse:
        values = torch.full((2, 8), scale, dtype=torch.float64)
        rows = torch.tensor([[3, 3]])  # the same row twice
        gradient = torch.sparse_coo_tensor(rows, values, (12, 8), check_invariants=True)
        model.layers[0]["memory"].weight.grad = gradient
    optimizers.step(fraction)
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}


def joint_norm(moves):
    return torch.cat([move.flatten() for move in moves]).norm().item()


def test_the_clip_of_the_run_scales_all_groups_by_one_factor_except_those_that_set_a_clip():
    moves = sgd_step(
        clip=0.5, groups={"spans": {"match": "span", "clip": 0.25}, "heads": {"match": "head.*"}}
    )
    assert joint_norm([moves.pop("span")]) == pytest.approx(0.25)
    assert joint_norm(moves.values()) == pytest.approx(0.5)
    assert len({round(move.max().item(), 6) for move in moves.values()}) == 1, (
        "all groups must have one factor"
    )
    moves = sgd_step(clip=1e3, scale=0.125)
    assert all(torch.allclose(move, torch.full_like(move, 0.125)) for move in moves.values())


def test_sparse_gradients_are_clipped_separately_and_coalesced():
    moves = sgd_step(clip=0.5, sparse=True)
    table = moves.pop("layers.0.memory.weight")
    assert torch.count_nonzero(table) == 8
    assert joint_norm([table]) == pytest.approx(0.5)
    assert joint_norm(moves.values()) == pytest.approx(0.5)


def test_learning_rates_are_the_base_times_scale_times_schedule():
    groups = {
        "spans": {"match": "span", "lr_scale": 4.0},
        "heads": {"match": "head.*", "schedule": "constant"},
    }
    moves = sgd_step(clip=None, groups=groups, fraction=0.75, schedule=Schedule(decay="linear"))
    for name, rate in {"span": 1.0, "head.weight": 1.0, "embedding.weight": 0.25}.items():
        assert torch.allclose(moves[name], torch.full_like(moves[name], rate)), name


@pytest.mark.parametrize(
    "sparse, optimizer, message",
    [
        (
            True,
            ADAMW,
            r"variant\.groups\.values\.optimizer=AdamW.*layers\.0\.memory\.weight is "
            r"sparse.*SparseAdam",
        ),
        (False, torch.optim.SparseAdam, r"variant\.groups\.values\.optimizer=SparseAdam.*is dense"),
    ],
)
def test_an_optimizer_that_does_not_support_the_layout_of_a_gradient_is_refused(
    sparse, optimizer, message
):
    model, groups = (
        Toy(sparse=sparse),
        {"values": {"match": "*.memory.weight", "optimizer": optimizer}},
    )
    optimizers = Optimizers(
        assign(model, default=ADAMW, groups=groups), lr=0.01, schedule=Schedule()
    )
    with pytest.raises(ValueError, match=message):
        train(model, optimizers, first=0, last=1)
