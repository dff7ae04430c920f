"""Draws a graph: a column for the client and for each partition, walks as nested boxes, streams as arrows below.

The lower half reads like a sequence diagram: every stream has a line of its own, so that no arrow crosses another or a
box. Colours follow the reader's light or dark scheme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape

__all__ = ["draw"]

_GAP, _PAD, _HEAD, _LINE = 12, 12, 24, 16
_COLUMN_GAP, _MARGIN, _LANE = 40, 20, 44
_CHARACTER = 6.8
"""Width of a character of the 12 px font, on the safe side."""

_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328; }
.title { font-weight: 600; font-size: 14px; }
.small { font-size: 11px; fill: #59636e; }
.page { fill: #ffffff; }
.column { fill: #f6f8fa; stroke: #818b98; }
.walk { fill: #ffffff; stroke: #818b98; }
.call { fill: #ddf4ff; stroke: #0969da; }
.loop { fill: none; stroke: #8250df; stroke-dasharray: 5 3; }
.par { fill: none; stroke: #818b98; stroke-dasharray: 2 3; }
.step, .life { stroke: #818b98; fill: none; }
.life { stroke-dasharray: 3 4; }
.stream { stroke: #bc4c00; stroke-width: 1.6; fill: none; }
.tip { fill: #bc4c00; }
.steptip { fill: #818b98; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .small { fill: #9198a1; }
  .page { fill: #0d1117; }
  .column { fill: #151b23; stroke: #656c76; }
  .walk { fill: #0d1117; stroke: #656c76; }
  .call { fill: #0c2d4d; stroke: #4493f8; }
  .loop { stroke: #ab7df8; }
  .stream { stroke: #f0883e; }
  .tip { fill: #f0883e; }
}
"""


@dataclass
class _Box:
    """A rectangle with lines of text at its top and other boxes in it, laid out downwards or sideways."""

    look: str
    lines: Sequence[tuple[str, str]] = ()  # (class, text)
    parts: list[_Box] = field(default_factory=list)
    sideways: bool = False
    arrows: bool = False
    width: float = 0
    height: float = 0

    def __post_init__(self) -> None:
        texts = max((_CHARACTER * len(text) for _, text in self.lines), default=0)
        gap = _GAP if self.sideways else _GAP + (8 if self.arrows else 0)
        widths, heights = [p.width for p in self.parts], [p.height for p in self.parts]
        between = gap * max(len(self.parts) - 1, 0)
        across = sum(widths) + between if self.sideways else max(widths, default=0)
        down = max(heights, default=0) if self.sideways else sum(heights) + between
        pad = _PAD if self.look else 0
        head = _LINE * len(self.lines) + (8 if self.lines and self.parts else 0)
        self._gap, self._pad, self._head = gap, pad, head
        self.width = max(texts, across) + 2 * pad
        self.height = head + down + 2 * pad - (4 if self.lines and not self.parts else 0)

    def draw(self, out: list[str], x: float, y: float) -> None:
        if self.look:
            size = f'width="{self.width:g}" height="{self.height:g}"'
            out.append(f'<rect class="{self.look}" x="{x:g}" y="{y:g}" {size} rx="6"/>')
        for number, (look, text) in enumerate(self.lines):
            out.append(_text(x + self._pad, y + self._pad + 11 + number * _LINE, text, look))
        at_x, at_y = x + self._pad, y + self._pad + self._head
        for number, part in enumerate(self.parts):
            if self.sideways:
                part.draw(out, at_x, at_y)
                at_x += part.width + self._gap
                continue
            part.width = self.width - 2 * self._pad  # boxes above each other have one width
            part.draw(out, at_x, at_y)
            if self.arrows and number + 1 < len(self.parts):
                middle, below = at_x + part.width / 2, at_y + part.height
                out.append(f'<path class="step" d="M{middle:g} {below:g}v{self._gap - 6:g}"/>')
                out.append(_tip(middle, below + self._gap - 1, "down", "steptip"))
            at_y += part.height + self._gap


