"""Decode what ``bench.compress`` wrote: ``python -m bench.decompress run=outputs/latest file=F.awt out=F``.

The same run, code, machine and threads, or it is refused by the name of what differs. The file appears whole and with the
SHA-256 of what was coded, or not at all.
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from bench import CONF
from harness.compose.cli import run_command


@hydra.main(version_base="1.3", config_path=CONF, config_name="decompress")
def main(cfg: DictConfig) -> None:
    from dataclasses import replace  # late, as everything slow

    from bench.coded_file import check_conditions, check_out, open_run, read_file, unpack
    from bench.progress import Steps
    from harness.cache import write_whole
    from harness.data.sources import digest
    from harness.plan.settings import checked

    file, out = (checked(cfg[key], str, key=key) for key in ("file", "out"))
    key = f"file={file}"
    check_out(out, file=file)
    header, code = unpack(read_file(file, key="file"), key=key)
    opened = open_run(cfg)
    check_conditions(header, opened.conditions, key=key)
    with Steps(header["bytes"]) as steps:
        coder = replace(opened.coder, advance=steps.advance)
        content = coder.decode(code, n_bytes=header["bytes"], streams=header["streams"]).content
    if digest(content) != header["sha256"]:
        raise ValueError(
            f"{key}: what was decoded is not what was coded, its SHA-256 is {digest(content)} and not "
            f"{header['sha256']}: the probabilities are not the same here; allowed is the machine that coded it"
        )
    write_whole(Path(out), content)
    print(f"{out}: {len(content):,} bytes, SHA-256 {header['sha256']}, as they were coded")


if __name__ == "__main__":
    run_command(main)
