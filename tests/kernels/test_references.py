"""The references say what the torch backend does: same candidates, same table of logprobs. No Triton."""

import math

import numpy as np
import pytest
import torch

from slotline.kernels.reference.drop_rest import drop_rest
from slotline.kernels.reference.sample import sample
from slotline.kernels.reference.top_logprobs import top_logprobs
from slotline.plugins.torch_backend.logprobs import tabulate
from slotline.plugins.torch_backend.ranking import keep_best, nucleus

ROWS, VOCAB = 12, 300


def make_logits(kind: str) -> torch.Tensor:
    x = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(4)) * 3
    if kind == "ties":
        x = x.round()
    if kind == "masked":
        x[:, ::2] = -math.inf
    return x


@pytest.mark.parametrize("kind", ["plain", "ties", "masked"])
@pytest.mark.parametrize(("top_k", "top_p"), [(7, 1.0), (0, 0.83), (20, 0.61), (5000, 0.99)])
def test_candidates(kind, top_k, top_p):
    x = make_logits(kind)
    zeros = torch.zeros(ROWS, dtype=torch.int64)
    columns = (torch.ones(ROWS), torch.full((ROWS,), -math.inf), torch.full((ROWS,), top_k).int())
    result = sample(x, *columns, torch.full((ROWS,), top_p), zeros, zeros + torch.arange(ROWS))
    ours, theirs = x.clone(), x.clone()
    drop_rest(ours, torch.arange(ROWS), columns[0], result.cut_keys, result.cut_ids)
    limits = np.full(ROWS, min(top_k, VOCAB) if top_k else VOCAB, np.int64)
    keep_best(theirs, nucleus(theirs, limits, np.full(ROWS, np.float32(top_p), np.float64)))
    assert torch.equal(ours, theirs)
    assert theirs[torch.arange(ROWS), result.tokens.long()].isfinite().all()


@pytest.mark.parametrize("kind", ["plain", "ties", "masked"])
def test_table_of_logprobs(kind):
    x = make_logits(kind)
    tokens, widths = torch.arange(1, 2 * ROWS, 2), np.arange(ROWS)
    columns = tabulate(torch.log_softmax(x, -1), tokens.numpy(), widths)
    lines = torch.arange(ROWS, dtype=torch.int32)
    table = top_logprobs(x, lines, tokens.int(), torch.from_numpy(widths).int(), 20)
    for i in range(ROWS):
        theirs = slice(columns.indptr[i], columns.indptr[i + 1])
        best = table.ids[i, : table.counts[i]].tolist()
        ranks = {token: place + 1 for place, token in enumerate(best)} | {int(tokens[i]): int(table.ranks[i])}
        values = dict(zip(best, table.values[i].tolist(), strict=False)) | {int(tokens[i]): float(table.own[i])}
        wanted = [int(tokens[i])] + [token for token in best if token != tokens[i]]
        assert columns.ids[theirs].tolist() == wanted
        assert columns.ranks[theirs].tolist() == [ranks[token] for token in wanted]
        np.testing.assert_allclose(columns.values[theirs], [values[token] for token in wanted], rtol=1e-5, atol=1e-5)
