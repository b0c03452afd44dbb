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
from markdown_it import MarkdownIt
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot, because notebooks share pyplot's state
from matplotlib.ticker import MaxNLocator

from app.system.files import whole

STYLE = Path(__file__).with_suffix(".css").read_text()
LOOK: Any = matplotlib.rc_params_from_file(
    Path(__file__).with_suffix(".mplstyle"), use_default_template=False
)
# Colours of figures. In a page, they become CSS variables of the same names, such as `--2f62c9`, to
# which page.css gives other values on a dark screen.
COLOURS = tuple(LOOK["axes.prop_cycle"].by_key()["color"])
BLUE, ORANGE, GREEN, PURPLE, GREY = COLOURS[:5]
INK = LOOK["text.color"]
PAPER = "#fffffe"
PALE = "#a9c1f0"


class Section(NamedTuple):
    """Section of a page.

    Attributes:
        heading: Heading of the section.
        text: Markdown. `![caption](name)` inserts the figure of that name; figures on
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
        name = token.attrs["src"]
        caption = html.escape(renderer.renderInlineAsText(token.children, options, env))
        shown = _shown(figures[name], name, caption)
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


def draw(paint: Callable[[Axes], None], width: float = 4.6, height: float = 3.2) -> Figure:
    """Draw a figure in the pages' style, with a legend below it if lines or bars have labels.

    Args:
        paint: Function that draws on the axes.
        width: Width in inches.
        height: Height in inches.
    """
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
        paint(axes)
        handles, labels = axes.get_legend_handles_labels()
        if labels:
            columns = 3
            if max(map(len, labels)) > 20:
                columns = 1
            figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    return figure


def count_along(axes: Axes, unit: str = "epoch") -> None:
    """Make the horizontal axis count epochs or steps, and draw a grid for the vertical one."""
    axes.set_xlabel(unit)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.grid(axis="y")


def write_png(path: Path, figure: Figure) -> None:
    """Write a figure as a PNG file, on white.

    Raises:
        OSError: When the file cannot be written.
    """
    with whole(path) as file, matplotlib.rc_context(LOOK):
        figure.savefig(file, format="png")


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
    # drop ids, because another figure's groups have the same
    text = re.sub(
        r"^.*?(?=<svg)|<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->"
        r"|(?<=<g) id=\"[^\"]*\"",
        "",
        file.getvalue(),
        flags=re.DOTALL,
    )
    text = re.sub(r"(?<=: )#(\w{6})", r"var(--\1, #\1)", text)
    width = 96 * figure.get_figwidth() * 1.2  # CSS pixels; limits the size of text on a wide page
    return f'<span role="img" aria-label="{alt}" style="max-width: {width:.0f}px">{text}</span>'
