"""Compresses a file with a run's probabilities: ``python -m bench.compress run=outputs/latest
file=F out=F.awt``.

``bench.decompress`` decodes the file. Encoder and decoder make the same forward passes in the same
order, one byte of each stream at a time, so that on one machine their probabilities are equal bit
for bit. The header names the conditions that could change a bit of them; under other conditions
``bench.decompress`` refuses the file. Format: AWT1, the header's length in 2 bytes, the header
(JSON, deflated), the code."""

import json
import math
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from omegaconf import DictConfig

from bench.arithmetic import BITS, ESCAPE, Decoder, Encoder, frequencies
from bench.progress import Progress
from bench.rows import refuse_unwritable
from harness import source
from harness.cache import digest, write_atomically
from harness.compose.cli import run_command, with_config
from harness.data.streams import score_ranges
from harness.plan.settings import Positive, parse_setting
from harness.record import checkpoint
from harness.record.cells import pluralize
from harness.trained import TrainedRun, open_trained

# default length of a stream: longer than most models' context, and short enough for many streams
STREAM_BYTES = 4096
SAME_AS_ENCODER = (
    "decode with the run, code, torch, machine, threads, environment, precision and "
    "backend of the encoder"
)
# cumulative frequencies of 256 equally frequent bytes: 8 bits for each
UNIFORM = np.arange(1, 257) << (BITS - 8)
ESCAPE_BITS = 20.0  # cost of a byte that the vocabulary lacks: the escape symbol's, and 8
SPLIT = Literal["train", "valid", "test"]
MAGIC = b"AWT1"
FILE_KEYS = ("bytes", "sha256", "streams", "checksum")
CONDITIONS = (
    "weights",
    "source",
    "device",
    "device_kind",
    "instruction_set",
    "threads",
    "precision",
    "backend",
    "tf32",
    "torch",
    "environment",
)
"""Keys of the header whose values must be equal in the encoder and the decoder."""
DICTIONARY = (  # a typical header, as the deflater's preset dictionary; part of the format
    b'{"bytes":,"sha256":"","streams":,"weights":"","source":"","device":"Intel(R) Xeon(R) '
    b"Processor (family 6 model "
    b"143 stepping "
    b'8)","device_kind":"cpu","instruction_set":"AVX512","threads":2,"precision":"float32",'
    b'"backend":"kernel+plain","tf32":false,"torch":"2.13.0+cpu",'
    b'"environment":{"GOMP_SPINCOUNT":"10000"},"checksum":'
)


@torch.no_grad()
def code_streams(
    coder: Encoder | Decoder, content: bytes, *, streams, model, symbols, runtime, progress
) -> tuple[bytes, float, int]:
    """Encode ``content``, or decode ``len(content)`` bytes, one byte of each stream at a time.
    ``symbols`` has the byte of each token id. Return the content; the total cost in bits of the
    predicted bytes, which are all but each stream's first; and how many of them the vocabulary
    lacks, which cost 20 bits each."""
    lengths = np.array(stream_lengths(len(content), streams), int)
    # shorter streams end in an unused zero
    used = np.arange(lengths.max(initial=0))[:, None] < lengths
    columns = np.zeros(used.shape, np.uint8)
    columns.T[used.T] = np.frombuffer(content, np.uint8)
    # the id of the escape symbol, for bytes that the vocabulary lacks
    unknown = model.eval().embedding.num_embeddings
    id_of_byte = np.full(256, unknown)
    id_of_byte[np.frombuffer(symbols, np.uint8)] = np.arange(len(symbols))
    byte_of_id = symbols.ljust(unknown, b"\0")
    escape = 0
    if len(symbols) < 256:
        escape = ESCAPE
    state = None
    bits = 0.0
    escaped = 0
    progress.print(
        f"{len(content):,} bytes, in {len(columns):,} forward passes of "
        f"{pluralize(len(lengths), 'stream')}"
    )
    for position, column in enumerate(columns):
        progress.advance(position / len(columns), phase="coding")
        active = used[position]
        if position == 0:
            column[:] = [coder.code(UNIFORM, byte) for byte in column.tolist()]
        else:
            inputs = id_of_byte[columns[position - 1]]
            # the model has no input for the escape symbol and reads id 0
            inputs[inputs == unknown] = 0
            with runtime.autocast():
                out = model(torch.from_numpy(inputs)[:, None].to(runtime.device), state)
            state = out.state
            log_probabilities = out.logits[:, 0].cpu().double().log_softmax(dim=1)
            if not log_probabilities.isfinite().all():
                raise ValueError(
                    "run: its weights give logits that are not finite, so there are no "
                    "probabilities"
                )
            ends = frequencies(log_probabilities.exp(), escape=escape).cumsum(dim=1).numpy()
            for stream in np.flatnonzero(active).tolist():
                byte = int(column[stream])
                token = coder.code(ends[stream], int(id_of_byte[byte]))
                column[stream] = byte_of_id[token] if token < unknown else coder.code(UNIFORM, byte)
            tokens = id_of_byte[column[active]]
            costs = F.pad(-log_probabilities / math.log(2), (0, 1), value=ESCAPE_BITS).numpy()
            bits += float(costs[active, tokens].sum())
            escaped += int((tokens == unknown).sum())
    return columns.T[used.T].tobytes(), bits, escaped


