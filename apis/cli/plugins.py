"""``slotline plugins``: what is loaded, and what each adds."""

from __future__ import annotations

import click

from slotline.manager import PluginManager


@click.command()
def plugins() -> None:
    """List plugins with their distribution, version and hooks, then the backends."""
    manager = PluginManager()
    for info in manager.plugins():
        origin = f"{info.distribution} {info.version}".strip()
        click.echo(f"{info.name}  {origin}")
        for hook in info.hooks:
            click.echo(f"    {hook}")
    click.echo("\nbackends")
    for name, entry in sorted(manager.registry("backends").items()):
        reason = entry.unavailable()
        click.echo(f"    {name}  {entry.summary}" + (f"  [not here: {reason}]" if reason else ""))
