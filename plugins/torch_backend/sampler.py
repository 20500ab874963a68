"""From logits to tokens, in one fixed order.

allowed ids and grammar masks; bad words and min_tokens; logit_bias; repetition; frequency and
presence; processors of plugins; temperature; min_p; top_k; top_p; the draw. Greedy rows take the
best after the processors. Every stage costs the rows that use it, and a row's outcome does not
depend on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slotline.plan import LongArray, MaskHandle
from slotline.plugins.torch_backend.adjusting import adjust, apply_masks
from slotline.plugins.torch_backend.philox import uniforms
from slotline.plugins.torch_backend.processing import Processors
from slotline.plugins.torch_backend.ranking import keep_best, nucleus
from slotline.plugins.torch_backend.rows import Row

_DROPPED = float("-inf")


@dataclass(frozen=True, slots=True)
class Sampled:
    """What came out for R rows.

    Attributes:
        tokens: [R]
        valid: [R] false where a row had no finite logits, or nothing was allowed; its token means nothing.
        scores: [R, V] the logits that the choice was made from; the temperature and what follows it are applied to
            rows that are not greedy.
    """

    tokens: LongArray
    valid: npt.NDArray[np.bool_]
    scores: Tensor


class Sampler:
    """Choose one token for each row.

    Args:
        processors: logits processors of plugins.
    """

    def __init__(self, processors: Processors) -> None:
        self._processors = processors

    def sample(
        self, logits: Tensor, rows: Sequence[Row], positions: LongArray, masks: MaskHandle | None = None
    ) -> Sampled:
        """Choose.

        Args:
            logits: [R, V] float32, changed in place.
            rows: [R]
            positions: [R] absolute position of the token that is sampled.
            masks: allowed tokens by slot, waited for before anything else.
        """
        changed = masks is not None or any(row.special for row in rows)
        finite = logits.amax(-1).isfinite() if changed else None  # a maximum passes NaN on, and infinity
        if masks is not None:
            apply_masks(logits, [row.setup.row for row in rows], masks)
        adjust(logits, [(i, row) for i, row in enumerate(rows) if row.special], positions, self._processors)
        tokens, valid = _best(logits)
        if finite is not None:
            valid &= finite.cpu().numpy()
        drawing = np.flatnonzero(valid & np.array([not row.greedy for row in rows], bool))
        if len(drawing):
            self._draw_some(logits, rows, positions, drawing, tokens)
        # The best token survives any cut; only processed logprobs show what the cut left out beside it.
        shown = valid & np.array([row.greedy and row.processed_logprobs and row.truncates for row in rows], bool)
        if shown.any():
            _truncate_some(logits, rows, np.flatnonzero(shown))
        return Sampled(tokens, valid, logits)

    def _draw_some(
        self, logits: Tensor, rows: Sequence[Row], positions: LongArray, drawing: LongArray, tokens: LongArray
    ) -> None:
        """Replace the tokens of rows that draw, and leave their scores in ``logits``."""
        chosen = [rows[i] for i in drawing.tolist()]
        whole = len(drawing) == len(rows)
        select = torch.from_numpy(drawing).to(logits.device)
        scores = logits if whole else logits[select]
        scores /= _column([row.setup.params.temperature or 1.0 for row in chosen], scores)
        _truncate(scores, chosen)
        tokens[drawing] = _draw(scores, chosen, positions[drawing])
        if not whole:
            logits[select] = scores


def _best(logits: Tensor) -> tuple[LongArray, npt.NDArray[np.bool_]]:
    """Return each row's best id, the first of equals, and whether its logit is a finite number."""
    if logits.device.type == "cpu":  # NumPy finds a maximum's place in a tenth of PyTorch's time
        values = logits.numpy()
        ids = values.argmax(-1)
        return ids, np.isfinite(np.take_along_axis(values, ids[:, None], -1)[:, 0])
    peaks, best = logits.max(-1)
    return best.cpu().numpy(), peaks.isfinite().cpu().numpy()


def _truncate(scores: Tensor, rows: Sequence[Row]) -> None:
    """Apply min_p, top_k and top_p to the rows that have them."""
    if not any(row.truncates for row in rows):
        return
    lines = np.array([i for i, row in enumerate(rows) if row.truncates], np.int64)
    params = [rows[i].setup.params for i in lines.tolist()]
    whole = len(lines) == len(rows)
    select = torch.from_numpy(lines).to(scores.device)
    part = scores if whole else scores[select]
    floor = np.array([p.min_p or 0.0 for p in params], np.float64)
    if floor.any():
        with np.errstate(divide="ignore"):
            gap = torch.from_numpy(np.log(floor).astype(np.float32)).to(part.device)[:, None]
        part.masked_fill_(part < part.amax(-1, keepdim=True) + gap, _DROPPED)
    vocab = part.shape[-1]
    top_k = np.array([min(k, vocab) if (k := p.top_k or 0) > 0 else vocab for p in params], np.int64)
    top_p = np.array([1.0 if p.top_p is None else p.top_p for p in params], np.float64)
    cut = np.flatnonzero((top_k < vocab) | (top_p < 1.0))
    if len(cut):
        index = torch.from_numpy(cut).to(part.device)
        rest = part if len(cut) == len(part) else part[index]
        keep_best(rest, nucleus(rest, top_k[cut], top_p[cut]))
        if rest is not part:
            part[index] = rest
    if not whole:
        scores[select] = part


def _truncate_some(logits: Tensor, rows: Sequence[Row], chosen: LongArray) -> None:
    """Apply min_p, top_k and top_p to some of the rows."""
    select = torch.from_numpy(chosen).to(logits.device)
    scores = logits[select]
    _truncate(scores, [rows[i] for i in chosen.tolist()])
    logits[select] = scores


def _draw(scores: Tensor, rows: Sequence[Row], positions: LongArray) -> LongArray:
    """Draw by inverse distribution over the vocabulary in id order: one number per row decides."""
    mass = torch.softmax(scores, -1).cumsum(-1, dtype=torch.float64)  # [R, V]
    seeds = np.array([row.setup.seed for row in rows], np.uint64)
    drawn = torch.from_numpy(uniforms(seeds, positions)).to(scores.device)[:, None]
    total = mass[:, -1:]
    # Rounding must not lift the product to the total: the id found there would be past the last candidate.
    target = torch.minimum(drawn * total, torch.nextafter(total, torch.zeros_like(total)))
    found: LongArray = torch.searchsorted(mass, target, right=True).squeeze(-1).cpu().numpy()
    return found


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]
