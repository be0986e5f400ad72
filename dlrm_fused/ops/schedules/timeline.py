"""The timeline of a call as a picture, or as text."""

from __future__ import annotations

from html import escape

from dlrm_fused.ops.schedules.estimate import Span, Timeline
from dlrm_fused.ops.schedules.plan import Kind, Lane

_COLOURS = {
    Kind.begin: "#9e9e9e",
    Kind.compute: "#1565c0",
    Kind.combine: "#00838f",
    Kind.move: "#ef6c00",
    Kind.mark: "#fbc02d",
    Kind.gate: "#9e9e9e",
    Kind.end: "#9e9e9e",
}
_WIDTH, _LANE, _LEFT, _TOP = 760, 34, 70, 30


def draw(timeline: Timeline) -> str:
    """SVG: a row for each lane; pieces are named by the rank they belong to, counted from this one, and by their number."""
    lanes = [lane for lane in Lane if any(span.lane is lane for span in timeline.spans)]
    scale = (_WIDTH - _LEFT - 10) / timeline.microseconds
    height = _TOP + _LANE * len(lanes) + 26
    title = f"{timeline.size.pair}, {timeline.schedule.name}: {timeline.microseconds:.0f} us"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/><text x="8" y="18" font-size="13">{escape(title)}</text>',
    ]
    for row, lane in enumerate(lanes):
        top = _TOP + row * _LANE
        parts.append(f'<text x="8" y="{top + 20}">{lane}</text>')
        for span in timeline.spans:
            if span.lane is lane:
                left, width = _LEFT + span.begin * scale, max(1.0, (span.end - span.begin) * scale)
                box = f'x="{left:.1f}" y="{top + 4}" width="{width:.1f}" height="{_LANE - 10}" stroke="white"'
                parts.append(f'<rect {box} fill="{_COLOURS[span.kind]}"><title>{escape(_describe(span))}</title></rect>')
                if width > 40:
                    parts.append(f'<text x="{left + 4:.1f}" y="{top + 20}" fill="white">{escape(_label(span, width))}</text>')
    used = [kind for kind in Kind if any(span.kind is kind for span in timeline.spans)]
    for i, kind in enumerate(used):
        left = _LEFT + 100 * i
        parts.append(f'<rect x="{left}" y="{height - 18}" width="10" height="10" fill="{_COLOURS[kind]}"/>')
        parts.append(f'<text x="{left + 14}" y="{height - 9}">{kind}</text>')
    return "\n".join([*parts, "</svg>", ""])


def table(timeline: Timeline) -> str:
    """A line for each span."""
    spans = sorted(timeline.spans, key=lambda span: (span.begin, span.end))
    return "\n".join(f"{span.begin:9.1f} {span.end:9.1f} us  {span.lane:<7} {_describe(span)}" for span in spans)


def _label(span: Span, width: float) -> str:
    piece = span.piece
    if piece is None:
        return str(span.kind)
    name = "own" if piece.shift == 0 else f"+{piece.shift}.{piece.number}"
    return f"{span.kind} {name}" if width > 90 else name


def _describe(span: Span) -> str:
    piece = span.piece
    if piece is None:
        return str(span.kind)
    whose = "own rows" if piece.shift == 0 else f"rank +{piece.shift}, piece {piece.number}"
    return f"{span.kind}: {whose}, rows {piece.first} to {piece.last}"
