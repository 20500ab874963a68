"""The part of the conformance suite that speaks to a backend directly, in step plans."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from slotline.backend import ALL_PARAMS, Capabilities
from slotline.manager import PluginManager
from slotline.model import Model
from slotline.params import LOGPROBS_MODES
from slotline.plan import FEEDBACK, Status
from slotline.testing.base import Conformance, prompt_ids
from slotline.testing.steps import StepDriver, Work


class StepConformance(Conformance):
    """What a backend owes for each plan. ``StepDriver`` checks the shape of every result on the way."""

    @pytest.fixture
    def pair(self, model: str, capabilities: Capabilities) -> Iterator[tuple[StepDriver, Model]]:
        """Load the backend for one test."""
        with self.loaded(model, deterministic=capabilities.deterministic) as pair:
            yield pair

    @pytest.fixture
    def driver(self, pair: tuple[StepDriver, Model]) -> StepDriver:
        """Return what runs steps."""
        return pair[0]

    @pytest.fixture
    def prompt(self, pair: tuple[StepDriver, Model]) -> list[int]:
        """Return a prompt that crosses a block border."""
        driver, model = pair
        return prompt_ids(model, max(driver.info.block_size, 16) + 5)

    # --- loading and closing ----------------------------------------------------------

    def test_load_describes_the_memory(self, pair: tuple[StepDriver, Model], capabilities: Capabilities) -> None:
        driver, model = pair
        info = driver.info
        assert info.num_blocks >= 2, "block 0 is scratch: one block cannot hold anything"
        assert info.block_size in capabilities.block_sizes
        assert info.vocab_size >= model.tokenizer.vocab_size
        assert info.max_model_len >= 2
        assert all(size >= 0 for size in info.memory_report.values())

    def test_block_size_is_honoured(self, model: str, capabilities: Capabilities) -> None:
        for size in capabilities.block_sizes[:2]:
            with self.loaded(model, block_size=size) as (driver, _):
                assert driver.info.block_size == size

    def test_kv_cache_holds_what_was_asked_for(self, model: str) -> None:
        with self.loaded(model, kv_cache_tokens=1024) as (driver, _):
            assert (driver.info.num_blocks - 1) * driver.info.block_size >= 1024

    def test_close_twice(self, driver: StepDriver) -> None:
        driver.backend.close()
        driver.backend.close()

    def test_close_without_load(self) -> None:
        manager = PluginManager()
        manager.backend(self.backend).create().close()
        manager.close()

    def test_capabilities_are_in_the_core_s_words(self, capabilities: Capabilities) -> None:
        assert capabilities.params <= ALL_PARAMS
        assert set(capabilities.logprobs_modes) <= set(LOGPROBS_MODES)
        assert capabilities.logprobs == bool(capabilities.logprobs_modes), "logprobs need a mode, and only they do"
        assert capabilities.logprobs or not capabilities.prompt_logprobs
        assert capabilities.pipeline_depth in (1, 2)
        sizes = capabilities.block_sizes
        assert sizes and all(self.config("any", block_size=size).block_size == size for size in sizes)

    # --- rows -------------------------------------------------------------------------

    def test_rows_come_back_in_the_plan_s_order(self, driver: StepDriver, prompt: list[int]) -> None:
        for row in (0, 1, 2, 3):
            driver.admit(row, prompt[: 3 + row])
        result = driver.step(Work(2, 5), Work(0, 3), Work(3, 6), Work(1, 4))
        assert result.rows.tolist() == [2, 0, 3, 1]
        assert result.n_tokens.tolist() == [1, 1, 1, 1]

    def test_rows_do_not_mix(self, driver: StepDriver, prompt: list[int]) -> None:
        """Each row of a step answers as it does alone, wherever it stands in the plan."""
        lengths = {0: 3, 1: len(prompt), 2: 7, 3: 4}
        alone = {}
        for row, length in lengths.items():
            driver.admit(row, prompt[-length:])
            alone[row] = driver.decode(row, 3)
            driver.end(row)
        for row, length in lengths.items():
            driver.admit(row, prompt[-length:])
        steps = [driver.step(*(Work(row, lengths[row]) for row in (3, 1, 0, 2)))]
        steps += [driver.step(*(Work(row, 1) for row in order)) for order in ((0, 1, 2, 3), (2, 0, 3, 1))]
        for row, expected in alone.items():
            got = [int(step.tokens[step.rows.tolist().index(row), 0]) for step in steps]
            assert got == expected, f"row {row}"

    def test_a_row_can_be_left_out_of_a_step(self, driver: StepDriver, prompt: list[int]) -> None:
        driver.admit(0, prompt)
        expected = driver.decode(0, 3)
        driver.end(0)
        driver.admit(0, prompt)
        driver.admit(1, prompt[:4])
        first = driver.step(Work(0, len(prompt)), Work(1, 4))
        driver.step(Work(1, 1))
        second = driver.step(Work(1, 1), Work(0, 1))
        third = driver.step(Work(0, 1))
        assert [first.tokens[0, 0], second.tokens[1, 0], third.tokens[0, 0]] == expected

    def test_a_chunk_that_does_not_sample(self, driver: StepDriver, prompt: list[int]) -> None:
        driver.admit(0, prompt)
        whole = driver.decode(0, 3)
        driver.end(0)
        driver.admit(0, prompt)
        for _ in range(2):
            chunk = driver.step(Work(0, 5, sample=False))
            assert chunk.n_tokens.tolist() == [0] and chunk.status.tolist() == [Status.OK]
        assert driver.decode(0, 3) == whole

    def test_a_token_fed_back_equals_the_token_spelt_out(self, driver: StepDriver, prompt: list[int]) -> None:
        driver.admit(0, prompt)
        fed_back = driver.decode(0, 4)
        driver.end(0)
        driver.admit(0, prompt)
        spelt = driver.decode(0, 1)
        while len(spelt) < 4:
            driver.tell(0, spelt[-1])
            plan, handle = driver.launch(Work(0, 1))
            assert FEEDBACK not in plan.token_ids
            spelt.append(int(driver.fetch((plan, handle)).tokens[0, 0]))
        assert spelt == fed_back

    def test_a_preempted_row_goes_on_where_it_was(self, driver: StepDriver, prompt: list[int]) -> None:
        """After a preemption the setup holds prompt and output, and all of it is computed again."""
        driver.admit(0, prompt, max_tokens=8)
        expected = driver.decode(0, 6)
        driver.end(0)
        driver.admit(2, prompt, max_tokens=8)
        sampled = driver.decode(2, 3)
        driver.end(2)
        driver.admit(1, prompt, output=sampled, max_tokens=8)
        assert sampled + driver.decode(1, 3) == expected

    def test_a_row_is_new_to_its_next_occupant(self, driver: StepDriver, prompt: list[int]) -> None:
        driver.admit(0, prompt[:4])
        expected = driver.decode(0, 3)
        driver.end(0)
        driver.admit(0, prompt)
        driver.decode(0, 3)
        driver.end(0)
        driver.admit(0, prompt[:4])  # ended and admitted in one plan
        assert driver.decode(0, 3) == expected

    def test_release_is_idempotent(self, driver: StepDriver, prompt: list[int]) -> None:
        driver.admit(0, prompt)
        expected = driver.decode(0, 2)
        driver.release(0)
        driver.release(0, 3)
        driver.release()
        driver.admit(0, prompt)
        assert driver.decode(0, 2) == expected

    def test_two_steps_in_flight(self, driver: StepDriver, prompt: list[int], capabilities: Capabilities) -> None:
        if capabilities.pipeline_depth < 2:
            pytest.skip("pipeline_depth is 1")
        driver.admit(0, prompt)
        expected = driver.decode(0, 3)
        driver.end(0)
        driver.admit(0, prompt)
        launched = [driver.launch(Work(0, len(prompt))), driver.launch(Work(0, 1))]
        got = [driver.fetch(launched.pop(0))]
        launched.append(driver.launch(Work(0, 1)))
        got += [driver.fetch(step) for step in launched]
        assert [int(result.tokens[0, 0]) for result in got] == expected

    # --- ends -------------------------------------------------------------------------

    def test_a_stop_id_ends_the_row(self, driver: StepDriver, prompt: list[int]) -> None:
        driver.admit(0, prompt)
        sampled = driver.decode(0, 3)
        driver.end(0)
        driver.admit(0, prompt, stop_ids=[sampled[-1]])
        driver.admit(1, prompt)
        first = sampled.index(sampled[-1])
        result = driver.step(Work(0, len(prompt)), Work(1, len(prompt)))
        for _ in range(first):
            assert result.status.tolist() == [Status.OK, Status.OK]
            result = driver.step(Work(0, 1), Work(1, 1))
        assert result.status.tolist() == [Status.STOP, Status.OK] and result.n_tokens.tolist() == [1, 1]
        after = driver.step(Work(0, 1), Work(1, 1))
        assert after.status.tolist() == [Status.DEAD, Status.OK] and after.n_tokens.tolist() == [0, 1]

    def test_a_stop_id_does_not_end_the_row_before_min_len(
        self, driver: StepDriver, prompt: list[int], capabilities: Capabilities
    ) -> None:
        if "min_tokens" not in capabilities.params:
            pytest.skip("min_tokens is not declared")
        driver.admit(0, prompt)
        token = driver.decode(0, 1)[0]
        driver.end(0)
        driver.admit(0, prompt, stop_ids=[token], min_tokens=2)
        assert len(driver.decode(0, 3)) == 3

    # --- logprobs ---------------------------------------------------------------------

    @pytest.mark.parametrize("width", [0, 1, 3])
    def test_logprobs_only_for_rows_that_ask(
        self, driver: StepDriver, prompt: list[int], capabilities: Capabilities, width: int
    ) -> None:
        if not capabilities.logprobs:
            pytest.skip("logprobs are not declared")
        driver.admit(0, prompt)
        driver.admit(1, prompt, logprobs=width)
        driver.admit(2, prompt, logprobs=width)
        works = Work(0, len(prompt)), Work(2, 3, sample=False), Work(1, len(prompt))
        columns = driver.step(*works).logprobs
        assert columns is not None and len(columns) == 2
        lengths = [int(n) for n in columns.indptr[1:] - columns.indptr[:-1]]
        assert lengths[0] == 0 and 1 <= lengths[1] <= width + 1
        assert columns.ranks[0] == 1, "a greedy token is the most likely one"

    def test_logprobs_are_probabilities(
        self, driver: StepDriver, prompt: list[int], capabilities: Capabilities
    ) -> None:
        """Over the whole vocabulary, or as much of it as may be asked for, they sum to one at most."""
        if not capabilities.logprobs:
            pytest.skip("logprobs are not declared")
        width = min(capabilities.max_logprobs, driver.info.vocab_size)
        driver.admit(0, prompt, logprobs=width)
        columns = driver.step(Work(0, len(prompt))).logprobs
        assert columns is not None
        total = sum(math.exp(value) for value in columns.values.tolist())
        assert total <= 1 + 1e-4
        if width == driver.info.vocab_size:
            assert total >= 1 - 1e-3

    def test_prompt_logprobs_cover_the_prompt_once(
        self, driver: StepDriver, prompt: list[int], capabilities: Capabilities
    ) -> None:
        if not capabilities.prompt_logprobs:
            pytest.skip("prompt_logprobs are not declared")
        delivered: dict[str, list[float]] = {}
        for name, chunks in (("whole", [len(prompt)]), ("chunked", [1, 4, len(prompt) - 5])):
            driver.admit(0, prompt, prompt_logprobs=2)
            results = [driver.step(Work(0, n, sample=at == len(chunks))) for at, n in enumerate(chunks, 1)]
            delivered[name] = []
            for result in results:
                assert result.prompt_counts is not None and result.prompt_logprobs is not None
                delivered[name] += result.prompt_logprobs.values.tolist()
            counted = sum(int(r.prompt_counts.sum()) for r in results if r.prompt_counts is not None)
            assert counted == len(prompt) - 1, "the first position has none, each other one has one"
            driver.end(0)
        assert delivered["chunked"] == pytest.approx(delivered["whole"], abs=1e-3)

    def test_embeddings_are_the_same_in_chunks_and_in_company(
        self, driver: StepDriver, prompt: list[int], capabilities: Capabilities
    ) -> None:
        if not capabilities.embeddings:
            pytest.skip("embeddings are not declared")
        driver.admit(0, prompt, max_tokens=0, embed=True)
        ((_, alone),) = driver.step(Work(0, len(prompt), sample=False)).embeddings
        driver.end(0)
        for row in (0, 1):
            driver.admit(row, prompt if row else prompt[::-1], max_tokens=0, embed=True)
        assert not driver.step(Work(0, 1, sample=False), Work(1, 4, sample=False)).embeddings
        (_, other), (_, same) = driver.step(
            Work(0, len(prompt) - 1, sample=False), Work(1, len(prompt) - 4, sample=False)
        ).embeddings
        assert same == pytest.approx(alone, abs=1e-3) and other != pytest.approx(alone, abs=1e-3)

    def test_logprobs_are_the_same_in_company(
        self, driver: StepDriver, prompt: list[int], capabilities: Capabilities
    ) -> None:
        if not capabilities.logprobs:
            pytest.skip("logprobs are not declared")
        driver.admit(0, prompt, logprobs=1)
        alone = driver.step(Work(0, len(prompt))).logprobs
        driver.end(0)
        for row in (0, 1):
            driver.admit(row, prompt, logprobs=1)
        both = driver.step(Work(1, len(prompt)), Work(0, len(prompt))).logprobs
        assert alone is not None and both is not None
        assert both.values.tolist() == pytest.approx(alone.values.tolist() * 2, abs=1e-3)
