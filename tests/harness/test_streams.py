"""The order of training bytes, which a seed determines, and the division of a split for scoring."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.data.streams import (
    Streams,
    round_context,
    sample_layout,
    samples,
    score_ranges,
    segments,
    windows,
)


@given(
    n_bytes=st.integers(20, 500),
    streams=st.integers(1, 6),
    segment=st.integers(1, 12),
    seed=st.integers(0, 9),
    carry=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_targets_are_the_next_bytes_of_the_split_read_as_a_ring(
    n_bytes, streams, segment, seed, carry
):
    split = torch.randint(
        256, (n_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    if n_bytes // streams <= segment:
        return
    stream = Streams(split, streams=streams, segment=segment, seed=seed, carry=carry)
    ring = split.tolist() * 2
    pieces = {tuple(ring[at : at + segment + 1]) for at in range(n_bytes)}
    before = None
    for position in range(2 * stream.steps_per_epoch + 1):
        inputs, targets = stream.batch(position)
        assert inputs.shape == targets.shape == (streams, segment)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        for row, last in zip(inputs.tolist(), targets[:, -1].tolist(), strict=True):
            assert (*row, last) in pieces
        if stream.carried_bytes(position):
            assert torch.equal(inputs[:, 0], before[:, -1])
        before = targets


def test_an_epoch_reads_every_byte_at_most_once_and_several_epochs_read_all_bytes():
    stream = Streams(torch.arange(240, dtype=torch.uint8), streams=4, segment=6, seed=5)
    assert (stream.steps_per_epoch, stream.size(0)[1]) == (10, 24)
    epochs = [
        torch.cat([stream.batch(epoch * 10 + step)[0] for step in range(10)], dim=1)
        for epoch in range(2)
    ]
    for epoch in epochs:
        assert sorted(epoch.flatten().tolist()) == list(range(240))
    assert not torch.equal(epochs[0], epochs[1])
    assert epochs[0][:, 0].sort().values.diff().tolist() == [60, 60, 60]
    # 101 bytes have 3 segments
    stream = Streams(torch.arange(203, dtype=torch.uint8), streams=2, segment=30, seed=0)
    read = {
        byte for position in range(3 * 30) for byte in stream.batch(position)[0].flatten().tolist()
    }
    assert read == set(range(203)) and [p for p in range(9) if not stream.carried_bytes(p)] == [
        0,
        3,
        6,
    ]
    windowed = Streams(
        torch.arange(12, dtype=torch.uint8), streams=8, segment=4, seed=0, carry=False
    )
    begins = {row[0] for position in range(60) for row in windowed.batch(position)[0].tolist()}
    assert begins == set(range(8)), "windows must reach both ends"
    assert not any(windowed.carried_bytes(p) for p in range(9))


def test_the_order_is_pinned_and_does_not_depend_on_earlier_batches():
    split = (torch.arange(100_000) // 400).to(torch.uint8)
    for carry, first in ((True, [197, 9, 72, 134]), (False, [11, 239, 67, 69])):
        stream = Streams(split, streams=4, segment=8, seed=1, carry=carry)
        stream.batch(50)
        torch.manual_seed(99)
        assert stream.batch(9)[0][:, 0].tolist() == first
        reseeded = Streams(split, streams=4, segment=8, seed=2, carry=carry)
        assert not torch.equal(stream.batch(9)[0], reseeded.batch(9)[0])


@given(
    n_bytes=st.integers(13, 120),
    streams=st.integers(1, 6),
    segment=st.integers(1, 12),
    seed=st.integers(0, 9),
    n_shards=st.integers(1, 3),
)
@settings(max_examples=25, deadline=None)
def test_a_permutation_reads_no_window_twice_before_all_once_also_in_shards(
    n_bytes, streams, segment, seed, n_shards
):
    order = {"seed": seed, "carry": False, "order": "permutation"}
    split = torch.arange(n_bytes, dtype=torch.uint8)  # each byte is its position
    stream = Streams(split, streams=streams, segment=segment, **order)
    n_windows, read, epochs = n_bytes // segment, [], 3
    for step in range(epochs * n_windows // streams + 1):
        shards = [stream.batch(step, shard=(rank, n_shards)) for rank in range(n_shards)]
        inputs, targets = (torch.cat(parts) for parts in zip(*shards, strict=True))
        assert inputs.shape == (streams, segment)
        assert torch.equal(targets, (inputs + 1) % n_bytes)
        read += inputs.tolist()
    for epoch in range(epochs):
        windows_read = read[epoch * n_windows : (epoch + 1) * n_windows]
        positions = [position for window in windows_read for position in window]
        assert len(set(positions)) == n_windows * segment, "an epoch reads each byte at most once"
    # the sequence does not depend on streams
    resumed = Streams(split, streams=1, segment=segment, **order)
    assert resumed.batch(len(read) - 1)[0].tolist() == read[-1:]


def test_a_permutation_depends_on_seed_and_epoch():
    split, sizes = torch.arange(240, dtype=torch.uint8), {"streams": 60, "segment": 4}
    order = {"carry": False, "order": "permutation"}
    streams = [Streams(split, seed=seed, **sizes, **order) for seed in (0, 1)]
    first, second, reseeded = (
        streams[n].batch(step)[0][:, 0] for n, step in ((0, 0), (0, 1), (1, 0))
    )
    # no offset changes these
    steps = [tuple((begins.diff() % 240).tolist()) for begins in (first, second, reseeded)]
    assert len(set(steps)) == 3
    assert first[:8].tolist() == [154, 186, 198, 30, 38, 218, 214, 178]


def test_a_split_that_is_too_short_for_its_streams_is_refused():
    for n_bytes, carry in ((31, True), (7, False)):
        with pytest.raises(ValueError, match=r"batch\.(streams|segment)=\d"):
            Streams(torch.arange(n_bytes), streams=4, segment=7, seed=0, carry=carry)
        assert Streams(torch.arange(n_bytes + 1), streams=4, segment=7, seed=0, carry=carry).batch(
            0
        )[0].shape == (4, 7)


@given(
    n_pairs=st.integers(1, 3000),
    streams=st.integers(1, 40),
    segment=st.integers(1, 9),
    wanted=st.integers(0, 5000),
)
def test_scored_streams_read_equally_many_bytes_and_score_each_pair_once(
    n_pairs, streams, segment, wanted
):
    if streams > n_pairs:
        with pytest.raises(
            ValueError, match=rf"eval\.streams={streams}: allowed is 1 to {n_pairs}"
        ):
            score_ranges(n_pairs, streams)
        return
    context = round_context(wanted, n_pairs=n_pairs, streams=streams, segment=segment)
    assert context % segment == 0 and context <= n_pairs // streams
    assert context >= min(wanted, n_pairs // streams - segment + 1)
    ranges = score_ranges(n_pairs, streams, context=context)
    assert all(end > begin for begin, end in ranges)
    sizes = [end - begin + context * (begin > 0) for begin, end in ranges]
    assert sum(sizes) <= 2 * n_pairs
    assert [pair for begin, end in ranges for pair in range(begin, end)] == list(range(n_pairs))
    assert len(ranges) == streams
    assert max(sizes) - min(sizes) <= 1


@given(
    n_bytes=st.integers(2, 400),
    streams=st.integers(1, 9),
    segment=st.integers(1, 50),
    wanted=st.sampled_from([0, 30, 999]),
)
@settings(max_examples=40, deadline=None)
def test_segments_score_each_pair_once_in_order_after_its_context(
    n_bytes, streams, segment, wanted
):
    if streams > n_bytes - 1:
        return
    context = round_context(wanted, n_pairs=n_bytes - 1, streams=streams, segment=segment)
    split = torch.randint(
        256, (n_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n_bytes)
    )
    rows, all_inputs = [([], []) for _ in range(streams)], [[] for _ in range(streams)]
    for inputs, targets, mask in segments(split, streams=streams, segment=segment, context=context):
        assert (
            inputs.shape == targets.shape == mask.shape
            and len(mask) == streams
            and mask.shape[1] <= segment
        )
        assert (inputs.dtype, targets.dtype, mask.dtype) == (torch.int64, torch.int64, torch.bool)
        assert mask.any()
        for stream, (read, predicted) in enumerate(rows):
            all_inputs[stream] += zip(inputs[stream].tolist(), mask[stream].tolist(), strict=True)
            read += inputs[stream][mask[stream]].tolist()
            predicted += targets[stream][mask[stream]].tolist()
    tokens = split.tolist()
    ranges = score_ranges(n_bytes - 1, streams, context=context)
    for (read, predicted), stream_inputs, (begin, end) in zip(
        rows, all_inputs, ranges, strict=True
    ):
        assert read == tokens[begin:end]
        assert predicted == tokens[begin + 1 : end + 1]
        before = context if begin else 0
        fed, masks = zip(*stream_inputs, strict=True)
        assert list(fed[: before + len(read)]) == tokens[begin - before : end]
        assert list(masks[: before + len(read)]) == [False] * before + [True] * len(read)
        assert not any(masks[before + len(read) :]), "the padding must come last"


@given(
    n_bytes=st.integers(2, 400),
    pairs=st.integers(1, 500),
    streams=st.integers(1, 9),
    segment=st.integers(1, 50),
    context=st.integers(0, 90),
)
@settings(max_examples=40, deadline=None)
def test_samples_are_spread_evenly_over_the_split(n_bytes, pairs, streams, segment, context):
    # each byte is its position
    split, length = torch.arange(n_bytes), min(pairs, n_bytes - 1) // streams
    rows = list(samples(split, pairs=pairs, streams=streams, segment=segment, context=context))
    if not length:
        return
    inputs, targets, mask = (torch.cat(parts, dim=1) for parts in zip(*rows, strict=True))
    assert inputs.shape == (streams, length) and all(row[2].shape[1] <= segment for row in rows)
    assert not mask[:, :context].any() and mask[:, context:].all()
    assert torch.equal(targets, inputs + 1) and torch.equal(
        inputs.diff(dim=1), torch.ones(streams, length - 1)
    )
    assert inputs[0, 0] == 0
    if streams > 1:
        gaps = inputs[:, 0].diff()
        assert (
            targets[-1, -1] == n_bytes - 1 and gaps.min() >= length and gaps.max() - gaps.min() <= 1
        )


@given(
    pairs=st.integers(1, 5000),
    streams=st.integers(1, 9),
    segment=st.integers(1, 50),
    context=st.integers(1, 400),
)
def test_a_sample_is_scored_after_whole_segments_of_context(pairs, streams, segment, context):
    used_streams, before = sample_layout(pairs, streams=streams, segment=segment, context=context)
    length = pairs // used_streams
    assert 1 <= used_streams <= streams and before % segment == 0 and 2 * before <= length
    assert before - context < segment
    # the context takes at most half of a sample that is too short for all of it
    if before < context:
        assert length < 2 * (context + segment) and (used_streams == 1 or pairs < 2 * segment)
    if not before:
        assert used_streams == min(streams, pairs)


@given(
    n_bytes=st.integers(2, 250),
    window=st.integers(1, 40),
    stride=st.integers(1, 40),
    batch=st.integers(1, 5),
)
@settings(max_examples=40, deadline=None)
def test_windows_score_each_pair_once_with_enough_context(n_bytes, window, stride, batch):
    split = torch.arange(n_bytes, dtype=torch.uint8)  # each byte is its position
    stride = min(stride, window)
    scored = []
    for inputs, targets, mask in windows(split, window=window, stride=stride, batch=batch):
        assert inputs.shape == targets.shape == mask.shape
        assert inputs.shape[1] == window
        assert torch.equal(targets[mask], inputs[mask] + 1)
        for row, marked in zip(inputs, mask, strict=True):
            for column in marked.nonzero().flatten().tolist():
                position = int(row[column])
                assert row[: column + 1].tolist() == list(range(position - column, position + 1))
                # all existing context, or enough of it
                assert column == position or column >= window - stride
                scored.append(position)
    assert scored == list(range(n_bytes - 1))
