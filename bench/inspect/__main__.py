"""See inside a trained run: ``python -m bench.inspect run=outputs/latest [text=FILE or 'some words']``.

One page that opens from disk: attention maps of every layer and head over passages, soft masks and learned spans, attention by
distance, what calls persistent vectors and product-key slots, surprise byte by byte, and loss by position and by kind of byte.
Passages are of the run's own valid, without the bytes that chose the weights, or ``text``. Each begins cold, so that a row of
a map is all that its byte sees.
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from bench import CONF
from harness.compose.cli import run_command


@hydra.main(version_base="1.3", config_path=CONF, config_name="inspect")
def main(cfg: DictConfig) -> None:
    from bench.inspect.page import write_page  # late, as everything slow
    from bench.inspect.passages import fitting, of_split, of_text, read_text
    from bench.inspect.seen import scored, seen
    from bench.planning import open_trained
    from harness.device import runtime
    from harness.loop.settle import settled
    from harness.plan.settings import checked

    path = Path(cfg.run)
    given, out = (checked(cfg[key], str | None, key=key) for key in ("text", "out"))
    length, passages, score = (
        checked(cfg[key], hint, key=key) for key, hint in (("bytes", int | None), ("passages", int), ("score", int))
    )
    for key, value, least in (("bytes", length, 2), ("passages", passages, 1), ("score", score, 2)):
        if value is not None and value < least:
            raise ValueError(f"{key}={value}: must be at least {least}")
    opened = open_trained(path, key="run", runtime=cfg.runtime, trust=cfg.trust)
    plan, saved = opened.plan, opened.saved
    device = runtime.start(plan.runtime)
    model = opened._replace(plan=settled(plan, device)).model().to(device.device).eval()
    corpus = None
    if given is None or plan.data["vocabulary"] < 256:
        try:
            corpus = opened.corpus()
        except ValueError as error:
            raise ValueError(
                f"{error}; the run's own data are needed here; text=FILE or text='words' needs none"
            ) from error
    symbols = bytes(range(256)) if corpus is None else corpus.symbols
    length, passages = fitting(model, length=length, passages=passages, device=device.device)
    if given is None:
        source = corpus.reported("valid", choice_bytes=plan.eval.choice_bytes)
        name, shown = "valid", of_split(source, symbols, length=length, passages=passages)
    else:
        name, source = read_text(given, symbols)
        shown = of_text(source, length=length, passages=passages)
    found = seen(model, shown, runtime=device, symbols=symbols)
    found |= scored(
        model, source[:score], runtime=device, symbols=symbols, segment=plan.eval.segment, span=plan.model.span
    )
    found |= {"source": name, "span": plan.model.span}
    found |= {key: saved[key] for key in ("variant", "seed", "data", "command")}
    target = write_page(path / "inspect.html" if out is None else Path(out), found)
    told = ", ".join(f"{len(tokens)} bytes" for _, tokens in shown)
    print(f"{saved['variant']}, seed {saved['seed']}: {len(shown)} passages of {name} ({told})")
    for own in found["sublayers"]:
        if own["silent"]:
            print(f"{own['name']} gives no map ({own['silent']} has no `inspect`)")
    print(f"{target}: {target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    run_command(main)
