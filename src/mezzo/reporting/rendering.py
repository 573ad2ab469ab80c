"""Render a page in the look that all pages share: its style, scripts, charts and tables."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module, resources
from typing import Any

from mezzo._errors import UnsupportedError


def render_page(template: str, function: str, charts: Mapping[str, Any], **values: Any) -> str:
    """Return the HTML of a page, which opens without a network.

    Args:
        template: A jinja2 template that extends `base.html` and fills its block `main`.
        function: The public function that writes the page, for errors.
        charts: `figures`: figures of plotly by the id of their element; `maps`: heat maps.
        **values: What the template reads: `title` and `kind` for the title of the page, and more.

    Raises:
        UnsupportedError: jinja2 or plotly is not installed.
    """
    jinja2 = _required("jinja2", function)
    plotly = _required("plotly.offline", function).get_plotlyjs()
    parts = {name: asset("mezzo.reporting", name) for name in ("base.html", "table.html")}
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=jinja2.DictLoader(parts)
    )
    markup = jinja2.utils.markupsafe.Markup
    return str(
        environment.from_string(template).render(
            values,
            charts=charts,
            style=markup(asset("mezzo.reporting", "page.css")),
            script=markup(asset("mezzo.reporting", "page.js")),
            plotly=markup(script_text(plotly)),
        )
    )


def asset(package: str, name: str) -> str:
    """Return the text of a file that is part of a package."""
    return (resources.files(package) / name).read_text(encoding="utf-8")


def script_text(script: str) -> str:
    r"""Return a script as it can stand in a page: an end tag in it would end it.

    >>> script_text("'</script>'")
    "'<\\/script>'"
    """
    return script.replace("</script", "<\\/script")


def _required(name: str, function: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise UnsupportedError(
            f"{function}() needs {name.partition('.')[0]}, which is not installed. Run:"
            " pip install 'mezzo[report]'"
        ) from error
