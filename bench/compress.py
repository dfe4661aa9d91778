"""Compresses a file with a run's probabilities: ``python -m bench.compress run=outputs/latest file=F out=F.awt``.

``bench.decompress`` decodes it. Encoder and decoder make the same forward passes in the same order, a byte of each
stream at a time: on one machine, probabilities are equal bit for bit. The header holds all that could change the last
bit; a decoder that differs in it is refused. Format: AWT1 | header's length, 2 bytes | header: JSON, deflated | code.
"""

import json
import zlib
from pathlib import Path
from typing import Literal

import hydra
import numpy as np
import torch
from omegaconf import DictConfig

from bench import CONF
from bench.arithmetic import BITS, ESCAPE, Coder, Decoder, Encoder, frequencies
from bench.planning import Trained, open_trained
from harness import source
from harness.cache import write_atomically
from harness.compose.cli import run_command
from harness.data.sources import digest
from harness.data.streams import score_ranges
from harness.device import runtime
from harness.plan.settings import Positive, parse_setting
from harness.record import checkpoint
from harness.record.cells import pluralize

STREAM_BYTES = 4096  # default: longer than most models reach, yet gives enough streams to keep a processor busy
SAME = "allowed is the run, code, machine, threads, precision and backend that coded it"
RAW = np.arange(1, 257) << (BITS - 8)  # equal shares: 8 bits for each byte
SPLIT = Literal["train", "valid", "test"]
MAGIC, FILE = b"AWT1", ("bytes", "sha256", "streams", "checksum")
CONDITIONS = ("weights", "source", "device", "device_kind", "instruction_set", "threads", "precision", "backend")
CONDITIONS += ("torch", "environment")
USUAL = (  # a usual header, part of the format: the deflater's dictionary
    b'{"bytes":,"sha256":"","streams":,"weights":"","source":"","device":"Intel(R) Xeon(R) Processor (family 6 model '
    b'143 stepping 8)","device_kind":"cpu","instruction_set":"AVX512","threads":2,"precision":"float32",'
    b'"backend":"kernel+plain","torch":"2.13.0+cpu","environment":{"GOMP_SPINCOUNT":"10000"},"checksum":'
)


@torch.no_grad()
def code_streams(coder: Coder, content: bytes, *, streams, model, symbols, device) -> tuple[bytes, dict]:
    """Encode ``content``, or decode as many bytes, in at most ``streams`` streams; ``symbols`` has the byte of each
    number of the vocabulary. Returns the content and counts: bytes ``predicted``, all but each stream's first; their
    ``bits``; and bytes ``escaped``, which the vocabulary lacks and which take 20 bits each."""
    lengths = stream_lengths(len(content), streams)
    columns = np.zeros((max(lengths, default=0), len(lengths)), np.uint8)  # shorter streams end in an unused zero
    for stream, (end, length) in enumerate(zip(np.cumsum(lengths), lengths, strict=True)):
        columns[:length, stream] = np.frombuffer(content[end - length : end], np.uint8)
    lacking = model.eval().embedding.num_embeddings  # the number of every byte that the vocabulary lacks
    number_of = np.full(256, lacking)
    number_of[np.frombuffer(symbols, np.uint8)] = np.arange(len(symbols))
    byte_of, escape = symbols.ljust(lacking, b"\0"), ESCAPE if len(symbols) < 256 else 0
    state, bits, escaped = None, 0.0, 0
    for place, column in enumerate(columns):
        present = np.array(lengths) > place
        if place == 0:
            column[:] = [coder.code(RAW, byte) for byte in column.tolist()]
        else:
            before = number_of[columns[place - 1]]
            before[before == lacking] = 0  # the model reads symbol 0 instead
            with device.autocast():
                out = model(torch.from_numpy(before)[:, None].to(device.device), state)
            state, log_probabilities = out.state, out.logits[:, 0].cpu().double().log_softmax(dim=1)
            if not log_probabilities.isfinite().all():
                raise ValueError("run: its weights give no probabilities: allowed are logits that are finite")
            ends = frequencies(log_probabilities.exp(), escape=escape).cumsum(dim=1).numpy()
            for stream in np.flatnonzero(present).tolist():
                byte = int(column[stream])
                number = coder.code(ends[stream], int(number_of[byte]))
                column[stream] = byte_of[number] if number < lacking else coder.code(RAW, byte)
            numbers = number_of[column]
            listed = present & (numbers < lacking)
            escaped += (missing := int((present & ~listed).sum()))
            bits += 20 * missing - float(log_probabilities.numpy()[listed, numbers[listed]].sum()) / np.log(2)
    counts = {"predicted": len(content) - len(lengths), "bits": bits, "escaped": escaped}
    return b"".join(columns[:length, stream].tobytes() for stream, length in enumerate(lengths)), counts


def stream_lengths(n_bytes: int, streams: int) -> list[int]:
    """Bytes of each stream, differing by at most one; no stream is empty."""
    return [end - first for first, end in score_ranges(n_bytes, min(streams, n_bytes))] if n_bytes else []


def pack(header: dict, code: bytes) -> bytes:
    """A file's bytes. ``header`` has ``CONDITIONS``, which must be equal for decoding, and ``FILE`` without the CRC."""
    text = json.dumps(header | {"checksum": zlib.crc32(code)}, separators=(",", ":"))
    deflater = zlib.compressobj(9, zdict=USUAL)  # beside 60 kB of code, 200 more bytes of header would show
    packed = deflater.compress(text.encode()) + deflater.flush()
    return MAGIC + len(packed).to_bytes(2, "big") + packed + code


