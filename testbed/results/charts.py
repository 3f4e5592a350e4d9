"""Charts as inline SVG, and the few lines of HTML they need: no scripts, no files, no network.

Colours come from the page's style (classes `one` and `two`, `curve`, `grid`, `axis`) and follow light and dark mode.
`element` escapes everything that is not markup, so no raw text reaches the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.protocol.units import format_duration

CURVE_POINTS = 500
BARS = 40

Array = NDArray[Any]


class Markup(str):
    """HTML; all other text is escaped before it reaches the page."""

    __slots__ = ()


def element(tag: str, *children: str | Iterable[str], **attributes: object) -> Markup:
    """<tag ...>children</tag>; a trailing underscore (`class_`) is dropped, `stroke_width` becomes stroke-width."""
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"' for key, value in attributes.items())
    inside = "".join(_markup(child) for child in children)
    return Markup(f"<{tag}{given}>{inside}</{tag}>")


def _markup(child: str | Iterable[str]) -> str:
    if isinstance(child, Markup):
        return child
    return escape(child) if isinstance(child, str) else "".join(_markup(c) for c in child)


_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 560, 260, 58, 14, 26, 34
Series = tuple[str, str, Sequence[float], Sequence[float]]  # name, class, x, y


@dataclass(frozen=True, slots=True)
class Axes:
    """Maps values to positions in the drawing."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return round(_LEFT + (value - self.x0) / (self.x1 - self.x0) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        return round(_HEIGHT - _BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (_HEIGHT - _TOP - _BOTTOM), 1)

    def grid(self, x_text: Callable[[float], str], y_text: Callable[[float], str]) -> list[Markup]:
        right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
        drawn = [
            element("line", x1=_LEFT, x2=right, y1=self.y(tick), y2=self.y(tick), class_="grid")
            for tick in ticks(self.y0, self.y1)
        ]
        drawn += [
            element("text", y_text(tick), x=_LEFT - 6, y=self.y(tick) + 4, text_anchor="end")
            for tick in ticks(self.y0, self.y1)
        ]
        drawn += [
            element("text", x_text(tick), x=self.x(tick), y=bottom + 18, text_anchor="middle")
            for tick in ticks(self.x0, self.x1)
        ]
        return [*drawn, element("line", x1=_LEFT, x2=right, y1=bottom, y2=bottom, class_="axis")]


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers between two values."""
    raw = (high - low) / about
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = magnitude * next(m for m in (1, 2, 5, 10) if m * magnitude >= raw * 0.999)
    return [round(i * step, 12) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def line_chart(series: Sequence[Series], from_zero: bool = False) -> Markup:
    """Curves over the step. Curves that agree would hide each other, so the last one is drawn wide and underneath."""
    points = [[(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)] for _, _, xs, ys in series]
    together = [point for curve in points for point in curve]
    if not together:
        return element("p", "nothing to draw", class_="note")
    xs, ys = [x for x, _ in together], [y for _, y in together]
    low, high = (0.0 if from_zero else min(ys)), max(ys)
    margin = 0.08 * (high - low) or 0.08 * abs(high) or 1.0
    axes = Axes(min(xs) - 0.5, max(xs) + 0.5, low if from_zero else low - margin, high + margin)
    drawn = axes.grid(lambda tick: f"{tick:g}" if tick == int(tick) else "", lambda tick: f"{tick:g}")
    drawn.append(element("text", "step", x=_LEFT - 6, y=_HEIGHT - _BOTTOM + 18, text_anchor="end"))
    for (name, class_, _, _), curve in reversed(list(zip(series, points, strict=True))):
        shown = [curve[i] for i in some(len(curve), CURVE_POINTS)]
        path = " ".join(f"{axes.x(x)},{axes.y(y)}" for x, y in shown)
        drawn.append(element("polyline", points=path, class_=f"curve {class_}"))
        if len(shown) <= 60:
            drawn += [
                element(
                    "circle",
                    element("title", f"step {x:g}, {name}: {y:.6g}"),
                    cx=axes.x(x),
                    cy=axes.y(y),
                    r=3,
                    class_=class_,
                )
                for x, y in shown
            ]
    if len(series) > 1:
        for place, (name, class_, _, _) in enumerate(series):
            left = _LEFT + 8 + 110 * place
            drawn.append(element("line", x1=left, x2=left + 20, y1=12, y2=12, class_=f"curve {class_}"))
            drawn.append(element("text", name, x=left + 26, y=16))
    return _drawing(drawn)


def histogram(seconds: Array) -> Markup:
    """Number of blocks by duration; the last bar holds the blocks above the 99th percentile."""
    seconds = seconds[np.isfinite(seconds)]
    if not len(seconds):
        return element("p", "no block has such a time in this run", class_="note")
    low, high = min(0.0, float(seconds.min())), float(np.percentile(seconds, 99))
    high = high if high > low else low + 1e-3
    counts, edges = np.histogram(np.minimum(seconds, high), BARS, (low, high))
    over = int((seconds > high).sum())
    factor, unit = (1.0, "s") if high >= 2 else (1e3, "ms") if high >= 2e-3 else (1e6, "us")
    axes = Axes(low * factor, high * factor, 0.0, 1.08 * float(counts.max()))
    drawn = axes.grid(lambda tick: f"{tick:g} {unit}", lambda tick: f"{tick:,g}" if tick == int(tick) else "")
    for i, count in enumerate(counts.tolist()):
        if count:
            left, right = axes.x(edges[i] * factor), axes.x(edges[i + 1] * factor)
            span = f"{edges[i] * factor:.3g} to {edges[i + 1] * factor:.3g} {unit}: {count:,} blocks"
            last = i == BARS - 1 and over > 0
            text = f"{span}, {over:,} of them longer, up to {seconds.max() * factor:.4g} {unit}" if last else span
            top = axes.y(count)
            drawn.append(
                element(
                    "rect",
                    element("title", text),
                    x=left,
                    y=top,
                    width=max(1.0, round(right - left - 1, 1)),
                    height=round(_HEIGHT - _BOTTOM - top, 1),
                    class_="two" if last else "one",
                )
            )
    p50, p99 = (format_duration(float(x)) for x in np.percentile(seconds, [50, 99]))
    told = f"p50 {p50}, p99 {p99}, longest {format_duration(float(seconds.max()))} (last bar: and above)"
    return _drawing([*drawn, element("text", told, x=_LEFT, y=16)])


_ALONE = """text { font: 12px system-ui, sans-serif; fill: #333 } .grid { stroke: #ddd } .axis { stroke: #888 }
.area { fill: #4477aa; fill-opacity: .35; stroke: #4477aa; stroke-width: 1.5 } svg { background: #fff }"""


def area_chart(title: str, end: float, x_unit: str, shares: Sequence[float], y_unit: str) -> Markup:
    """Means over equal parts of 0 to `end`, as a separate file with its own style."""
    axes = Axes(0.0, end, 0.0, 1.08 * max(shares) or 1.0)
    part = end / len(shares)
    corners = [(0.0, 0.0)]
    for number, share in enumerate(shares):
        corners += [(number * part, share), ((number + 1) * part, share)]
    path = " ".join(f"{axes.x(x)},{axes.y(y)}" for x, y in [*corners, (end, 0.0)])
    drawn = [
        element("title", title),
        element("style", _ALONE),
        *axes.grid(lambda tick: f"{tick:g} {x_unit}", lambda tick: f"{tick:g}{y_unit}"),
        element("polygon", points=path, class_="area"),
        element("text", title, x=_LEFT, y=16),
    ]
    box = f"0 0 {_WIDTH} {_HEIGHT}"
    return element("svg", drawn, xmlns="http://www.w3.org/2000/svg", viewBox=box, width=2 * _WIDTH, height=2 * _HEIGHT)


def scatter_chart(title: str, measured_s: Sequence[float], predicted_s: Sequence[float]) -> Markup:
    """Predicted against measured times, both logarithmic, as a separate file; points on the diagonal are exact."""
    xs, ys = [math.log10(x) for x in measured_s], [math.log10(y) for y in predicted_s]
    low, high = min(*xs, *ys) - 0.1, max(*xs, *ys) + 0.1
    axes = Axes(low, high, low, high)

    def tick_text(tick: float) -> str:
        return format_duration(10**tick) if tick == int(tick) else ""

    ends = {"x1": axes.x(low), "y1": axes.y(low), "x2": axes.x(high), "y2": axes.y(high)}
    drawn = [
        element("title", title),
        element("style", _ALONE + " circle { fill: #4477aa; fill-opacity: .6 }"),
        *axes.grid(tick_text, tick_text),
        element("line", **ends, class_="axis"),
        *(element("circle", cx=axes.x(x), cy=axes.y(y), r=2.5) for x, y in zip(xs, ys, strict=True)),
        element("text", title, x=_LEFT, y=16),
    ]
    box = f"0 0 {_WIDTH} {_HEIGHT}"
    return element("svg", drawn, xmlns="http://www.w3.org/2000/svg", viewBox=box, width=2 * _WIDTH, height=2 * _HEIGHT)


def _drawing(children: Iterable[Markup]) -> Markup:
    return element("svg", children, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img")


def some(count: int, most: int) -> list[int]:
    """All of 0..count-1, or an even choice that includes the first and the last."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, most)).tolist()}) if count else []
