"""``slotline tune``: measure how products are computed fastest on this GPU, and keep it for the next start."""

from __future__ import annotations

from pathlib import Path

import click

from slotline.config import EngineConfig
from slotline.errors import ConfigError
from slotline.manager import PluginManager
from slotline.plugins.models.cache import cache_dir
from slotline.plugins.models.decoder import DecoderConfig
from slotline.plugins.models.opening import locate, open_checkpoint
from slotline.plugins.models.progress import for_terminal


@click.command("tune")
@click.argument("models", nargs=-1, required=True)
@click.option("--device", help="cuda or cuda:N.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write here, not into the cache.")
@click.option("--verbose", is_flag=True, help="Show the three best ways for each number of rows.")
def tune_models(models: tuple[str, ...], device: str | None, out: Path | None, verbose: bool) -> None:
    """Measure the products of MODELS on this GPU; the Triton backend reads what came out when it starts.

    A minute or two for each model. What was measured before is kept, unless it is measured again.
    """
    import torch
    import triton

    from slotline.plugins.torch_backend.backend import choose_device
    from slotline.plugins.triton_backend.tune import Stopwatch, products, tune
    from slotline.plugins.triton_backend.tuning import file_name, read, write

    manager = PluginManager()
    chosen = choose_device(EngineConfig.from_sources({"device": device}).device)
    if chosen.type != "cuda":
        raise ConfigError(f"tuning needs a CUDA GPU, and device is {chosen}; the Triton backend runs nowhere else")
    name = torch.cuda.get_device_name(chosen)
    path = out or cache_dir() / "tuned" / file_name(name)
    measured = read(path)

    def keep() -> None:
        write(path, measured, device=name, torch=torch.__version__, triton=triton.__version__)

    keep()  # where it cannot be written, this is the time to say so
    watch = Stopwatch(chosen, torch.bfloat16)
    report = click.echo if verbose else lambda line: None
    for model in models:
        for product in products(_described(model, manager)):
            measured[product] = tune(product, watch, report)
            said = ", ".join(f"to {most} rows {way}" for most, way in measured[product])
            click.echo(f"{model}: [{product.rows}, {product.columns}] {product.use.value}: {said}")
        keep()
    click.echo(f"written to {path}")


def _described(model: str, manager: PluginManager) -> DecoderConfig:
    config = EngineConfig.from_sources({"model": model})
    path = locate(config, manager.registry("model_sources"), for_terminal()).path
    return open_checkpoint(path, config, manager).config
