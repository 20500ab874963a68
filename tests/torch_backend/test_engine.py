"""The backend inside an engine: what is registered through hooks reaches it."""

from pathlib import Path

import pytest

import slotline
from slotline.errors import RequestError, UnsupportedParameter
from slotline.manager import PluginManager
from slotline.plugins.processors import NoRepeatNgram

pytest_plugins = ["slotline.testing"]
OPTIONS = {"backend": "torch", "device": "cpu", "max_slots": 4, "kv_cache_tokens": 4096}


class Always:
    """A processor of somebody else's: always the token that the options name."""

    graph_safe = True

    def __init__(self, info) -> None:
        self.rows = {}

    def add(self, row, args) -> None:
        self.rows[row] = args["token"]

    def remove(self, row) -> None:
        del self.rows[row]

    def apply(self, logits, rows) -> None:
        for line, row in enumerate(rows.tolist()):
            logits[line, self.rows[row]] = 1e4


class Plugin:
    @slotline.hookspecs.hookimpl
    def slotline_register_logits_processors(self, register) -> None:
        register("always", Always)


def test_the_built_in_processor_is_registered():
    manager = PluginManager(plugins="")
    assert manager.registry("logits_processors")["no_repeat_ngram"] is NoRepeatNgram
    assert manager.backend("torch").auto_priority == 10
    manager.close()


async def test_processors_of_plugins_are_selected_by_request(tiny_llama: Path):
    manager = PluginManager(plugins="")
    manager.register(Plugin(), "somebody-else")
    prompt, common = [5, 6, 7, 5, 6], {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    async with slotline.Engine.open(str(tiny_llama), manager=manager, **OPTIONS) as engine:
        assert engine.capabilities.processors == {"always", "no_repeat_ngram"}
        plain = await engine.generate(prompt, slotline.SamplingParams(**common))
        both = {"always": {"token": 9}, "no_repeat_ngram": {"size": 2}}
        always = await engine.generate(prompt, slotline.SamplingParams(**common, extra={"always": both["always"]}))
        mixed = await engine.generate(prompt, slotline.SamplingParams(**common, extra=both))
        assert always.token_ids == [9] * 12
        assert plain.token_ids != always.token_ids
        pairs = list(zip(mixed.token_ids, mixed.token_ids[1:], strict=False))
        assert mixed.token_ids[0] == 9 and len(set(pairs)) == len(pairs)
        with pytest.raises(UnsupportedParameter, match="never"):
            await engine.generate(prompt, slotline.SamplingParams(**common, extra={"never": {}}))


async def test_bad_options_of_a_processor_fail_one_request(tiny_llama: Path):
    params = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    async with slotline.Engine.open(str(tiny_llama), **OPTIONS) as engine:
        bad = slotline.SamplingParams(**params, extra={"no_repeat_ngram": {"size": "three"}})
        with pytest.raises((RequestError, slotline.errors.NumericalError)):
            await engine.generate([1, 2], bad)
        assert len((await engine.generate([1, 2], slotline.SamplingParams(**params))).token_ids) == 4
