"""A trained model, taken away: ``python -m bench.export run=outputs/latest out=DIR``.

Weights as safetensors, what was configured, a model card. ``windtunnel.load(DIR)`` reads it with torch, einops
and pydantic, no other of the configuration's tools; ``bench/exported.py`` has the format.
"""

import json
from pathlib import Path

import hydra
from omegaconf import DictConfig

from bench import CONF
from harness.compose.cli import run_command

FACTS = ("variant", "seed", "data", "command", "commit", "source", "parameters")
SCORES = ("valid_bits_per_byte", "test_bits_per_byte")
CARD = """# {variant}: a byte-level language model

{layers} layers of width {d_model}, {heads} heads, a window of {span} bytes; {score}.

- Trained on {data}; {bytes_seen:,} bytes were read when these weights were the best on valid.
- Scored with {streams} streams, segments of {segment} bytes, {context} unscored bytes before each stream. No other text
  was tried.
- Command: `{command}`, commit {commit}, seed {seed}.
- `model.json` has the configuration. In `weights.safetensors` a matrix that has several names is stored under the first;
  `shared` of `model.json` has the others.

```python
import windtunnel

model = windtunnel.load(".")
model.generate(b"The ", n_bytes=200)
```

What it writes is made up, in the manner of its data.
"""


@hydra.main(version_base="1.3", config_path=CONF, config_name="export")
def main(cfg: DictConfig) -> None:
    from bench import exported
    from bench.planning import open_trained  # late, as everything slow
    from harness.plan.settings import checked
    from harness.record.rows import SUMMARY, read_object

    path, out = Path(cfg.run), Path(checked(cfg.out, str, key="out"))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out={out}: is there already; allowed is a folder that is not, or is empty")
    opened = open_trained(path, key="run", trust=cfg.trust)
    plan, saved, summary = opened.plan, opened.saved, read_object(path / SUMMARY)
    trained = {key: saved.get(key) for key in FACTS} | {key: summary.get(key) for key in SCORES}
    trained["bytes_seen"] = opened.best["bytes"]
    described = {name: plan.config[name] for name in ("variant", "model", "position")}
    described |= {"vocabulary": plan.data["vocabulary"], "symbols": list(opened.symbols())}
    described |= {"protocol": plan.protocol(), "trained": trained}
    described = json.loads(json.dumps(described))  # the numbers of layers are keys: as text
    valid, data = trained["valid_bits_per_byte"], trained["data"]
    words = {"score": "not scored" if valid is None else f"{valid:.4f} bits per byte on valid"}
    words["data"] = f"{data['name']}, {data['bytes']:,} bytes, sha256 {data['sha256']}"
    card = CARD.format(**described["protocol"] | described["model"] | trained | words)
    try:
        exported.write(out, opened.model(), described=described, card=card)
    except OSError as error:
        raise ValueError(f"out={out}: cannot be written ({error.strerror})") from error
    print(f"{out}: {exported.WEIGHTS}, {exported.MODEL}, README.md; windtunnel.load({str(out)!r}) reads it")


if __name__ == "__main__":
    run_command(main)
