"""What was measured: each row that ``train.py``, ``bench.cost`` and ``bench.peers`` write.

A field with the default ``ABSENT`` may be absent, or null where no number was measured. A row that
is read may have further keys, and keeps their order. The keys of a row are ``vars(row)``.
Bits per byte are cross-entropy; they and other scores are of all processes together."""

from dataclasses import dataclass, is_dataclass
from typing import Annotated, Literal

from annotated_types import Interval, MaxLen

from harness.failures import Failure

ABSENT = object()
MAX_NUMBER = 1e30  # no measured number is larger, and products of larger ones would overflow
FAILED = ("failed", *(failure.status for failure in Failure.__subclasses__()))
"""Values of ``status`` in the summary of a run that ended with an error."""

Number = Annotated[float, Interval(gt=-MAX_NUMBER, lt=MAX_NUMBER)]
Count = Annotated[float, Interval(ge=0, lt=MAX_NUMBER)]
Name = Annotated[str, MaxLen(300)]  # names are shown in figures and are parts of file names
Counts = dict[str, Count]
Scores = dict[str, Count | None]  # null for a label without bytes
Metrics = dict[str, Number | None | list[Number | None]]  # of a sublayer; a list is by head
Texts = dict[str, str]

declared = dataclass(frozen=True, kw_only=True)


@declared
class Row:
    """A row, or a part of one."""

    __pydantic_config__ = {"strict": True, "allow_inf_nan": False, "extra": "allow"}

    def __post_init__(self):
        for name in [name for name, entry in vars(self).items() if entry is ABSENT]:
            del vars(self)[name]

    @classmethod
    def __get_pydantic_core_schema__(cls, source, handler):
        from pydantic_core.core_schema import no_info_wrap_validator_function  # late: slow to import

        def read(node: object, validate):
            """Return a row of the keys of ``node``, of which those that are null are not validated."""
            if not isinstance(node, dict):
                return validate(node)
            row = validate({key: entry for key, entry in node.items() if entry is not None})
            parts = {key: entry for key, entry in vars(row).items() if is_dataclass(entry)}
            object.__setattr__(row, "__dict__", node | parts)
            return row

        schema = handler.resolve_ref_schema(handler(source))
        return no_info_wrap_validator_function(read, schema, ref=schema.pop("ref"))


# Parts of rows


@declared
class Data(Row):
    """The corpus."""

    name: Name
    bytes: Count  # of all splits
    sha256: str
    fallback_for: Name = ABSENT  # the corpus that could not be loaded


@declared
class Machine(Row):
    cpu: Name = ABSENT
    cores: Count = ABSENT


@declared
class Protocol(Row):
    """How the final scores are made, and the order of training bytes."""

    streams: Count  # that read a split side by side
    segment: Count  # bytes of a stream in one forward pass
    span: Count  # of the model, in keys
    bytes: Count = ABSENT  # most bytes of a split that are scored; null for all
    context: Count  # unscored bytes that each stream reads first
    selection_bytes: Count = ABSENT  # bytes of valid that select the weights
    vocabulary: Count  # number of token ids
    drop_newlines: bool
    split: list[Count] = ABSENT  # shares of train, valid and test
    order: Name = ABSENT  # of training bytes, if not random
    sequence: Count = ABSENT  # bytes of a sequence that is read without state from before it


@declared
class Numerics(Row):
    """Versions of the numbers that golden files pin."""

    variant: Count = ABSENT  # null for code that is not committed
    shared: Count


@declared
class Parameters(Row):
    """Numbers of parameters."""

    total: Count
    touched: Count = ABSENT  # read for one byte
    by_sublayer: Counts = ABSENT


@declared
class Optimizer(Row):
    """The optimizer of a group of parameters."""

    name: Name  # of the group
    optimizer: Name
    lr: Count = ABSENT  # the peak learning rate
    parameters: Count = ABSENT
    share: Count  # of all parameters
    products: list[Name] = ABSENT  # dtypes of Muon's products


@declared
class Pretrained(Row):
    """The training before a run that began with the weights of another one."""

    variant: Name
    data: Data
    bytes_seen: Count


@declared
class Clock(Row):
    seconds: Count = ABSENT  # of training, without compiling
    bytes_per_second: Count = ABSENT
    compile_seconds: Count = ABSENT


@declared
class Spans(Row):
    """Learned spans of all heads, in keys."""

    mean: Count
    min: Count
    max: Count