def unpack(content: bytes, *, key: str) -> tuple[dict, bytes]:
    """Header and code from a file's bytes; ValueError, beginning with ``key``, if the file is damaged or not ours."""
    if not content.startswith(MAGIC):
        raise ValueError(f"{key}: is no file of this format ({MAGIC.decode()}); allowed is what bench.compress wrote")
    end = 6 + int.from_bytes(content[4:6], "big")
    inflater = zlib.decompressobj(zdict=USUAL)
    try:
        header = json.loads(inflater.decompress(content[6:end], 1 << 16))
        whole = inflater.eof and {*header} == {*FILE, *CONDITIONS} and header["checksum"] == zlib.crc32(content[end:])
    except (zlib.error, ValueError, TypeError):
        whole = False
    if not whole:
        raise ValueError(f"{key}: is damaged or cut off; allowed is a whole file of bench.compress")
    return header, content[end:]


def open_run(cfg: DictConfig) -> tuple[Trained, dict, dict]:
    """The run, keywords of ``code_streams`` and the ``CONDITIONS`` of its probabilities; ValueError naming the key."""
    trained = open_trained(Path(cfg.run), key="run", runtime=cfg.runtime, trust=cfg.trust)
    plan, model, symbols = trained.plan, trained.model(), trained.symbols()
    if not plan.runtime.deterministic:
        raise ValueError("runtime.deterministic=false: allowed is true, for a decoder must find the same probabilities")
    device = runtime.start(plan.runtime)
    backends = {part.backend(device.device, training=False) for _, part in model.to(device.device).sublayers()}
    network = json.dumps([plan.config[key] for key in ("variant", "model", "position")] + [list(symbols)], default=str)
    weights = (Path(cfg.run) / checkpoint.FOLDER / checkpoint.BEST).read_bytes() + network.encode()
    facts = device.describe() | {"weights": digest(weights)[:16], "backend": "+".join(sorted(backends))}
    facts |= {"source": source.digest(plan.config, trust=plan.trust)[:16], "torch": facts["versions"]["torch"]}
    conditions = {name: facts.get(name) for name in CONDITIONS}
    return trained, {"model": model, "symbols": symbols, "device": device}, conditions


def read_input(file: str | None, *, out: str) -> bytes:
    """All bytes of ``file``, none for None; ValueError where it cannot be read or ``out`` cannot be written."""
    path = Path(out)
    try:
        content = b"" if file is None else Path(file).read_bytes()
    except OSError as error:
        raise ValueError(f"file={file}: cannot be read ({error.strerror})") from error
    if path.is_dir():
        raise ValueError(f"out={out}: is a folder; allowed is a new file")
    if file is not None and path.exists() and path.samefile(file):
        raise ValueError(f"out={out}: is the file that is read; allowed is a new file")
    if not next(place for place in path.absolute().parents if place.exists()).is_dir():
        raise ValueError(f"out={out}: cannot be written, a file is in its way")
    return content


@hydra.main(version_base="1.3", config_path=CONF, config_name="compress")
def main(cfg: DictConfig) -> None:
    file, split = parse_setting(cfg.file, str | None, key="file"), parse_setting(cfg.split, SPLIT | None, key="split")
    if (file is None) == (split is None):
        raise ValueError(f"file={file} split={split}: one of them must be given, the other null")
    streams, out = parse_setting(cfg.streams, Positive | None, key="streams"), parse_setting(cfg.out, str, key="out")
    content = read_input(file, out=out)
    trained, how, conditions = open_run(cfg)
    if split is not None:
        corpus = trained.corpus()
        content = corpus.splits[split].numpy().tobytes().translate(corpus.symbols.ljust(256, b"\0"))
    lengths, encoder = stream_lengths(len(content), streams or -(-len(content) // STREAM_BYTES)), Encoder()
    _, counts = code_streams(encoder, content, streams=len(lengths), **how)
    header, code = {"bytes": len(content), "sha256": digest(content), "streams": len(lengths)}, encoder.finish()
    write_atomically(Path(out), packed := pack(header | conditions, code))
    print(f"{file or split}: {len(content):,} bytes in, {len(packed):,} bytes out ({out})")
    cut = f"{pluralize(len(lengths), 'stream')} of at most {max(lengths, default=0):,} bytes, each from a cold start"
    print(f"  {cut}; {len(packed) - len(code)} bytes of header; {counts['escaped']:,} escaped")
    if not counts["predicted"]:
        return print("no byte was predicted, so there is no score to compare with")
    by_file, by_score = 8 * len(packed) / len(content), counts["bits"] / counts["predicted"]
    compared = f"{by_file:.4f} bits per byte by the file, {by_score:.4f} by the score under the same cut"
    print(f"{compared}: {100 * (by_file / by_score - 1):+.2f} %")


@hydra.main(version_base="1.3", config_path=CONF, config_name="decompress")
def decompress(cfg: DictConfig) -> None:
    """Write the decoded file if its SHA-256 is right; ValueError, with nothing written, if anything differs."""
    file, out = (parse_setting(cfg[key], str, key=key) for key in ("file", "out"))
    header, code = unpack(read_input(file, out=out), key=f"file={file}")
    _, how, now = open_run(cfg)
    differing = ", ".join(f"{key} (then {header[key]}, now {now[key]})" for key in now if header[key] != now[key])
    if differing:
        raise ValueError(f"file={file}: was coded with other probabilities, these differ: {differing}; {SAME}")
    content, _ = code_streams(Decoder(code), bytes(header["bytes"]), streams=header["streams"], **how)
    if digest(content) != header["sha256"]:
        raise ValueError(f"file={file}: what was decoded is not what was coded, its SHA-256 is another; {SAME}")
    write_atomically(Path(out), content)
    print(f"{out}: {len(content):,} bytes, SHA-256 {header['sha256']}, as they were coded")


if __name__ == "__main__":
    run_command(main)
