"""The mechanisms. They need only torch and einops, and can be used without the harness.

Dimensions, unless a file redefines a letter: B streams, T bytes in a segment, S positions that a
query may see, L keys, D width, H heads, K head width, N persistent vectors, C half-keys per set, M
memory slots (C x C), V byte values.

To add a mechanism, write one class and two small YAML files::

    class Gate(Sublayer):                                        # my_file.py
        def __init__(self, context: LayerContext, *, slope: float = 1.0):
            super().__init__()
            self.inner, self.slope = nn.Linear(context.d_model, context.d_model), slope

        def forward(self, x, state=None, start=None, *, collect_stats=False):
            return SublayerOutput(x * torch.sigmoid(self.slope * self.inner(x)))

    {_target_: my_file.Gate, _partial_: true, slope: 1.0}        # my_conf/sublayer/gate.yaml

    defaults: [/sublayer@attention: mhsa, /sublayer@gate: gate]  # my_conf/variant/mine.yaml
    name: mine
    layers: [attention, gate]
    at: {}
    groups: {}

A mechanism that sees past bytes also declares ``honours`` and ``reach()``, as in
``docs/adding_a_variant.md``. The contract is in ``contract.py``; ``python -m bench.check -cd
my_conf trust=[my_file] variant=mine`` checks a variant."""