def draw(facts: dict[str, Any]) -> str:
    """The SVG document of what :func:`mstar.cli.graph_facts.graph_facts` returned."""
    columns = {"client": _Box("column", [("title", "client")])}
    columns |= {p["name"]: _partition(p, facts) for p in facts["partitions"]}
    tallest = max(box.height for box in columns.values())
    body: list[str] = []
    x, top = float(_MARGIN), float(_MARGIN + _HEAD)
    centres: dict[str, float] = {}
    labels = [_label(stream) for stream in facts["streams"]]
    widest = max((_CHARACTER * len(label) for label in labels), default=0)
    for name, box in columns.items():
        box.height = tallest
        box.draw(body, x, top)
        centres[name] = x + box.width / 2
        x += box.width + _COLUMN_GAP
    width = x - _COLUMN_GAP + _MARGIN
    y = top + tallest
    bottom = y + _LANE * len(labels) + _MARGIN
    lives = [f'<path class="life" d="M{c:g} {y:g}V{bottom - 8:g}"/>' for c in centres.values()]
    for stream, label in zip(facts["streams"], labels, strict=True):
        y += _LANE
        width = max(width, _lane(body, centres, stream, label, y) + _MARGIN)
    width = max(width, widest + 2 * _MARGIN)
    title = f"The dataflow of {facts['key']}"
    size = f'width="{width:g}" height="{bottom:g}" viewBox="0 0 {width:g} {bottom:g}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="page" width="{width:g}" height="{bottom:g}"/>',
            _text(_MARGIN, _MARGIN + 8, title, "title"),
            *lives,
            *body,
            "</svg>\n",
        ]
    )


def _partition(partition: dict[str, Any], facts: dict[str, Any]) -> _Box:
    nodes = {node["name"]: node for node in facts["nodes"]}
    walks = [
        _Box("walk", [("small", f"walk {name}")], [_walk(facts["walks"][name], nodes)]) for name in partition["walks"]
    ]
    return _Box("column", [("title", partition["name"])], walks)


def _walk(walk: dict[str, Any], nodes: dict[str, Any]) -> _Box:
    match walk["kind"]:
        case "call":
            return _call(walk, nodes[walk["node"]])
        case "loop":
            until = "repeat until " + " or ".join(walk["until"])
            return _Box("loop", [("small", until)], [_walk(walk["body"], nodes)])
        case "draft":
            taken = "draft, taken back from " + ", ".join(walk["resources"])
            return _Box("loop", [("small", taken)], [_walk(walk["body"], nodes)])
        case "seq":
            return _Box("", (), [_walk(part, nodes) for part in walk["parts"]], arrows=True)
        case _:
            parts = [_walk(part, nodes) for part in walk["parts"]]
            return _Box("par", [("small", "side by side")], parts, sideways=True)


def _call(call: dict[str, Any], node: dict[str, Any]) -> _Box:
    name = call["node"] if call["entry"] == "forward" else f"{call['node']}.{call['entry']}"
    entry = next(entry for entry in node["entries"] if entry["name"] == call["entry"])
    context = "" if call["context"] == "main" else f" ({call['context']})"
    lines = [("", f"{name}{context} · rank {', '.join(map(str, node['ranks']))}")]
    if entry["resources"]:
        lines.append(("small", "uses " + ", ".join(entry["resources"])))
    return _Box("call", lines)


def _label(stream: dict[str, Any]) -> str:
    return f"{stream['name']}: {stream['modality']}, {stream['chunk']}"


def _lane(out: list[str], centres: dict[str, float], stream: dict[str, Any], label: str, y: float) -> float:
    """One stream's arrow; returns how far its label reaches."""
    start, end = centres[stream["source"]], centres[stream["target"]]
    left = min(start, end) + 8
    out.append(_text(left, y - 7, label, ""))
    if start == end:  # a partition that feeds itself
        out.append(f'<path class="stream" d="M{start:g} {y - 4:g}h28v12h-20"/>')
        out.append(_tip(start + 2, y + 8, "left", "tip"))
    else:
        toward = 6 if end > start else -6
        out.append(f'<path class="stream" d="M{start:g} {y:g}H{end - toward:g}"/>')
        out.append(_tip(end, y, "right" if end > start else "left", "tip"))
    return left + _CHARACTER * len(label)


def _tip(x: float, y: float, way: str, look: str) -> str:
    """An arrow's head whose point is at (x, y)."""
    shape = {"right": "l-8 -4v8z", "left": "l8 -4v8z", "down": "l-4 -7h8z"}[way]
    return f'<path class="{look}" d="M{x:g} {y:g}{shape}"/>'


def _text(x: float, y: float, text: str, look: str) -> str:
    style = f' class="{look}"' if look else ""
    return f'<text{style} x="{x:g}" y="{y:g}">{escape(text)}</text>'
