"""A few rows times a matrix."""

from __future__ import annotations

from slotline.kernels.reference.gemv import gemv as skinny_gemm

__all__ = ["skinny_gemm"]
