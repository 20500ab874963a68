"""Log-sum-exp of each row as peak + log."""

from __future__ import annotations

import torch
from torch import Tensor

from slotline.kernels.reference.argmax import state_of
from slotline.kernels.results import OK, LogSums


def logsumexp(logits: Tensor) -> LogSums:
    """Return the log-sum-exp of each row [R, V]; invalid logits count as -inf in the peak."""
    status = state_of(logits)
    peaks = logits.masked_fill(logits.isnan() | (logits == float("inf")), float("-inf")).amax(-1)
    logs = torch.exp(logits.double() - peaks[:, None]).sum(-1).log().float()
    return LogSums(peaks, logs.masked_fill(status != OK, float("nan")), status)
