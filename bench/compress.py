"""Code a file by a run's own probabilities: ``python -m bench.compress run=outputs/latest file=F out=F.awt``.

Bits per byte are a claim about a code that nobody wrote. This writes it, and ``bench.decompress`` gets the file back, so
that probabilities which do not sum to 1, or a count of bytes that is too large, cannot pass: the file would be longer than
the score says. The last line has both. ``split=test`` in place of ``file`` takes a split of the run's data.
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from bench import CONF
from harness.compose.cli import run_command

STREAM_BYTES = 4096
"""Of a stream by default: long beside what most models see, and enough streams to keep a processor busy."""


@hydra.main(version_base="1.3", config_path=CONF, config_name="compress")
def main(cfg: DictConfig) -> None:
    from dataclasses import replace  # late, as everything slow

    from bench.coded_file import bytes_of_split, check_out, open_run, pack, read_file
    from bench.coding import stream_lengths
    from bench.progress import Steps
    from harness.cache import write_whole
    from harness.data.sources import digest
    from harness.plan.settings import checked
    from harness.record.cells import count_of

    file, split = (checked(cfg[key], str | None, key=key) for key in ("file", "split"))
    if (file is None) == (split is None):
        raise ValueError(f"file={file} split={split}: one of them must be given, the other null")
    streams, out = checked(cfg.streams, int | None, key="streams"), checked(cfg.out, str, key="out")
    if streams is not None and streams < 1:
        raise ValueError(f"streams={streams}: must be at least 1, or null for one every {STREAM_BYTES} bytes")
    check_out(out, file=file)
    content = read_file(file, key="file") if file is not None else None
    opened = open_run(cfg, with_data=file is None)
    content = bytes_of_split(opened.corpus, split) if content is None else content
    streams = streams or max(1, -(-len(content) // STREAM_BYTES))
    with Steps(len(content)) as steps:
        coded = replace(opened.coder, advance=steps.advance).encode(content, streams=streams)
    header = {"bytes": len(content), "sha256": digest(content), "streams": streams}
    packed = pack(header | opened.conditions, coded.content)
    write_whole(Path(out), packed)
    lengths = stream_lengths(len(content), streams)
    print(f"{file or split}: {len(content):,} bytes in, {len(packed):,} bytes out ({out})")
    cut = f"{count_of(len(lengths), 'stream')} of at most {max(lengths, default=0):,} bytes, each from a cold start"
    print(f"  {cut}; {len(packed) - len(coded.content)} bytes of header; {coded.escaped:,} escaped")
    print(last_line(coded.bits_per_byte, n_bytes=len(content), n_packed=len(packed)))


def last_line(claimed: float | None, *, n_bytes: int, n_packed: int) -> str:
    """Bits per byte by the file and by the score, and the difference; what is not known is said to be so."""
    if claimed is None:
        return "no byte was predicted, so there is no score to compare with"
    by_file = 8 * n_packed / n_bytes
    told = f"{by_file:.4f} bits per byte by the file, {claimed:.4f} by the score under the same cut"
    return f"{told}: {100 * (by_file / claimed - 1):+.2f} %"


if __name__ == "__main__":
    run_command(main)