def stream_lengths(n_bytes: int, streams: int) -> list[int]:
    """Return the length of each stream in bytes. Lengths differ by at most one, and none is 0."""
    if n_bytes:
        return [end - first for first, end in score_ranges(n_bytes, min(streams, n_bytes))]
    return []


def pack(header: dict, code: bytes) -> bytes:
    """Return the bytes of a coded file. ``header`` has the keys ``CONDITIONS`` and ``FILE_KEYS``,
    except ``checksum``."""
    text = json.dumps(header | {"checksum": zlib.crc32(code)}, separators=(",", ":"))
    # saves some 200 bytes, which matter in a short file
    deflater = zlib.compressobj(9, zdict=DICTIONARY)
    packed = deflater.compress(text.encode()) + deflater.flush()
    return MAGIC + len(packed).to_bytes(2, "big") + packed + code


def unpack(content: bytes, *, key: str) -> tuple[dict, bytes]:
    """Return the header and the code of a coded file's bytes; ValueError naming ``key`` for another
    format or a damaged file."""
    if not content.startswith(MAGIC):
        raise ValueError(
            f"{key}: is not of the format {MAGIC.decode()}; allowed are files that bench.compress "
            "wrote"
        )
    end = 6 + int.from_bytes(content[4:6], "big")
    inflater = zlib.decompressobj(zdict=DICTIONARY)
    try:
        header = json.loads(inflater.decompress(content[6:end], 1 << 16))
        complete = inflater.eof and {*header} == {*FILE_KEYS, *CONDITIONS}
        intact = complete and header["checksum"] == zlib.crc32(content[end:])
    except (zlib.error, ValueError, TypeError):
        intact = False
    if not intact:
        raise ValueError(
            f"{key}: is damaged or cut off; allowed are whole files that bench.compress wrote"
        )
    return header, content[end:]


def open_run(cfg: DictConfig) -> tuple[TrainedRun, dict, dict]:
    """Return the run in the folder ``cfg.run``, keyword arguments for ``code_streams``, and the
    values of ``CONDITIONS``."""
    run = open_trained(cfg.run, key="run", runtime=cfg.runtime, trust=cfg.trust)
    run.require_causal()
    plan = run.plan
    symbols = run.symbols()
    if not plan.runtime.deterministic:
        raise ValueError(
            "runtime.deterministic=false: allowed is true, because decoding needs the same "
            "probabilities"
        )
    model, device_runtime = run.on_device()
    backends = {
        part.backend(device_runtime.device, training=False) for _, part in model.sublayers()
    }
    network = json.dumps(
        [plan.config[key] for key in ("variant", "model", "position")] + [list(symbols)],
        default=str,
    )
    weights = (run.folder / checkpoint.FOLDER / checkpoint.BEST).read_bytes() + network.encode()
    facts = device_runtime.describe()
    facts |= {
        "weights": digest(weights)[:16],
        "backend": "+".join(sorted(backends)),
        "source": source.digest(plan.config, trust=plan.trust)[:16],
        "torch": facts["versions"]["torch"],
    }
    conditions = {name: facts.get(name) for name in CONDITIONS}
    return run, {"model": model, "symbols": symbols, "runtime": device_runtime}, conditions


