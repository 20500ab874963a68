"""The ops inside a CUDA graph, as the engine uses them."""

import pytest
import torch

from slotline.kernels.argmax import argmax
from slotline.kernels.logsumexp import logsumexp
from slotline.kernels.sample import sample
from slotline.kernels.top_logprobs import top_logprobs

pytestmark = pytest.mark.gpu


# What the mode does not detect it does not report either; the warning says so each time.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_in_a_graph(make_logits, make_rows, device):
    """Nothing waits for the device, and a captured graph follows what is written into its inputs."""
    x, other = make_logits(92_544, rows=9), make_logits(92_544, rows=9, seed=1)
    rows = make_rows(9, temperature=[0.0, 1.0, 0.7] * 3, top_k=[0, 50, 0] * 3, top_p=[1.0, 0.9, 0.95] * 3)
    which = torch.arange(9, dtype=torch.int32, device=device)

    def step(logits):
        table = top_logprobs(logits, which, which, which * 0 + 5, 5)
        drawn = sample(logits, *rows)
        return [*drawn, *argmax(logits), *logsumexp(logits), *table]

    expected = [part.clone() for part in step(other)]
    step(x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(x)
    x.copy_(other)
    graph.replay()
    for ours, wanted in zip(captured, expected, strict=True):
        assert torch.equal(ours, wanted)
