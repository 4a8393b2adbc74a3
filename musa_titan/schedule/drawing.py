"""A picture of pipeline schedules as SVG text: one lane per stage, one box per step, the microbatch's number in it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from musa_titan.schedule.simulator import Timeline

COLOURS = {"F": "#7aa6d8", "B": "#8fc490", "W": "#f0c75e", "BW": "#5fa97a"}
MEANING = {
    "F": "F forward",
    "B": "B input gradient",
    "W": "W weight gradient",
    "BW": "BW both at once",
}

WIDTH, MARGIN, LANE, BOX, HEADING = 1100, 70, 26, 20, 30


def draw(schedules: Sequence[tuple[str, Timeline]], unit: str) -> str:
    """SVG of titled timelines one below the other, on the same scale; times are in `unit`, from 0."""
    longest = max(float(timeline.makespan) for _, timeline in schedules)
    scale = (WIDTH - MARGIN - 10) / longest
    parts: list[str] = []
    top = 8
    for title, timeline in schedules:
        parts.append(_text(8, top + 14, f"{title}: {float(timeline.makespan):.4g} {unit}", size=14))
        top += HEADING
        for stage, events in enumerate(timeline.events):
            parts.append(_text(8, top + 14, f"stage {stage}"))
            for event in events:
                left, width = MARGIN + float(event.start) * scale, float(event.end - event.start) * scale
                parts.append(
                    f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{BOX}" '
                    f'fill="{COLOURS[event.step.kind]}" stroke="#555" stroke-width="0.5"/>'
                )
                if width > 12:
                    parts.append(_text(left + width / 2, top + 14, str(event.step.microbatch), anchor="middle"))
            top += LANE
        top += 10
    kinds = dict.fromkeys(event.step.kind for _, timeline in schedules for stage in timeline.events for event in stage)
    for index, kind in enumerate(kinds):
        left = MARGIN + index * 180
        parts.append(f'<rect x="{left}" y="{top}" width="14" height="14" fill="{COLOURS[kind]}" stroke="#555"/>')
        parts.append(_text(left + 20, top + 12, MEANING[kind]))
    height = top + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _text(x: float, y: float, words: str, size: int = 11, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(words)}</text>'
