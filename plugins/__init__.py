"""Built-in plugins: each registers through the same hooks as an outside package."""

if __name__ != "slotline.plugins":
    raise ImportError(f"{__file__} was imported as {__name__!r}: import slotline.plugins instead")
