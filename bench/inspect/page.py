"""Page of what a model sees: one file, drawn by its script from a block of data. Style, policy and frame are the report's.

A passage is a stranger's text: it stands in the page as base64 and becomes text, byte by byte, and never markup.
"""

from html import escape
from pathlib import Path

from bench.report.page import framed, held, section
from harness.cache import write_whole

HERE = Path(__file__).parent
REPORT = HERE.parent / "report"

PICKED = """<div class="picked" role="group" aria-label="What is shown">
<label>Passage <select id="passage"></select></label>
<label>Layer <select id="layer"></select></label>
<label>Head <select id="head"></select></label>
</div>
"""
SURPRISE = """<p>Each byte by how many bits it cost: how little the model had expected it after all bytes of the passage
before it. Hover over one to see what was expected in its place{click}.</p>
<p class="scale">0 bits <span class="ramp hot"></span> 10 bits and more</p>
<div id="surprise-text" class="text" tabindex="0" role="group" aria-label="The passage by surprise"></div>
<p class="said"><output id="surprise-said"></output></p>
"""
ATTENTION = """<p>A row is a byte that looks, a column a byte that is looked at, and the shade goes by the root of the weight; the
largest five of a thousand have the full one, so that small ones show. Passages begin cold: a row is all that its byte sees.</p>
<div class="looking">
<div>
<canvas id="map" tabindex="0" role="application"
aria-label="Attention map: arrow keys move, plus and minus zoom, 0 shows all"></canvas>
<p class="tools"><button type="button" id="closer" aria-label="Zoom in">+</button>
<button type="button" id="farther" aria-label="Zoom out">&minus;</button>
<button type="button" id="whole">Whole</button>
<span class="hint">Drag to move, double-click or pinch to zoom, click to keep a byte; arrow keys, +, &minus; and
0 do it, too.</span></p>
</div>
<div><div id="heads" role="group" aria-label="All maps: arrow keys choose layer and head"></div></div>
</div>
<p class="said"><output id="map-said"></output></p>
<h3>What the byte that you keep looks at</h3>
<div id="row-text" class="text" tabindex="0" role="group" aria-label="The passage by what the kept byte looks at"></div>
<p class="said"><output id="row-said"></output></p>
"""
SPANS = """<p>What each head's soft mask leaves of the keys behind a byte: all of it near, none beyond its end.</p>
<div id="masks" class="scroll strips" tabindex="0" role="region" aria-label="Soft masks"></div>
"""
DISTANCE = """<p>Where each head's attention goes, by how many bytes back, in per cent: of the bytes of the second half of each
passage, which have as many behind them.</p>
<div id="distances" class="scroll" tabindex="0" role="region" aria-label="Attention by distance"></div>
"""
VECTORS = """<p>Learned vectors that bytes read beside the context, or slots in place of a feed-forward: which are taken most,
and by which bytes. The last byte of a context is the one that takes it; the number is what share of its reading that is.</p>
<p class="tools"><label>Of <select id="table"></select></label> <label>Head <select id="table-head"></select></label></p>
<div id="vectors-mass" class="bars"></div>
<p id="vectors-facts" class="caption"></p>
<div id="vectors-list"></div>
"""
LOSS = """<h3>By position in the context</h3>
<p>Bits per byte where a window has so many bytes to go by.</p>
<div id="positions" class="bars"></div>
<h3>By kind of byte</h3>
<p>Bits per byte; then how many of the bytes are of the kind, and how many of all bits they cost.</p>
<div id="kinds" class="bars"></div>
"""


def write_page(path: Path, found: dict) -> Path:
    """Write what ``bench.inspect.seen`` found; ValueError naming ``out``."""
    sublayers = found["sublayers"]
    silent = [f"{own['name']} ({own['silent']})" for own in sublayers if own["silent"]]
    mapped = any("maps" in own for own in sublayers)
    without = f"<p>No map is given by {escape(', '.join(silent))}: the mechanism does not say what it looks at.</p>"
    parts = [("Surprise", SURPRISE.format(click="; click it to ask what it looks at" if mapped else ""))]
    if mapped or silent:
        parts.append(("Attention", (without if silent else "") + (ATTENTION if mapped else "")))
    parts += [("Spans", SPANS)] * any("mask" in own for own in sublayers)
    parts += [("Distance", DISTANCE)] * mapped
    parts += [("Vectors", VECTORS)] * any("entries" in own for own in sublayers)
    parts.append(("Loss", LOSS))
    contents = "\n".join(f'<li><a href="#{name.lower()}">{name}</a></li>' for name, _ in parts)
    page = framed(
        title=f"Inside {found['variant']}, seed {found['seed']}",
        style=_text(REPORT / "page.css") + _text(HERE / "page.css"),
        script=_text(HERE / "page.js"),
        contents=contents,
        sections=_about(found) + PICKED + "\n".join(section(name, [inside]) for name, inside in parts),
        data=held(found, name="seen"),
    )
    try:
        write_whole(path, page.encode("utf-8", "replace"))
    except OSError as error:
        raise ValueError(f"out={path}: cannot be written ({error.strerror})") from error
    return path


def _about(found: dict) -> str:
    data = found["data"]
    trained = f"Trained on {data['name']} ({data['bytes']:,} bytes, sha256 {data['sha256'][:8]}) by {found['command']}"
    seen = f"{found['bits_per_byte']:.4f} bits per byte over {found['scored']:,} bytes of {found['source']}"
    without = "This page is drawn by its script, which does not run here."
    return f'<p class="about">{escape(seen)}. {escape(trained)}</p><noscript><p>{without}</p></noscript>'


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
