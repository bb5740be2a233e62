"""HTML and SVG put together from elements; whatever is not an element already is escaped."""

from __future__ import annotations

from html import escape

from raydl.redaction import redact

_VOID = ("meta",)


class Html(str):
    """Text that is markup, and safe to put into a page as it is."""

    __slots__ = ()


def element(name: str, /, *children: object, **attributes: object) -> Html:
    """Return one element with its children inside.

    Args:
        name: of the tag.
        children: elements stay as they are, None is left out, all else is escaped text.
        attributes: ``class_`` becomes ``class`` and ``stroke_width`` ``stroke-width``; one
            whose value is None is left out.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def join(parts: object) -> Html:
    """Return elements and texts one after the other, the texts escaped."""
    assert isinstance(parts, (list, tuple))
    return Html(
        "".join(p if isinstance(p, Html) else _escaped(str(p)) for p in parts if p is not None)
    )


def table(
    head: list[str], rows: list[list[object]], *, numbers: tuple[str, ...] = (), kind: str = ""
) -> Html:
    """Return a table that scrolls sideways where the page is narrow.

    Args:
        head: names of the columns.
        rows: texts or elements.
        numbers: columns that are set flush right.
        kind: a class for the style sheet.
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
    """Return something that a click unfolds."""
    return element("details", element("summary", summary), *children)


def swatch(color: str, *, is_dashed: bool = False) -> Html:
    """Return a small square in a colour of CSS; a pale one for a dashed line."""
    square = element("rect", x=0, y=1, width=12, height=12, rx=2, style=f"fill:{color}")
    kind = "swatch dashed" if is_dashed else "swatch"
    return element("svg", square, viewBox="0 0 12 14", class_=kind, aria_hidden="true")


def _escaped(text: str) -> str:
    """Return text as it may stand in a page, credentials of URIs left out."""
    return escape(redact(text))