def read_input(file: str | None, *, out: str) -> bytes:
    """Return the bytes of ``file``, or no bytes for None. ValueError if it cannot be read, or if
    ``out`` cannot be written."""
    path = Path(out)
    content = b""
    if file is not None:
        try:
            content = Path(file).read_bytes()
        except OSError as error:
            raise ValueError(f"file={file}: cannot be read ({error.strerror})") from error
        if path.exists() and path.samefile(file):
            raise ValueError(f"out={out}: is the file that is read; allowed is another file")
    refuse_unwritable(path, key=f"out={out}")
    return content


@with_config("compress")
def main(cfg: DictConfig) -> None:
    file = parse_setting(cfg.file, str | None, key="file")
    split = parse_setting(cfg.split, SPLIT | None, key="split")
    if (file is None) == (split is None):
        raise ValueError(
            f"file={file} split={split}: exactly one of them must be set; the other must be null"
        )
    streams = parse_setting(cfg.streams, Positive | None, key="streams")
    out = parse_setting(cfg.out, str, key="out")
    content = read_input(file, out=out)
    run, keywords, conditions = open_run(cfg)
    if split is not None:
        corpus = run.corpus()
        content = corpus.splits[split].numpy().tobytes().translate(corpus.symbols.ljust(256, b"\0"))
    lengths = stream_lengths(len(content), streams or math.ceil(len(content) / STREAM_BYTES))
    encoder = Encoder()
    with Progress() as progress:
        _, bits, escaped = code_streams(
            encoder, content, streams=len(lengths), progress=progress, **keywords
        )
    header = {
        "bytes": len(content),
        "sha256": digest(content),
        "streams": len(lengths),
    } | conditions
    code = encoder.finish()
    write_atomically(Path(out), packed := pack(header, code))
    print(f"{file or split}: {len(content):,} bytes in, {len(packed):,} bytes out ({out})")
    longest = max(lengths, default=0)
    cut = (
        f"{pluralize(len(lengths), 'stream')} of at most {longest:,} bytes, each without "
        "initial state"
    )
    print(f"  {cut}; {len(packed) - len(code)} bytes of header; {escaped:,} escaped")
    predicted = len(content) - len(lengths)
    if not predicted:
        return print("no byte was predicted, so there is no score to compare with")
    by_file = 8 * len(packed) / len(content)
    by_score = bits / predicted
    sizes = (
        f"{by_file:.4f} bits per byte by the file, {by_score:.4f} by the score of the same streams"
    )
    print(f"{sizes}: {100 * (by_file / by_score - 1):+.2f} %")


@with_config("decompress")
def decompress(cfg: DictConfig) -> None:
    """Decode a file and write the bytes. ValueError, and nothing is written, if a condition or
    the SHA-256 differs."""
    file, out = (parse_setting(cfg[key], str, key=key) for key in ("file", "out"))
    header, code = unpack(read_input(file, out=out), key=f"file={file}")
    _, keywords, conditions = open_run(cfg)
    differences = [
        f"{k} (then {header[k]}, now {conditions[k]})"
        for k in conditions
        if header[k] != conditions[k]
    ]
    if differences:
        reason = f"these conditions differ from the encoder's: {', '.join(differences)}"
        raise ValueError(f"file={file}: cannot be decoded, because {reason}; {SAME_AS_ENCODER}")
    with Progress() as progress:
        content, *_ = code_streams(
            Decoder(code),
            bytes(header["bytes"]),
            streams=header["streams"],
            progress=progress,
            **keywords,
        )
    if digest(content) != header["sha256"]:
        raise ValueError(
            f"file={file}: the SHA-256 of the decoded bytes is not that of the encoded ones; "
            f"{SAME_AS_ENCODER}"
        )
    write_atomically(Path(out), content)
    print(
        f"{out}: {len(content):,} bytes, SHA-256 {header['sha256']}, equal to that of the "
        "original bytes"
    )


if __name__ == "__main__":
    run_command(main)
