"""``slotline inspect``: architecture, parameters, and whether a model fits."""

from __future__ import annotations

from pathlib import Path

import click

from slotline.config import EngineConfig
from slotline.errors import ConfigError
from slotline.manager import PluginManager
from slotline.plugins.models.checkpoint import Checkpoint
from slotline.plugins.models.inspection import Room, described, kv_bytes_per_token, needs, size, weight_bytes
from slotline.plugins.models.opening import locate, open_checkpoint
from slotline.plugins.models.progress import for_terminal

_SLOTS, _LENGTH = (1, 8, 64), 2048
_AT_LEAST_ONE = click.IntRange(min=1)


@click.command("inspect")
@click.argument("model", required=False)
@click.option("--slots", type=_AT_LEAST_ONE, multiple=True, help="Sequences at once; may be given several times.")
@click.option("--length", type=_AT_LEAST_ONE, multiple=True, help="Tokens of each; may be given several times.")
@click.option("--device", help="cpu, cuda or cuda:N.")
@click.option("--dtype", help="float32, bfloat16 or float16.")
@click.option("--trust-pickle", is_flag=True, help="Look into .bin files, too.")
def inspect_model(
    model: str | None,
    slots: tuple[int, ...],
    length: tuple[int, ...],
    device: str | None,
    dtype: str | None,
    trust_pickle: bool,
) -> None:
    """Show what a model is and whether it fits, without loading it."""
    config = EngineConfig.from_sources(
        {"model": model, "device": device, "dtype": dtype, "trust_pickle": trust_pickle or None}
    )
    manager = PluginManager()
    located = locate(config, manager.registry("model_sources"), for_terminal())
    checkpoint = open_checkpoint(located.path, config, manager)
    room = _room(config)
    context = checkpoint.config.context_length
    if max(length, default=0) > context:
        raise ConfigError(f"--length is {max(length)}; allowed: 1 to {context}, the model's context")
    click.echo(f"{config.model} ({_origin(located.source, located.path)})")
    _lines([*described(checkpoint), *_memory(checkpoint, room)])
    click.echo()
    _table(checkpoint, room, list(slots or _SLOTS), list(length) or sorted({min(_LENGTH, context), context}))


def _room(config: EngineConfig) -> Room:
    import torch

    from slotline.plugins.torch_backend.backend import choose_device, choose_dtype
    from slotline.plugins.torch_backend.memory import free_host_memory

    device = choose_device(config.device)
    dtype = choose_dtype(config, device)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_memory()
    return Room(device=str(device), dtype=str(dtype).removeprefix("torch."), itemsize=dtype.itemsize, free=free)


def _origin(source: str, path: Path) -> str:
    return source if path.name in source else f"{source}, {path.name}"


def _memory(checkpoint: Checkpoint, room: Room) -> list[tuple[str, str]]:
    return [
        ("loaded", f"{size(weight_bytes(checkpoint, room))} as {room.dtype} on {room.device}"),
        ("KV per token", size(kv_bytes_per_token(checkpoint.config, room))),
        ("free memory", size(room.free)),
    ]


def _lines(pairs: list[tuple[str, str]]) -> None:
    width = max(len(label) for label, _ in pairs)
    for label, value in pairs:
        click.echo(f"  {label:<{width}}  {value}")


def _table(checkpoint: Checkpoint, room: Room, slots: list[int], lengths: list[int]) -> None:
    rows = [("slots", "tokens each", "KV cache", "with weights", "")]
    rows += [
        (f"{n.slots:,}", f"{n.length:,}", size(n.kv_bytes), size(n.nbytes), "fits" if n.fits else "does not fit")
        for n in needs(checkpoint, room, slots, lengths)
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for *numbers, verdict in rows:
        click.echo("  ".join([f"{n:>{w}}" for n, w in zip(numbers, widths, strict=True)] + [verdict]).rstrip())
