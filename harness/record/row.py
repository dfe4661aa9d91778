"""What was measured: each row that ``train.py``, ``bench.cost`` and ``bench.peers`` write.

A field with the default ``ABSENT`` may be absent, or null where nothing was measured. Rows that are
read may have further keys. ``schema.violation`` checks them. Of several processes, bytes, FLOPs and
scores are those of all together, and the rest is that of the main one."""

from dataclasses import dataclass
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


def declared(cls: type) -> type:
    """Make a dataclass. A field whose default is ``ABSENT`` may also be null."""
    for name, annotation in cls.__annotations__.items():
        if hasattr(cls, name):
            cls.__annotations__[name] = annotation | None
    cls.__pydantic_config__ = {"strict": True, "allow_inf_nan": False}
    return dataclass(frozen=True, kw_only=True)(cls)


def optional(cls: type) -> type:
    """Make a dataclass of which each field that the class declares may be absent."""
    for name in cls.__annotations__:
        setattr(cls, name, ABSENT)
    return declared(cls)


@declared
class Data:
    """The corpus."""

    name: Name
    bytes: Count  # number of bytes of all splits
    sha256: str  # of these bytes
    fallback_for: Name = ABSENT  # the corpus that could not be loaded


@declared
class Protocol:
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
    objective: Name = ABSENT  # if not causal_lm
    direction: Name = ABSENT  # if not causal_lm: causal or both
    rate: Count = ABSENT  # share of bytes that masked_lm selects


@declared
class Parameters:
    """Numbers of parameters."""

    total: Count
    touched: Count = ABSENT  # read for one byte
    by_sublayer: Counts = ABSENT  # and of embedding, head and norms


@declared
class Optimizer:
    """The optimizer of a group of parameters."""

    name: Name  # of the group
    optimizer: Name
    lr: Count = ABSENT  # the peak learning rate
    parameters: Count = ABSENT  # number of parameters
    share: Count  # of all parameters
    products: list[Name] = ABSENT  # dtypes of Muon's products


@declared
class Pretrained:
    """The training before a run that began with the weights of another one."""

    variant: Name
    data: Data
    bytes_seen: Count  # in training


@declared
class Spans:
    """Learned spans of all heads, in keys."""

    mean: Count
    min: Count
    max: Count


@optional
class Memory:
    """Bytes of memory. Peaks are the highest of all processes."""

    peak_bytes: Count  # of training
    train_peak_bytes: Count  # of a training step
    peak_reserved_bytes: Count  # of a GPU's allocator
    approximate: bool  # whether peaks are of the process instead of the allocator
    parameter_bytes: Count
    gradient_bytes: Count
    optimizer_bytes: Count  # moments and sums
    state_bytes: Count  # of one stream's full state
    inference_peak_bytes: Count  # of scoring


@optional
class ForwardFlops:
    """FLOPs per byte of a forward pass, of a stream with a full state."""

    executed: Count
    ideal: Count  # what the mechanism needs
    unknown: Counts  # calls of operations that are not counted
    warm: bool  # whether the state was full


@optional
class Flops:
    """FLOPs of ``bench.cost``."""

    executed_per_byte: Count  # of a forward pass with a full state
    ideal_per_byte: Count  # of these, what the mechanism needs
    training_per_byte: Count  # that a training step needs
    flops_estimated_3x: list[str]  # sublayers whose backward pass is estimated
    step: Count  # executed in a training step, without the optimizer's
    unknown: Counts


@declared
class Times:
    """Percentiles of ``n`` calls, in milliseconds; with few calls only the median."""

    p20: Count = ABSENT
    p50: Count
    p80: Count = ABSENT
    n: Count


@optional
class CostTimes:
    """Times of one length."""

    train_ms: Times  # of a training step
    evaluate_ms: Times  # of a forward pass of the same bytes
    generate_ms: Times  # of the next byte of one stream
    generate_64_ms: Times  # of the next byte of each of 64 streams


