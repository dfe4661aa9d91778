"""The columns of tables of runs: what each number is and how it came about."""

from bench.report.shown import Column

QUALITY = (
    Column(
        heading="variant", explained="What was trained, and in what it differs from others of its name.", number=False
    ),
    Column(heading="n", explained="Seeds that the means of this row are over."),
    Column(
        heading="valid, bits per byte", explained="Of the validation split, streamed with carried state; best weights."
    ),
    Column(
        heading="test, bits per byte", explained="Of the test split, scored once, at the end, with the same weights."
    ),
    Column(
        heading="valid, context 512",
        explained="Bits per byte of windows of 1024 bytes, stride 512, no state, the last 512 scored.",
    ),
    Column(heading="test, context 512", explained="The same of the test split."),
)
SIZES = (
    Column(heading="parameters", explained="All trained numbers."),
    Column(heading="touched", explained="Parameters that one byte makes use of."),
    Column(heading="optimizers", explained="The share of the parameters that each optimizer moves.", number=False),
    Column(
        heading="executed, MFLOP/byte",
        explained="FLOPs (2 a multiply-add, 10^6) that the forward ran for one byte, warm.",
    ),
    Column(
        heading="ideal, MFLOP/byte", explained="FLOPs that the mechanism needs for one byte at its learned parameters."
    ),
    Column(heading="mean span", explained="Mean of the learned spans of all heads, in positions."),
    Column(heading="trained on, bytes", explained="Bytes predicted in training."),
)
COSTS = (
    Column(heading="path", explained="Which code ran: plain PyTorch, fused, compiled, an own kernel.", number=False),
    Column(heading="training, s", explained="Seconds in training steps, scoring apart."),
    Column(heading="bytes/s", explained="Bytes predicted in training per second of it."),
    Column(heading="training peak, MiB", explained="Highest memory of training (MiB = 2^20 bytes); ~ is approximate."),
    Column(heading="inference peak, MiB", explained="Highest memory while scoring."),
    Column(heading="parameters, MiB", explained="Memory of the parameters."),
    Column(heading="gradients, MiB", explained="Memory of the gradients."),
    Column(heading="optimizer, MiB", explained="Memory of the optimizers' state."),
    Column(heading="carried state, MiB", explained="What one stream carries from segment to segment."),
)
SEEDS = (
    Column(heading="variant", number=False),
    Column(
        heading="seed",
        explained="Of initialisation, dropout and lane offsets; the bytes come in the same order to every variant.",
    ),
    *QUALITY[2:],
    Column(
        heading="best at, bytes",
        explained="Bytes seen by the weights that were scored, chosen on the validation split.",
    ),
    Column(heading="run", explained="The run folder.", number=False),
    Column(heading="configuration", explained="First digits of its hash.", number=False),
    Column(heading="source", explained="First digits of the digest of the code.", number=False),
)
