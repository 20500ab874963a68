"""Fill in the tables that are generated from the code, when mkdocs builds the site."""

from collections.abc import Callable
from dataclasses import fields

from slotline.config import ENV_PREFIX, EngineConfig, option_help


def engine_options() -> str:
    """Return a table of the options of an engine."""
    described = option_help()
    lines = ["| option | default | variable | meaning |", "|---|---|---|---|"]
    for option in fields(EngineConfig):
        default = "" if option.default is None else f"`{option.default}`"
        lines.append(
            f"| `{option.name}` | {default} | `{ENV_PREFIX}{option.name.upper()}` | {described[option.name]} |"
        )
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {"<!-- engine options -->": engine_options}


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace the markers of the page by their tables; mkdocs calls this once a page."""
    for marker, table in TABLES.items():
        if marker in markdown:
            markdown = markdown.replace(marker, table())
    return markdown
