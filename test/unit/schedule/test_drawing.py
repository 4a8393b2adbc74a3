"""The drawing: every step a box of its lane, in proportion."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from musa_titan.schedule.drawing import COLOURS, draw
from musa_titan.schedule.order import one_forward_one_backward, zero_bubble_h1
from musa_titan.schedule.simulator import Durations, simulate

SPACE = "{http://www.w3.org/2000/svg}"


def test_boxes_show_start_and_length_of_every_step() -> None:
    cost = Durations(10, 10, 10)
    plain = simulate([one_forward_one_backward(stage, 3, 4) for stage in range(3)], cost)
    zero_bubble = simulate([zero_bubble_h1(stage, 3, 4) for stage in range(3)], cost)
    picture = ElementTree.fromstring(draw([("1F1B", plain), ("ZB-H1 <here>", zero_bubble)], "ms"))
    boxes = [box for box in picture.iter(f"{SPACE}rect") if box.get("stroke-width")]
    events = [event for timeline in (plain, zero_bubble) for stage in timeline.events for event in stage]
    assert len(boxes) == len(events) == 3 * (4 + 4) + 3 * (4 + 4 + 4)
    last = max(float(box.get("x", 0)) + float(box.get("width", 0)) for box in boxes)
    scale = (last - float(boxes[0].get("x", 0))) / 180
    left = float(boxes[0].get("x", 0))
    for box, event in zip(boxes, events, strict=True):
        assert box.get("fill") == COLOURS[event.step.kind]
        assert abs(float(box.get("width", 0)) - float(event.end - event.start) * scale) < 0.2
        assert abs(float(box.get("x", 0)) - left - float(event.start) * scale) < 0.2
    words = [text.text for text in picture.iter(f"{SPACE}text")]
    assert "1F1B: 180 ms" in words
    assert "ZB-H1 <here>: 140 ms" in words
