"""The modules that a layout's names mean in one model: its attention modules, blocks and stacks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from headwise.circuits.layouts import HeadLayout
from headwise.observation.sites import AttentionModule

__all__ = ["Paths", "Places"]


@dataclass(frozen=True)
class Paths:
    """The modules that matter for one attention module; "" where there is none."""

    output: str
    norm: str
    source_norm: str
    output_norm: str


class Places:
    """All modules of a model by path, and what stands around each attention module."""

    def __init__(self, model: nn.Module, sites: Iterable[AttentionModule]) -> None:
        self.modules: Mapping[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        self.sites = list(sites)

    def at(self, path: str) -> nn.Module | None:
        """The module at a path; None for "" and for what is not there."""
        return self.modules.get(path) if path else None

    def path(self, name: str | None, site: AttentionModule) -> str:
        """A layout's name as a path; "" for None and for modules that are not there."""
        if name is None:
            return ""
        words = self._words(site)
        if any(not words[word] and word != "stack" for word in re.findall(r"{(\w+)}", name)):
            return ""  # no such block or encoder; the stack alone may be the model itself
        path = self.name(name, site)
        return path if path in self.modules else ""

    def name(self, name: str, site: AttentionModule) -> str:
        """A layout's name as a path, whether there is a module or not."""
        return name.format(**self._words(site)).removeprefix(".")

    def first(self, names: Iterable[str], site: AttentionModule) -> str:
        """The first of some names that is there, as a path."""
        return next((path for name in names if (path := self.path(name, site))), "")

    def paths(self, layout: HeadLayout, site: AttentionModule) -> Paths:
        """Output projection and norms of an attention module."""
        norm = layout.cross_norm if site.named_cross else layout.norm
        previous = norm is not None and "{previous}" in norm
        if previous and not self._words(site)["previous"]:
            norm = layout.first
        own = self.path(norm, site)
        source = self.first(layout.source_norm, site) if site.named_cross else own
        return Paths(
            output=self.path(layout.output, site),
            norm=own,
            source_norm=source,
            output_norm=self.path(layout.output_norm, site),
        )

    def _words(self, site: AttentionModule) -> dict[str, str]:
        block, number, container = _block(site.path)
        encoder = re.sub(r"(^|\.)decoder$", r"\1encoder", site.stack)
        before = f"{container}.{number - 1}"
        return {
            "attention": site.path,
            "parent": site.path.rpartition(".")[0],
            "block": block,
            "previous": before if before in self.modules else "",
            "stack": site.stack,
            "last": self._last(site.stack),
            "encoder": encoder if encoder != site.stack else "",
            "source": self._last(encoder),
        }

    def _last(self, stack: str) -> str:
        found = [_block(s.path) for s in self.sites if s.stack == stack]
        return max(found, key=lambda block: block[1])[0] if found else ""


def _block(path: str) -> tuple[str, int, str]:
    """The block that a module is in, its number, and the list it is in."""
    found = re.match(r"(.*?)\.(\d+)(?=\.|$)", f".{path}")
    if found is None:
        return "", 0, ""
    container = found.group(1).removeprefix(".")
    return f"{container}.{found.group(2)}", int(found.group(2)), container