@declared
class Labelled:
    kind: str  # provenance, train, valid, test, cost or peers


@declared
class Measured(Labelled):
    """What was measured without a run."""

    config: dict  # the resolved configuration
    streams: Count  # of a training step
    segment: Count  # bytes of a stream in one forward pass
    status: Literal["measured", "out of memory", "failed"]
    reason: str = ABSENT  # the message of the error


@declared
class Origin:
    """What a reproduction needs, and what decides which rows may be compared."""

    format: Count = ABSENT  # rows.FORMAT
    variant: Name
    seed: Count
    command: str  # as typed
    config_hash: str  # SHA-256 of the configuration without keys that change no number
    source: str  # digest of the code that the run imports
    tree: str = ABSENT  # digest of all code
    commit: str = ABSENT  # of git, with -dirty for an edited tree
    data: Data
    protocol: Protocol
    numerics: Scores = ABSENT  # versions that golden files pin: of the variant, and shared
    recomputation: Name = ABSENT  # of activations in the backward pass
    device: Name  # as torch or the system names it
    device_kind: Name  # cpu or cuda
    threads: Count  # of torch in one process
    precision: Name  # float32 or bfloat16
    compile: bool  # by torch.compile
    tf32: bool = ABSENT  # in matrix products of float32
    processes: Count = ABSENT  # number of processes
    versions: dict[str, str]  # of Python and libraries
    machine: dict[str, Name | Count] = ABSENT  # name of its cpu, and number of its cores
    instruction_set: Name = ABSENT  # that torch uses on the CPU
    environment: dict[str, str] = ABSENT  # variables on which speed depends
    allocator: Name = ABSENT  # of the CPU's memory


@declared
class RunOrigin(Origin):
    """The same of a run."""

    purpose: Literal["result", "tune"] = ABSENT
    budget: Scores  # by unit: bytes, steps, seconds or FLOPs
    parameters: Parameters = ABSENT
    optimizers: list[Optimizer] = ABSENT
    backend: Name  # the code that computes attention in training
    evaluation_backend: Name = ABSENT  # in scoring
    pretrained: Pretrained = ABSENT
    backend_choice: dict = ABSENT  # the selected backend, and the errors of its candidates
    check: str = ABSENT  # of the contract: shipped, passed, unchecked, not causal or misread


@optional
class Costs:
    """What training cost."""

    bytes_seen: Count
    epochs: Count  # bytes_seen divided by the bytes of train
    steps: Count
    seconds: Count  # without those of compiling and scoring
    bytes_per_second: Count
    compile_seconds: Count
    training_flops: Count  # that all steps need
    flops_per_byte: ForwardFlops
    ideal_excuses: list[str]  # why ideal FLOPs are above the executed ones
    flops_estimated_3x: list[str]  # sublayers whose backward pass is estimated
    memory: Memory


@declared
class Progress(Labelled):
    """Training so far."""

    bytes_seen: Count
    step: Count = ABSENT  # number of steps
    epochs: Count = ABSENT
    fraction: Count = ABSENT  # of the budget; absent if that is in seconds
    training_flops: Count = ABSENT
    clock: Counts = ABSENT  # seconds without compiling, bytes_per_second, compile_seconds


@declared
class Provenance(RunOrigin, Labelled):
    """The first row of a record."""

    config: dict


@optional
class Train(Progress):
    """The steps since the last such row."""

    bits_per_byte: Count  # mean of the steps; per masked byte or label with another objective
    learning_rate: Count  # of the last step
    ideal_flops_per_byte: Count  # of a forward pass with the present spans
    metrics: Metrics  # of parameters, such as learned spans


@optional
class Score(Progress):
    """The score of a sample of valid, which selects the weights."""

    bits_per_byte: Count  # per masked byte of masked_lm, per label of classify
    capped_bytes: Count  # number of scored bytes, or labels
    metrics: Metrics
    bits_per_copy: Scores  # bits of an answer, by its label
    # share of answers that are the likeliest byte; of classify, of labels, by whom (95% interval)
    answer_accuracy: Scores


