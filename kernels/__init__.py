"""Triton operations, one a file, each beside its PyTorch reference of the same signature."""

if __name__ != "slotline.kernels":
    # transformers looks for a distribution of this name: the checkout's folder must never answer for it.
    raise ImportError(
        f"{__file__} was imported as {__name__!r}: import slotline.kernels, and keep the checkout off sys.path"
    )
