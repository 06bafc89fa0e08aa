"""The plot of ``kvswap compare``: accuracy against memory, bytes read and time."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from kvswap_torch.compare import results
from kvswap_torch.compare.plot import AXES, HEIGHT, draw, points
from tests.python.test_compare import file_of, made_up


def test_the_plot_has_each_method_with_its_interval() -> None:
    full = made_up("full", [[1, 1], [1]], 1 << 20)
    found = results.summarised(file_of(full, made_up("a<b", [[0, 1], [0]], 1 << 18)))
    text = draw(found)
    assert text == draw(found)
    drawn = ElementTree.fromstring(text)
    named = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "a<b" in named and "full" in named and "accuracy (higher is better)" in named
    circles = list(drawn.iter("{http://www.w3.org/2000/svg}circle"))
    shown = [len(points(found, axis)) for axis in AXES]
    assert shown == [2, 0, 2] and len(circles) == sum(shown) + 2, "nothing was read; two names"
    heights = [float(each.get("cy")) for each in circles]
    assert heights[0] < heights[2]  # the better one stands above
    assert "nan" not in draw(file_of())


def test_the_plot_has_a_panel_each_for_memory_reads_and_time() -> None:
    """What reads nothing stands left of all that reads; less is further left."""
    methods = [made_up(name, [[1]], 1 << 20) for name in ("full", "few", "many")]
    for method, read in zip(methods, (0, 1 << 10, 1 << 16), strict=True):
        method["runs"][0] |= {"bytes_read_per_token": read, "ms_per_token": 1 + read}
    found = results.summarised(file_of(*methods))
    drawn = ElementTree.fromstring(draw(found))
    named = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert [label for label in named if "log scale" in label] == [
        f"{axis.label}, log scale (lower is better)" for axis in AXES
    ]
    assert named.count("accuracy (higher is better)") == 3 and named.count("full") == 1
    assert "0 B" in named
    circles = [
        (float(each.get("cx")), float(each.get("cy")))
        for each in drawn.iter("{http://www.w3.org/2000/svg}circle")
    ]
    memory, read, time = circles[:3], circles[3:6], circles[6:9]
    assert len({x for x, _ in memory}) == 1
    assert read == sorted(read) and time == sorted(time) and len({x for x, _ in read}) == 3
    assert [int(y // HEIGHT) for _, y in (memory[0], read[0], time[0])] == [0, 1, 2]
