"""HTML page of a report: one file without scripts, for light and dark screens and for print.

The title states the result. An introduction follows, then sections of Markdown with figures.
Secondary sections are folded.
"""

import base64
import html
import io
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from markdown_it import MarkdownIt
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot, because notebooks share pyplot's state

STYLE = Path(__file__).with_suffix(".css").read_text()
LOOK: Any = matplotlib.rc_params_from_file(
    Path(__file__).with_suffix(".mplstyle"), use_default_template=False
)
# colours of figures; in a page, they become CSS variables, with other values on a dark screen
COLOURS = tuple(LOOK["axes.prop_cycle"].by_key()["color"])
BLUE, ORANGE, GREEN, PURPLE, GREY = COLOURS
INK = LOOK["text.color"]
PAPER = "#fffffe"
PALE = "#a9c1f0"
VARIABLES = {  # values of page.css
    INK: "currentColor",
    PAPER: "var(--paper)",
    BLUE: "var(--blue)",
    ORANGE: "var(--orange)",
    GREEN: "var(--green)",
    PURPLE: "var(--purple)",
    GREY: "var(--grey)",
    PALE: "var(--pale)",
}


class Section(NamedTuple):
    """Section of a page.

    Attributes:
        heading: Heading of the section.
        text: Markdown. `![description](name "title")` inserts the figure of that name; figures on
            consecutive lines are side by side if they fit.
        folded: Whether the section is folded at first.
    """

    heading: str
    text: str
    folded: bool = False


def page(
    title: str, lead: str, sections: Iterable[Section], figures: Mapping[str, Figure | bytes]
) -> str:
    """Return a page as HTML.

    Args:
        title: Title, which states the result in one line of plain text.
        lead: Introduction below the title, Markdown.
        sections: Sections; empty ones are dropped.
        figures: Figures, or contents of PNG files, by their names in the text.
    """

    def image(renderer: Any, tokens: Sequence[Any], index: int, options: Any, env: Any) -> str:
        token = tokens[index]
        shown = _shown(figures[token.attrs["src"]], token.attrs["src"], html.escape(token.content))
        caption = html.escape(token.attrs.get("title", ""))
        return f'<span class="figure"><span class="caption">{caption}</span>{shown}</span>'

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    markdown.add_render_rule("image", image)
    # allow only our figures and anchors, because file or class names may contain Markdown links
    markdown.validateLink = lambda url: url in figures or url.startswith("#")  # type: ignore[method-assign]
    body = [f"<h1>{html.escape(title)}</h1>", markdown.render(lead)]
    for heading, text, folded in sections:
        if text and folded:
            body.append(
                f"<details><summary>{html.escape(heading)}</summary>\n{markdown.render(text)}</details>"
            )
        elif text:
            body.append(f"<h2>{html.escape(heading)}</h2>\n{markdown.render(text)}")
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{STYLE}</style>\n"
        + "\n".join(body)
        + "\n</html>\n"
    )


def plain(text: object) -> str:
    """Escape Markdown markup."""
    return re.sub(r"([\\`*\[\]<>|~#\"]|(?<!\w)_|_(?!\w))", r"\\\1", str(text))


def table(
    headers: Sequence[str], rows: Iterable[Sequence[object]], words: Iterable[int] = (0,)
) -> str:
    """Format a table in Markdown from cells of plain text.

    Args:
        headers: Headers of the columns.
        rows: Cells of each row.
        words: Indices of columns with text; the other columns hold numbers, and are aligned on the
            right.
    """
    rule = ["--:"] * len(headers)
    for column in words:
        rule[column] = ":--"
    lines = [map(plain, headers), rule]
    for row in rows:
        lines.append(map(plain, row))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(text: str) -> str:
    """Format text as a Markdown code block."""
    return textwrap.indent(text, "    ")


def draw(
    paint: Callable[[Axes], None], width: float = 4.6, height: float = 3.2, title: str | None = None
) -> Figure:
    """Draw a figure in the pages' style.

    Args:
        paint: Function that draws on the axes.
        width: Width in inches.
        height: Height in inches.
        title: Title above the axes, for a figure outside a page.
    """
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(width, height), layout="constrained")
        if title is not None:
            figure.suptitle(title)
        paint(figure.subplots())
    return figure


def draw_line(paint: Callable[[Axes], None], height: float = 3.2) -> Figure:
    """Draw a line plot with fixed margins, because computing them would double the drawing time.

    The margins have room for numbers on the left and for the lines' names on the right.

    Args:
        paint: Function that draws on the axes.
        height: Height in inches.
    """
    figure = draw(paint, height=height)
    figure.set_layout_engine(None)
    figure.subplots_adjust(0.135, 0.47 / height, 0.79, 1 - 0.12 / height)
    return figure


def png(figure: Figure) -> bytes:
    """Return a figure as PNG, on white."""
    file = io.BytesIO()
    with matplotlib.rc_context(LOOK):
        figure.savefig(file, format="png")
    return file.getvalue()


def label_lines(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write each line's name at its right end, and move overlapping names apart.

    Lines that change by less than 2 % become flat, so that the numbers of the axis stay short.

    Args:
        axes: Axes with all lines drawn.
        ends: Last value, name and colour of each line.
    """
    if not ends:
        return
    low, high = axes.get_ylim()
    missing = max(0.02 * max(abs(low), abs(high)) - (high - low), 0.0)
    axes.set_ylim(low - missing / 2, high + missing / 2)
    gap = (high - low + missing) * 15 / 72 / (0.75 * axes.figure.get_figheight())  # type: ignore[union-attr]
    ends = sorted(ends)
    values = np.array([value for value, _, _ in ends])
    # a name is at least a gap above the one below; then all move, so that their mean is as before
    steps = gap * np.arange(len(ends))
    places = np.maximum.accumulate(values - steps) + steps
    right = axes.get_yaxis_transform()  # x as a fraction of the axes' width, y in data units
    for place, (_, name, colour) in zip(places - (places - values).mean(), ends, strict=True):
        axes.text(1.02, place, name, transform=right, va="center", color=colour, fontsize=9)


def short(name: str, most: int) -> str:
    """Shorten a name to at most `most` characters, for a figure."""
    if len(name) <= most:
        return name
    return f"{name[: most - 1]}…"


def _shown(figure: Figure | bytes, name: str, alt: str) -> str:
    if isinstance(figure, bytes):
        return f'<img alt="{alt}" src="data:image/png;base64,{base64.b64encode(figure).decode()}">'
    file = io.StringIO()
    with matplotlib.rc_context({**LOOK, "svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True)
    text = file.getvalue()
    # another figure's groups have the same ids
    text = re.sub(
        r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->|(?<=<g) id=\"[^\"]*\"",
        "",
        text[text.index("<svg") :],
        flags=re.DOTALL,
    )
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    width = 96 * figure.get_figwidth() * 1.2  # CSS pixels; limits the size of text on a wide page
    return f'<span role="img" aria-label="{alt}" style="max-width: {width:.0f}px">{text}</span>'
