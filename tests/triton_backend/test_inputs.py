"""The words that a plan becomes: every token and tile once, padding apart, columns where kernels expect them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotline.intake import choice_seed
from slotline.params import SamplingParams
from slotline.plan import FEEDBACK, RowSetup, StepPlan
from slotline.testing.engine_suite import EXTREMES

pytest.importorskip("triton")

from slotline.kernels.prefill_attention import TILE
from slotline.plugins.triton_backend.attention import COARSE, LONG, library_length, library_lengths
from slotline.plugins.triton_backend.inputs import Layout, all_single, fill, fill_single, leading_singles
from slotline.plugins.triton_backend.rows import settings_of

SLOTS = 12


def plan_of(rows: list[tuple[int, int, int, bool]]) -> StepPlan:
    """Return a plan of (slot, start, count, sample)."""
    slots, start, count, sample = (np.array(column) for column in zip(*rows, strict=True))
    tokens = np.where(np.arange(count.sum()) % 3 == 0, FEEDBACK, np.arange(count.sum()))
    return StepPlan(
        step_id=1,
        rows=slots.astype(np.int32),
        epoch=np.zeros(len(rows), np.int64),
        start=start.astype(np.int32),
        count=count.astype(np.int32),
        token_ids=tokens.astype(np.int32),
        block_indptr=np.zeros(len(rows) + 1, np.int32),
        block_ids=np.empty(0, np.int32),
        sample=sample.astype(np.bool_),
    )


@st.composite
def plans(draw: st.DrawFn, longest: int = 400) -> StepPlan:
    slots = draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True))
    singles = draw(st.integers(0, len(slots)))
    rows = []
    for at, slot in enumerate(slots):
        count = 1 if at < singles else draw(st.integers(1, longest))
        rows.append((slot, draw(st.integers(0, 900)), count, draw(st.booleans())))
    return plan_of(rows)


@given(plans(), st.integers(0, 70), st.booleans())
def test_every_token_has_its_row_and_position(plan: StepPlan, spare: int, decode: bool) -> None:
    layout = Layout.of(SLOTS, plan.num_tokens + spare, chunks=True)
    columns = layout.split(fill(layout, plan, decode=decode))
    count, chosen = plan.num_tokens, np.flatnonzero(plan.sample)
    assert columns.tokens[:count].tolist() == plan.token_ids.tolist()
    expected = [(r, p) for r, s, n in zip(plan.rows, plan.start, plan.count, strict=True) for p in range(s, s + n)]
    assert list(zip(columns.token_slots[:count], columns.positions[:count], strict=True)) == expected
    assert (columns.token_slots[count:] == SLOTS).all() and (columns.slots[len(chosen) :] == SLOTS).all()
    assert columns.slots[: len(chosen)].tolist() == plan.rows[chosen].tolist()
    for line, pick, following in zip(chosen, columns.picks, columns.following, strict=False):
        assert expected[pick] == (plan.rows[line], following - 1)
    assert columns.decoding[0] == (leading_singles(plan.count) if decode else 0)


@given(plans(), st.booleans())
def test_tiles_cover_each_chunk_once(plan: StepPlan, decode: bool) -> None:
    layout = Layout.of(SLOTS, plan.num_tokens, chunks=True)
    columns = layout.split(fill(layout, plan, decode=decode))
    covered = np.zeros(plan.num_tokens, np.int32)
    first_keys = []
    for chunk, number in zip(columns.tile_chunks, columns.tile_numbers, strict=True):
        if chunk < 0:
            continue
        begin, end = columns.begins[chunk], columns.begins[chunk + 1]
        covered[begin + number * TILE : min(begin + (number + 1) * TILE, end)] += 1
        first_keys.append(columns.starts[chunk] + number * TILE)
    single = int(columns.decoding[0])
    assert (covered[:single] == 0).all() and (covered[single:] == 1).all()
    assert first_keys == sorted(first_keys, reverse=True), "tiles with most keys start first"


@given(plans(), st.data())
def test_what_is_left_out_gets_no_tiles(plan: StepPlan, data: st.DataObject) -> None:
    single = leading_singles(plan.count)
    lines = list(range(single, len(plan)))
    chosen = data.draw(st.sets(st.sampled_from(lines))) if lines else set()
    left_out = {line: int(plan.count[line]) // TILE * TILE for line in sorted(chosen)}
    layout = Layout.of(SLOTS, plan.num_tokens, chunks=True)
    columns = layout.split(fill(layout, plan, left_out))
    tiles = [tile for tile in zip(columns.tile_chunks.tolist(), columns.tile_numbers.tolist(), strict=True)]
    expected = [
        (line - single, number)
        for line in lines
        for number in range(left_out.get(line, 0) // TILE, -(-int(plan.count[line]) // TILE))
    ]
    assert sorted(tile for tile in tiles if tile[0] >= 0) == expected


@given(st.integers(0, 70_000))
def test_library_attention_gets_few_lengths_and_all_are_known(count: int) -> None:
    known = library_lengths(70_000)
    assert len(known) == 57 + 60 and all(length % TILE == 0 for length in known)
    if count >= LONG:
        assert library_length(count) in known and count - COARSE < library_length(count) <= count
        assert library_lengths(count)[-1] == library_length(count), "nothing longer than the step is tried"


@given(plans(longest=1), st.integers(0, 9))
def test_single_tokens_have_a_shorter_way(plan: StepPlan, spare: int) -> None:
    plan.sample[:] = True
    assert all_single(plan)
    layout = Layout.of(SLOTS, len(plan) + spare, chunks=False)
    short, long = layout.split(fill_single(layout, plan)), layout.split(fill(layout, plan))
    for name in ("decoding", "slots", "following", "tokens", "positions", "token_slots"):
        assert getattr(short, name).tolist() == getattr(long, name).tolist(), name


@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 2047])
@pytest.mark.parametrize("chunks", [False, True])
def test_columns_begin_at_16_bytes(tokens: int, chunks: bool) -> None:
    layout = Layout.of(SLOTS, tokens, chunks=chunks)
    assert all(cut.start % 4 == 0 for cut in layout.cuts) and layout.words % 4 == 0
    head = Layout(SLOTS, 0, 0)
    assert layout.cuts[:4] == head.cuts[:4], "sampling finds its columns at one place whatever the step"


@pytest.mark.parametrize(("name", "value"), EXTREMES)
def test_the_ends_of_every_range_fit_into_a_row(name: str, value: Any) -> None:
    params = SamplingParams(max_tokens=2, **{name: value}).resolved({})
    seed = choice_seed(0 if params.seed is None else params.seed, 0)
    setup = RowSetup(
        row=0,
        epoch=0,
        params=params,
        seed=seed,
        token_ids=np.zeros(3, np.int32),
        prompt_len=3,
        stop_ids=(),
        min_len=3,
        max_len=5,
    )
    line = settings_of(setup, dead=False, seen=-1)[0]
    assert np.isfinite([line["temperature"], line["top_p"], line["repetition"]]).all() and line["repetition"] > 0
    assert line["top_k"] == min(max(params.top_k or 0, 0), 2**31 - 1) and int(line["seed"]) == seed
