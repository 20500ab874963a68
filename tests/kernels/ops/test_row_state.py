"""The row state: single words written, looked up for tokens and for sampling, and changed by what came out."""

import os

import pytest
import torch

from slotline.kernels import finish_rows, hold_stops, row_layout, row_settings, token_inputs, write_words
from slotline.kernels.reference import finish_rows as finish_reference
from slotline.kernels.reference import hold_stops as hold_reference
from slotline.kernels.reference import row_settings as settings_reference
from slotline.kernels.reference import token_inputs as inputs_reference
from slotline.kernels.reference import write_words as write_reference
from slotline.plan import Status

pytestmark = [] if os.environ.get("TRITON_INTERPRET") == "1" else pytest.mark.gpu
SLOTS, PAGES = 9, 6


@pytest.fixture
def state(device: torch.device) -> torch.Tensor:
    """Return random rows: some dead, some that stop, the last one of nobody."""
    rng = torch.Generator().manual_seed(3)
    found = torch.randint(1, 90, (SLOTS + 1, row_layout.words(PAGES)), generator=rng).int()
    found[:, row_layout.DEAD.value] = torch.tensor([0, 1, 0, 0, 0, 1, 0, 0, 0, 1])
    found[:, row_layout.STOPS.value] = torch.tensor([0, 2, 3, 32, 1, 0, 5, 2, 1, 0])
    found[:, row_layout.MIN_LEN.value] = torch.tensor([0, 0, 70, 0, 0, 0, 0, 300, 0, 0])
    found[:, row_layout.WIDTH.value] = torch.tensor([-1, 3, 0, 5, -1, -1, 20, 1, -1, 4])
    found[:, row_layout.SEED.value] = torch.arange(-5, 5)
    for first in (row_layout.TEMPERATURE.value, row_layout.REPETITION.value):  # three words each
        found[:, first : first + 3] = torch.rand(SLOTS + 1, 3, generator=rng).view(torch.int32)
    found[:, row_layout.SEEN.value] = torch.tensor([3, 1, -1, 0, 2, 5, -1, -1, 8, 9])
    found[-1, row_layout.TABLE.value :] = 0
    return found.to(device)


def equal(ours: tuple, theirs: tuple) -> None:
    for name, a, b in zip(type(theirs)._fields, ours, theirs, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), name


def test_outcomes_have_the_numbers_of_the_core() -> None:
    ours = [getattr(row_layout, f"ROW_{name}").value for name in ("OK", "STOPPED", "NOT_FINITE", "DEAD")]
    assert ours == [Status.OK, Status.STOP, Status.NAN, Status.DEAD]


@pytest.mark.parametrize("count", [0, 1, 7, 2000])
def test_write_words(count: int, device: torch.device) -> None:
    ours = torch.zeros((50, 48), dtype=torch.int32, device=device)
    theirs = ours.clone()
    places = torch.randperm(ours.numel(), generator=torch.Generator().manual_seed(1))[:count].int().to(device)
    values = torch.arange(count, dtype=torch.int32, device=device) - 3
    write_words.write_words(ours, places, values)
    write_reference.write_words(theirs, places, values)
    assert torch.equal(ours, theirs) and int((ours != 0).sum()) == max(count - (count > 3), 0)


@pytest.mark.parametrize(("count", "decoding", "lines"), [(1, 1, 1), (7, 7, 7), (300, 4, 9), (300, 0, 9)])
def test_token_inputs(count: int, decoding: int, lines: int, state: torch.Tensor, device: torch.device) -> None:
    rng = torch.Generator().manual_seed(count)
    tokens = torch.randint(-1, 3, (count,), generator=rng).int().to(device)
    positions = torch.randint(0, PAGES * row_layout.PAGE, (count,), generator=rng).int().to(device)
    slots = torch.randint(0, SLOTS + 1, (count,), generator=rng).int().to(device)
    args = (state, tokens, positions, slots, torch.tensor([decoding], dtype=torch.int32, device=device), lines)
    equal(token_inputs.token_inputs(*args), inputs_reference.token_inputs(*args))


@pytest.mark.parametrize("slots", [[3], [9, 1, 0, 4, 6, 9], list(range(10)) * 20])
def test_row_settings(slots: list[int], state: torch.Tensor, device: torch.device) -> None:
    lines = torch.tensor(slots, dtype=torch.int32, device=device)
    args = (state, lines, lines * 7 + 1)
    equal(row_settings.row_settings(*args), settings_reference.row_settings(*args))


def test_finish_rows(state: torch.Tensor, device: torch.device) -> None:
    slots = torch.tensor([8, 0, 1, 2, 3, 7, 6, 4, 9, 9], dtype=torch.int32, device=device)
    first_stop = state[slots.long(), row_layout.STOP_IDS.value]
    other = torch.tensor([0, 0, 0, 0, 31, 0, 4, 0, 0, 0], dtype=torch.int32, device=device)
    tokens = state[slots.long(), row_layout.STOP_IDS.value + other.long()]  # each row's own, if it has any
    tokens[7] = first_stop[7] + 1
    found = torch.tensor([2, 0, 0, 0, 0, 0, 1, 0, 0, 0], dtype=torch.int32, device=device)
    following = torch.full_like(slots, 70)
    theirs = state.clone()
    status = finish_rows.finish_rows(state, slots, following, tokens, found)
    assert torch.equal(status, finish_reference.finish_rows(theirs, slots, following, tokens, found))
    assert status.tolist() == [2, 0, 3, 1, 1, 0, 2, 0, 3, 3]
    assert torch.equal(state, theirs)


def test_hold_stops(state: torch.Tensor, device: torch.device) -> None:
    """Below its minimum a living row loses its stop ids; NaN stays NaN, and ids past the end are passed over."""
    slots = torch.tensor([2, 3, 1, 7, 8, 9, 2], dtype=torch.int32, device=device)
    following = torch.tensor([69, 5, 5, 299, 0, 0, 70], dtype=torch.int32, device=device)
    state[3, row_layout.MIN_LEN.value] = 6
    logits = torch.randn(len(slots), 60, generator=torch.Generator().manual_seed(2)).to(device)
    logits[0, int(state[2, row_layout.STOP_IDS.value]) % 60] = float("nan")
    theirs = logits.clone()
    hold_stops.hold_stops(logits, state, slots, following)
    hold_reference.hold_stops(theirs, state, slots, following)
    torch.testing.assert_close(logits, theirs, rtol=0, atol=0, equal_nan=True)
    assert (logits[1] == float("-inf")).sum() > 5 and logits[[2, 4, 5, 6]].isfinite().all()