@declared
class Memory(Row):
    """Bytes of memory, of the main process; peaks are the highest of all processes."""

    peak_bytes: Count = ABSENT  # of training
    train_peak_bytes: Count = ABSENT  # of a training step
    peak_reserved_bytes: Count = ABSENT  # of a GPU's allocator
    approximate: bool = ABSENT  # whether peaks are of the process instead of the allocator
    parameter_bytes: Count = ABSENT
    touched_bytes: Count = ABSENT  # of parameters that are read for one byte
    gradient_bytes: Count = ABSENT
    optimizer_bytes: Count = ABSENT
    state_bytes: Count = ABSENT  # of one stream's full state
    inference_peak_bytes: Count = ABSENT  # of scoring


@declared
class ForwardFlops(Row):
    """FLOPs per byte of a forward pass, of a stream with a full state."""

    executed: Count = ABSENT
    ideal: Count = ABSENT  # what the mechanism needs
    unknown: Counts = ABSENT  # calls of operations that are not counted
    warm: bool = ABSENT  # whether the state was full


@declared
class Flops(Row):
    executed_per_byte: Count = ABSENT  # of a forward pass with a full state
    ideal_per_byte: Count = ABSENT
    training_per_byte: Count = ABSENT  # that the training step needs
    flops_estimated_3x: list[str] = ABSENT  # sublayers whose backward pass is estimated
    step: Count = ABSENT  # executed in a training step, without the optimizer's
    unknown: Counts = ABSENT


@declared
class Utilisation(Row):
    """Model FLOPs utilisation of a training step."""

    flops_per_s: Count  # needed FLOPs per second
    peak_flops_per_s: Count  # the device's, of dense matrix products
    share: Count


@declared
class Times(Row):
    """Percentiles of ``n`` calls, in milliseconds; with few calls only the median."""

    p20: Count = ABSENT
    p50: Count
    p80: Count = ABSENT
    n: Count


@declared
class Timed(Row):
    train_ms: Times = ABSENT  # a training step
    evaluate_ms: Times = ABSENT  # a forward pass of the same bytes
    generate_ms: Times = ABSENT  # a byte of one stream
    generate_64_ms: Times = ABSENT  # a byte of each of 64 streams
    first_steps_s: Count = ABSENT  # seconds of the first steps, which compile


# Beginnings of rows


@declared
class Labelled(Row):
    kind: str


@declared
class Configured(Labelled):
    config: dict  # the resolved configuration


@declared
class Origin(Row):
    """What a reproduction needs, and what decides which rows may be compared."""

    format: Count = ABSENT
    variant: Name
    seed: Count
    command: str  # as typed
    config_hash: str
    source: str  # digest of the code that the run imports
    tree: str = ABSENT  # digest of all code
    commit: str = ABSENT
    data: Data
    protocol: Protocol
    numerics: Numerics = ABSENT
    recomputation: Name = ABSENT
    device: Name
    device_kind: Name
    threads: Count
    precision: Name
    compile: bool
    tf32: bool = ABSENT
    processes: Count = ABSENT
    versions: Texts  # of Python and libraries
    machine: Machine = ABSENT
    instruction_set: Name = ABSENT
    environment: Texts = ABSENT  # variables on which speed depends
    allocator: Name = ABSENT  # of the CPU's memory


@declared
class RunOrigin(Origin):
    purpose: Literal["result", "tune"] = ABSENT
    budget: Scores  # by unit: bytes, steps, seconds or FLOPs
    parameters: Parameters = ABSENT
    optimizers: list[Optimizer] = ABSENT
    backend: Name  # the code that computes attention in training
    evaluation_backend: Name = ABSENT  # in scoring
    pretrained: Pretrained = ABSENT
    backend_choice: dict = ABSENT  # the selected backend, and the errors of its candidates
    check: str = ABSENT  # of the contract: shipped, passed, unchecked or not causal


@declared
class Costs(Row):
    """What training cost. Bytes and FLOPs are those of all processes."""

    bytes_seen: Count = ABSENT
    epochs: Count = ABSENT
    steps: Count = ABSENT
    seconds: Count = ABSENT
    bytes_per_second: Count = ABSENT
    compile_seconds: Count = ABSENT
    training_flops: Count = ABSENT  # that training needs
    flops_per_byte: ForwardFlops = ABSENT
    ideal_excuses: list[str] = ABSENT  # why ideal FLOPs are above the executed ones
    flops_estimated_3x: list[str] = ABSENT
    memory: Memory = ABSENT


@declared
class Progress(Labelled):
    """Training so far."""

    bytes_seen: Count
    step: Count = ABSENT
    epochs: Count = ABSENT
    fraction: Count = ABSENT  # of the budget; absent if that is in seconds
    training_flops: Count = ABSENT
    clock: Clock = ABSENT


# Rows of record.jsonl and summary.json


@declared
class Provenance(RunOrigin, Labelled):
    """The first row of a record."""

    config: dict


