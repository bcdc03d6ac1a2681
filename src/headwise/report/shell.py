"""What every page has: the style, the templates, and pages that need no script."""

from __future__ import annotations

import re
from importlib import resources
from typing import Any, Final

import jinja2
from markupsafe import Markup

__all__ = ["environment", "indices", "small_page", "template_file"]

# After a letter that stands alone: _k, _ij, _QK; after anything: ^2, ^-0.5, ^(1/2).
_LETTER: Final = "A-Za-zΑ-Ωα-ω"
_INDEX: Final = re.compile(
    rf"(?<![{_LETTER}_])([{_LETTER}])_([{_LETTER}0-9]{{1,3}})(?![{_LETTER}0-9_])"
    r"|\^\(([^()]*)\)|\^([-−]?\d+(?:\.\d+)?)"
)


def environment() -> jinja2.Environment:
    """The templates; every value is escaped unless it is markup already."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("headwise.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["indices"] = indices
    return made


def indices(text: str) -> Markup:
    """Indices of single letters, and exponents, raised and lowered: ``d_k``, ``n^2``, ``n^(1/2)``.

    Example:
        >>> str(indices("d_k^(1/2) of W_QK in scaled_dot_product"))
        'd<sub>k</sub><sup>1/2</sup> of W<sub>QK</sub> in scaled_dot_product'
    """
    marked, end = Markup(""), 0
    for found in _INDEX.finditer(text):
        marked += text[end : found.start()]
        if found[1]:
            marked += Markup("{}<sub>{}</sub>").format(found[1], found[2])
        else:
            marked += Markup("<sup>{}</sup>").format(found[3] or found[4])
        end = found.end()
    return marked + text[end:]


def template_file(name: str) -> str:
    """The text of a file beside the templates."""
    folder = resources.files("headwise.report").joinpath("templates")
    return folder.joinpath(name).read_text(encoding="utf-8")


def small_page(template: str, **values: Any) -> str:
    """The HTML text of a page without a script: a template with the style of all pages."""
    from headwise import __version__

    style = Markup(template_file("page.css"))
    return environment().get_template(template).render(style=style, version=__version__, **values)