@optional
class Final(Progress):
    """The score of a split at the end, with the selected weights."""

    bytes_seen: Count
    final: bool
    bits_per_byte: Count  # per masked byte of masked_lm, per label of classify
    windows_bits_per_byte: Count  # in windows of 1024 bytes, without carried state
    bits_per_copy: Scores
    answer_accuracy: Scores
    bits_per_repeat: Scores  # of bytes that repeat earlier ones, by distance
    floor_bits_per_byte: Count  # the lowest expected score on generated data
    capped_bytes: Count  # number of scored bytes, if not all
    check: str  # not causal or misread, or that of the run
    protocol: Protocol
    future_cuts: Count  # positions after which bytes were replaced
    future_changed: Count  # predictions before these that changed
    future_nats: Count  # by so much at most
    future_missed_share: Count  # places that see later bytes and may have been missed
    hidden_changed: Count  # predictions changed by bytes which they must not see
    visible_changed: Count  # predictions changed by bytes which they must see
    metrics: Metrics


@optional
class Scored:
    """The scores of each ``Final``, and other results."""

    best_bytes_seen: Count  # at the selected weights
    spans: Spans  # of the selected weights
    compressors: dict[str, Scores]  # bits per byte by split and compressor, or per masked byte
    capped: Counts  # number of scored bytes by split, if not all
    test_bits_per_byte: Count
    valid_bits_per_byte: Count
    valid_windows_bits_per_byte: Count
    valid_bits_per_copy: Scores
    valid_answer_accuracy: Scores
    valid_bits_per_repeat: Scores
    valid_floor_bits_per_byte: Count
    valid_metrics: Metrics
    test_windows_bits_per_byte: Count
    test_bits_per_copy: Scores
    test_answer_accuracy: Scores
    test_bits_per_repeat: Scores
    test_floor_bits_per_byte: Count
    test_metrics: Metrics


@declared
class Summary(Scored, Costs, RunOrigin):
    """A finished run."""

    status: str  # finished


@declared
class Failed:
    """A run that ended with an error. It may lack all other keys of a summary."""

    status: Literal[FAILED]
    error: str = ABSENT  # its class and message


@declared
class Built:
    """The model of a row of ``bench.cost``."""

    backend: Name
    evaluation_backend: Name = ABSENT
    backend_choice: dict = ABSENT
    parameters: Parameters = ABSENT
    spans: Spans = ABSENT
    spans_from: str = ABSENT  # learned, those of a trained run, or initial
    flops: Flops = ABSENT


@declared
class Cost(Origin, Measured, Built):
    """What a mechanism costs at one length; null for what was not measured."""

    memory: Memory = ABSENT
    mode: Literal["cold", "stream"]
    length: Count  # bytes of a stream
    span: Count  # of the model, in keys
    memory_limit_gib: Count = ABSENT
    interleaved: bool = ABSENT  # whether it was timed in turn with others
    time: CostTimes = ABSENT
    utilisation: Counts = ABSENT
    """Of the training step: needed FLOPs per second (flops_per_s), the device's dense peak
    (peak_flops_per_s), and their ratio (share)."""


@declared
class Peer:
    """The model of a row of ``bench.peers``."""

    name: Name  # of the variant or the peer
    job: Name  # only rows of one job are compared
    relative_to: str = ABSENT  # the name of the reference
    rounds: Count = ABSENT  # in which all entries were timed in turn
    backend: Name
    parameters: Parameters = ABSENT


@optional
class Peers(Origin, Measured, Peer):
    """The speed of a model beside that of the reference."""

    package: Name  # as pip names it
    package_version: Name
    memory: Memory
    time: dict[str, Times | None]  # of a training step (train_ms)
    bytes_per_second: Count  # of training
    relative_to_reference: Count  # median over rounds of the ratio of speeds
    relative_range: list[Count]  # lowest and highest of these ratios