@declared
class Train(Progress):
    """Since the last such row."""

    bits_per_byte: Count = ABSENT  # mean of the steps
    learning_rate: Count = ABSENT  # of the last step
    ideal_flops_per_byte: Count = ABSENT
    metrics: Metrics = ABSENT


@declared
class Score(Progress):
    """The score of a sample of valid, which selects the weights."""

    bits_per_byte: Count = ABSENT
    capped_bytes: Count = ABSENT  # number of scored bytes
    metrics: Metrics = ABSENT
    bits_per_copy: Scores = ABSENT  # bits of an answer, by its label
    answer_accuracy: Scores = ABSENT  # share of answers that are the likeliest byte


@declared
class Final(Progress):
    """The score of a split at the end, with the selected weights."""

    bytes_seen: Count = ABSENT
    final: bool
    bits_per_byte: Count = ABSENT
    windows_bits_per_byte: Count = ABSENT  # in windows of 1024 bytes, without carried state
    bits_per_copy: Scores = ABSENT
    answer_accuracy: Scores = ABSENT
    bits_per_repeat: Scores = ABSENT  # of bytes that repeat earlier ones, by distance
    floor_bits_per_byte: Count = ABSENT  # the lowest expected score on generated data
    capped_bytes: Count = ABSENT  # number of scored bytes, if not all
    check: str = ABSENT
    protocol: Protocol = ABSENT
    future_cuts: Count = ABSENT  # positions after which bytes were replaced
    future_changed: Count = ABSENT  # predictions before these that changed
    future_nats: Count = ABSENT  # by so much at most
    future_missed_share: Count = ABSENT  # places that see later bytes and may have been missed
    metrics: Metrics = ABSENT


@declared
class Summary(Costs, RunOrigin):
    """A finished run: its provenance, its costs, and the scores of each ``Final``."""

    best_bytes_seen: Count = ABSENT  # at the selected weights
    spans: Spans = ABSENT
    compressors: dict[str, Scores] = ABSENT  # bits per byte by split and compressor
    capped: Counts = ABSENT  # number of scored bytes by split, if not all
    test_bits_per_byte: Count = ABSENT
    valid_bits_per_byte: Count = ABSENT
    valid_windows_bits_per_byte: Count = ABSENT
    valid_bits_per_copy: Scores = ABSENT
    valid_answer_accuracy: Scores = ABSENT
    valid_bits_per_repeat: Scores = ABSENT
    valid_floor_bits_per_byte: Count = ABSENT
    valid_metrics: Metrics = ABSENT
    test_windows_bits_per_byte: Count = ABSENT
    test_bits_per_copy: Scores = ABSENT
    test_answer_accuracy: Scores = ABSENT
    test_bits_per_repeat: Scores = ABSENT
    test_floor_bits_per_byte: Count = ABSENT
    test_metrics: Metrics = ABSENT
    status: str


@declared
class Failed(Row):
    """A run that ended with an error. It may lack all other keys of a summary."""

    status: Literal[FAILED]
    error: str = ABSENT


# Rows of bench


@declared
class Built(Row):
    """The model of a row of ``bench.cost``."""

    backend: Name
    evaluation_backend: Name = ABSENT
    backend_choice: dict = ABSENT
    parameters: Parameters = ABSENT
    spans: Spans = ABSENT
    spans_from: str = ABSENT  # learned, those of a trained run, or initial
    flops: Flops = ABSENT


@declared
class Cost(Origin, Configured, Built):
    """What a mechanism costs at one length; null for what was not measured."""

    memory: Memory = ABSENT
    mode: Literal["cold", "stream"]
    length: Count  # bytes of a stream
    segment: Count
    span: Count
    streams: Count
    memory_limit_gib: Count = ABSENT
    status: Literal["measured", "out of memory", "failed"]
    reason: str = ABSENT
    interleaved: bool = ABSENT  # whether it was timed in turn with others
    time: Timed = ABSENT
    utilisation: Utilisation = ABSENT


@declared
class Peer(Row):
    """The model of a row of ``bench.peers``."""

    name: Name
    job: Name
    streams: Count
    segment: Count
    relative_to: str = ABSENT  # the name of the reference
    status: Literal["measured", "out of memory", "failed"]
    reason: str = ABSENT
    rounds: Count = ABSENT
    backend: Name
    parameters: Parameters = ABSENT


@declared
class Peers(Origin, Configured, Peer):
    """The speed of a model beside that of the reference."""

    package: Name = ABSENT
    package_version: Name = ABSENT
    memory: Memory = ABSENT
    time: dict[str, Times] = ABSENT
    bytes_per_second: Count = ABSENT  # of training
    relative_to_reference: Count = ABSENT  # median over rounds of the ratio of speeds
    relative_range: list[Count] = ABSENT  # lowest and highest of these ratios
