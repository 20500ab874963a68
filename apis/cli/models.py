"""``slotline models``: what lies in the cache, and how to get rid of it."""

from __future__ import annotations

import click

from slotline.apis.cli.group import CommandFailed
from slotline.manager import PluginManager


@click.group()
def models() -> None:
    """List or remove downloaded models."""


@models.command("list")
def list_models() -> None:
    """List downloaded models with their sizes."""
    rows = [(model.name, _size(model.bytes), model.format) for source in _sources() for model in source.list_cached()]
    if not rows:
        click.echo("no model has been downloaded", err=True)
    widths = [max(len(row[column]) for row in rows) for column in range(3)] if rows else []
    for name, size, form in rows:
        click.echo(f"{name:<{widths[0]}}  {size:>{widths[1]}}  {form}".rstrip())


@models.command("remove")
@click.argument("names", nargs=-1, required=True)
def remove_models(names: tuple[str, ...]) -> None:
    """Delete downloaded models by name."""
    for name in names:
        # Each source is asked: two may hold a model of that name.
        if not any([source.remove(name) for source in _sources()]):
            raise CommandFailed(f"no downloaded model is called {name!r}; `slotline models list` shows them")
        click.echo(f"removed {name}")


def _sources() -> list:  # type: ignore[type-arg]  # whatever plugins registered: list_cached() and remove(name)
    return list(PluginManager().registry("model_sources").values())


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
