"""What every page has: the style, the templates, and pages that need no script."""

from __future__ import annotations

from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

__all__ = ["environment", "small_page", "template_file"]


def environment() -> jinja2.Environment:
    """The templates; every value is escaped unless it is markup already."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("headwise.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def template_file(name: str) -> str:
    """The text of a file beside the templates."""
    folder = resources.files("headwise.report").joinpath("templates")
    return folder.joinpath(name).read_text(encoding="utf-8")


def small_page(template: str, **values: Any) -> str:
    """The HTML text of a page without a script: a template with the style of all pages."""
    from headwise import __version__

    style = Markup(template_file("page.css"))
    return environment().get_template(template).render(style=style, version=__version__, **values)
