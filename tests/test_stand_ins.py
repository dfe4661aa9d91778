"""Stand-ins of a GPU's attention: tensors, FLOPs and scratch memory by closed forms, and every backend in a fake step."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from bench import stand_ins
from bench.fake_step import backends_on, build, predict
from bench.memory_tracker import Ledger
from tests.composing import TINY, plan

B, H, K = 2, 3, 16
SMALL = (*TINY[:-2], "batch.carry=true", "batch.segment=256", "model.span=384", "batch.streams=8")
SMALL += ("runtime.compile=false",)


def bands(name: str, seen: tuple[int, ...], rows: int, keys: int) -> list[tuple[int, int, int]]:
    return stand_ins._bands(stand_ins.KINDS[name], seen, 0, rows, keys)


def test_calls_meet_the_band_of_a_tile_and_kernels_whole_tiles():
    assert bands("fused", (100,), 256, 1000) == [(128, 227, 1), (128, 227, 1)]
    # Keys 645 to 871 and 773 to 999 lie in tiles of 128 from 640 to 896 and from 768 to the end.
    assert bands("kernel", (100,), 256, 1000) == [(128, 256, 1), (128, 232, 1)]
    assert bands("fused", (100, 1000, 100), 100, 100) == [(100, 100, 2), (100, 100, 1)]


def test_work_is_that_of_the_pairs():
    q, k = torch.empty(B, H, 256, K), torch.empty(B, H, 1000, K)
    kind, seen, read = stand_ins.KINDS["fused"], (100,) * H, [q, k, k, *[None] * 6]
    pairs = B * H * 2 * 128 * 227
    forward = stand_ins._forward(kind, seen, (0, 0), read)
    backward = stand_ins._backward(kind, seen, (0, 0), read, [q, q, q])
    assert forward.flops == 2 * 2 * K * pairs and backward.flops == 2 * 5 * K * pairs
    # Queries and output, a number a row for the backward, both bands of keys and values, and masks of all heads.
    masks = H * 2 * 128 * 227 * 3 * 4
    assert forward.moved_bytes == 4 * (2 * q.numel() + q.numel() // K + 2 * B * H * 2 * 227 * K) + masks
    assert forward.scratch_bytes == H * 128 * 227 * 8, "one mask for all streams"
    of_kernel = stand_ins._forward(stand_ins.KINDS["kernel"], seen, (0, 0), read)
    assert of_kernel.scratch_bytes == 0 and of_kernel.moved_bytes < forward.moved_bytes


def test_learned_vectors_make_a_mask_for_each_stream_unless_a_kernel_takes_them():
    q, vectors = torch.empty(B, H, 128, K), torch.empty(100, K)
    read = [q, q, q, *[None] * 4, vectors, None]
    fused, kernel = (
        stand_ins._forward(stand_ins.KINDS[name], (100,) * H, (0, 0), read) for name in ("fused", "kernel")
    )
    assert fused.scratch_bytes == B * H * 128 * 128 * 8 and kernel.scratch_bytes == 0
    assert fused.flops == kernel.flops == 2 * 3 * K * B * H * 128 * 128


def test_the_ledger_sees_work_and_scratch_memory_of_a_call():
    ledger = Ledger()
    with FakeTensorMode(), ledger:
        made = stand_ins.call([torch.empty(4, dtype=torch.bfloat16)], '[[[10], [1], "torch.float32"]]', 7, 11, 1000)
    assert ledger.work[7, 11, "bfloat16"] == 1 and ledger.peak()[1] == 8 + 40 + 1000
    assert [x.shape for x in made] == [(10,)]


@pytest.mark.parametrize(
    "variant, backend",
    [("mhsa", "kernel"), ("adaptive_span", "fused"), ("adaptive_span", "chunked"), ("all_attention", "fused")],
)
def test_a_step_is_predicted_on_a_gpu(variant, backend):
    words = (*SMALL, f"variant={variant}", "position=relative", "model.cache=hidden", "model.dropout=0.1")
    if backend == "fused":  # which has neither
        words = (*SMALL, f"variant={variant}", "position=rotary", "model.cache=hidden")
    fast, plain = (predict(plan(*words, f"runtime.backend={name}"), kind="cuda") for name in (backend, "plain"))
    assert fast.backend == backend and fast.warm and sum(fast.split.values()) == fast.peak_bytes
    assert fast.split["activations"] < plain.split["activations"]


def test_auto_is_what_is_preferred_where_all_have_passed():
    for variant, dropout, name in (("mhsa", 0.0, "fused"), ("mhsa", 0.1, "kernel"), ("dynamic_span", 0.1, "chunked")):
        own = plan(*SMALL, f"variant={variant}", f"model.dropout={dropout}")
        assert set(backends_on("cuda", build(own), asked="auto").values()) == {name, "plain"}
    with pytest.raises(
        ValueError,
        match="cannot run with spans that depend on .*: allowed are auto, chunked, plain",
    ):
        predict(plan(*SMALL, "variant=dynamic_span", "runtime.backend=kernel"), kind="cuda")


def test_a_long_span_of_one_head_costs_its_own_keys():
    words = (*SMALL, "variant=adaptive_span", "model.span=8192", "position=rotary")
    one, both = (predict(plan(*words), kind="cuda", spans=spans) for spans in ([100, 4000], [4000, 4000]))
    none = predict(plan(*words), kind="cuda", spans=[100, 100])
    assert none.peak_bytes < one.peak_bytes < both.peak_bytes
    assert one.split["state"] - none.split["state"] == pytest.approx(
        (both.split["state"] - none.split["state"]) / 2, rel=0.1
    )


def test_dilated_heads_meet_their_own_keys_and_not_all_between():
    """Of 256 queries each class of four has 64, which meet 64 keys and 31 before them; undilated, 128 meet 128 and 31."""
    words = (*SMALL, "variant=longformer", "variant.attention.windows=[32,32]")
    words += ("runtime.backend=fused", "variant.attention.dilated_heads=2")
    near, apart = (
        {
            work.flops
            for work in predict(plan(*words, f"variant.attention.dilation=[{n},{n}]"), kind="cuda").work
            if work.flops
        }
        for n in (1, 4)
    )
    streams, heads, width = 8, 2, 16
    forward = 2 * 2 * width * streams * heads
    assert forward * 2 * 128 * 159 in near and forward * 64 * 95 in apart


def test_no_gradient_is_made_for_keys_that_are_constants():
    words = (*SMALL, "variant=mhsa", "model.span=4096", "position=rotary")
    kv, hidden = (predict(plan(*words, f"model.cache={cache}"), kind="cuda") for cache in ("kv", "hidden"))
    past = 8 * 32 * 4095 * 4  # bytes of a layer's past keys; as many are values
    assert hidden.split["temporary"] - kv.split["temporary"] == 2 * past
