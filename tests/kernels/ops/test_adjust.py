"""Masks, lists, biases and penalties against their references."""

import os

import pytest
import torch

from slotline.kernels.add_bias import add_bias
from slotline.kernels.ban_ids import ban_ids
from slotline.kernels.mask_allowed import mask_allowed
from slotline.kernels.note_tokens import note_tokens
from slotline.kernels.penalise import penalise
from slotline.kernels.reference import add_bias as add_bias_reference
from slotline.kernels.reference import ban_ids as ban_ids_reference
from slotline.kernels.reference import mask_allowed as mask_allowed_reference
from slotline.kernels.reference import note_tokens as note_tokens_reference
from slotline.kernels.reference import penalise as penalise_reference

pytestmark = [] if os.environ.get("TRITON_INTERPRET") == "1" else pytest.mark.gpu
INF = float("inf")


def same(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(ours.nan_to_num(nan=12345.0), expected.nan_to_num(nan=12345.0))


def lists(rows: int, vocab: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return CSR lists: none, a few, some outside the vocabulary, more than a program takes at a time."""
    rng = torch.Generator().manual_seed(rows + vocab)
    parts = []
    for row in range(rows):
        size = (0, 3, 1, min(vocab, 2500))[row % 4]
        part = torch.randperm(vocab, generator=rng)[:size]
        parts.append(torch.cat([part, torch.tensor([-1, vocab, vocab + 99])]) if row % 4 == 2 else part)
    sizes = torch.tensor([0] + [len(part) for part in parts])
    return sizes.cumsum(0).int().to(device), torch.cat(parts).int().to(device)


def test_mask_allowed(row_case, make_logits, device):
    x = make_logits(**row_case)
    rows, vocab = x.shape
    rng = torch.Generator().manual_seed(3)
    masks = torch.randint(-(2**31), 2**31, (rows + 1, -(-vocab // 32)), generator=rng).int().to(device)
    masks[-1] = 0
    which = torch.tensor([*range(rows - 1, -1, -1), -1], dtype=torch.int32, device=device)
    expected = x.clone()
    mask_allowed(x, masks, which)
    mask_allowed_reference.mask_allowed(expected, masks, which)
    same(x, expected)


def test_ban_ids(row_case, make_logits, device):
    x = make_logits(**row_case)
    rows, vocab = x.shape
    indptr, ids = lists(rows, vocab, device)
    positions = torch.arange(rows, device=device)
    until = torch.full((rows,), 2, device=device)
    for timing in ((), (positions, until)):
        ours, expected = x.clone(), x.clone()
        ban_ids(ours, indptr, ids, *timing)
        ban_ids_reference.ban_ids(expected, indptr, ids, *timing)
        same(ours, expected)
    assert torch.equal(ours[2:], x[2:]), "a list counted from its end on"


def test_add_bias(row_case, make_logits, device):
    x = make_logits(**row_case)
    indptr, ids = lists(*x.shape, device)
    values = torch.linspace(-100, 100, len(ids), device=device)
    expected = x.clone()
    add_bias(x, indptr, ids, values)
    add_bias_reference.add_bias(expected, indptr, ids, values)
    same(x, expected)


def test_penalise(row_case, make_logits, device):
    x = make_logits(**row_case)
    rows, vocab = x.shape
    rng = torch.Generator().manual_seed(5)
    seen, expected_seen = torch.zeros(2, rows + 2, vocab, dtype=torch.int32, device=device)
    slots = torch.randperm(rows + 2, generator=rng)[:rows].int().to(device)
    slots[rows // 2] = -1
    for output in (False, True, True):
        which = torch.randint(-1, rows + 2, (70,), generator=rng).int().to(device)
        tokens = torch.randint(min(vocab + 3, 40), (70,), generator=rng).int().to(device)
        note_tokens(seen, which, tokens, output=output)
        note_tokens_reference.note_tokens(expected_seen, which, tokens, output=output)
        assert torch.equal(seen, expected_seen)
    numbers = [torch.rand(rows, generator=rng).to(device) + offset for offset in (0.7, -0.5, -0.5)]
    expected = x.clone()
    penalise(x, seen, slots, *numbers)
    penalise_reference.penalise(expected, seen, slots, *numbers)
    same(x, expected)


def test_what_is_invalid_shows_through_masks(make_logits, device):
    x = make_logits(32, rows=2)
    x[0, 3], x[1, 4] = torch.nan, INF
    mask_allowed(x, torch.zeros(2, 1, dtype=torch.int32, device=device), torch.arange(2, device=device).int())
    indptr, ids = torch.tensor([0, 1, 2], device=device).int(), torch.tensor([3, 4], device=device).int()
    ban_ids(x, indptr, ids)
    assert x[0, 3].isnan() and x[1, 4] == INF
    assert (x == -INF).sum() == 62
