"""Builds HTML and SVG from elements and escapes all other text."""

from __future__ import annotations

from html import escape

from raydl.text.redaction import redact


class Html(str):
    """Markup that goes into a page unescaped."""

    __slots__ = ()


def element(name: str, /, *children: object, **attributes: object) -> Html:
    """Return an element.

    Args:
        name: name of the tag.
        children: content. Elements stay unchanged, None is omitted, other values are escaped.
        attributes: attributes by name: ``class_`` becomes ``class`` and ``stroke_width`` becomes
            ``stroke-width``. An attribute whose value is None is omitted.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in ("meta", "input"):  # a void element has no end tag
        return Html(f"<{name}{written}>")
    content = "".join(
        c if isinstance(c, Html) else _escaped(str(c)) for c in children if c is not None
    )
    return Html(f"<{name}{written}>{content}</{name}>")


def table(
    head: list[str], rows: list[list[object]], *, numbers: tuple[str, ...] = (), kind: str = ""
) -> Html:
    """Return a table that scrolls sideways on a narrow page.

    Args:
        head: names of the columns.
        rows: cells, texts or elements.
        numbers: columns that are right-aligned.
        kind: a class of the style sheet.
    """
    sides = ["n" if name in numbers else None for name in head]
    cells = [element("th", name, class_=side) for name, side in zip(head, sides, strict=True)]
    body = [
        element("tr", *(element("td", c, class_=s) for c, s in zip(row, sides, strict=True)))
        for row in rows
    ]
    whole = element(
        "table",
        element("thead", element("tr", *cells)),
        element("tbody", *body),
        class_=kind or None,
    )
    return element("div", whole, class_="wide")


def folded(summary: str, *children: object) -> Html:
    """Return a block that opens with a click on its summary."""
    return element("details", element("summary", summary), *children)


def swatch(color: str, *, is_dashed: bool = False) -> Html:
    """Return a small square in a CSS color, paler for a dashed line."""
    square = element("rect", x=0, y=1, width=12, height=12, rx=2, style=f"fill:{color}")
    kind = "swatch dashed" if is_dashed else "swatch"
    return element("svg", square, viewBox="0 0 12 14", class_=kind, aria_hidden="true")


def _escaped(text: str) -> str:
    """Return the text escaped for HTML, without the credentials of URIs."""
    return escape(redact(text))
