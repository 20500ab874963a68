"""The generator: Random123's published vectors, and what the uniforms depend on."""

import numpy as np
import pytest

from slotline.plugins.torch_backend.philox import philox4x32, uniforms


def words(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], np.uint32)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers(counter, key, expected):
    assert philox4x32(words(counter), words(key)).tolist() == words(expected).tolist()
    rows = philox4x32(np.stack([words(counter)] * 3), np.stack([words(key)] * 3))
    assert rows.tolist() == [words(expected).tolist()] * 3


def test_uniforms_are_uniform_and_in_range():
    drawn = uniforms(np.full(100_000, 7, np.uint64), np.arange(100_000))
    assert drawn.min() >= 0 and drawn.max() < 1
    counts, _ = np.histogram(drawn, bins=100, range=(0, 1))
    chi2 = ((counts - 1000) ** 2 / 1000).sum()
    assert 50 < chi2 < 160  # 99 degrees of freedom


def test_every_bit_of_seed_and_position_counts():
    seeds = np.array([0] + [1 << bit for bit in range(64)], np.uint64)
    assert len(set(uniforms(seeds, np.zeros(65, np.int64)).tolist())) == 65
    positions = np.array([0] + [1 << bit for bit in range(40)], np.int64)
    assert len(set(uniforms(np.zeros(41, np.uint64), positions).tolist())) == 41
