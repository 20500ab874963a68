"""Surfaces: Starlette routes, the command line, the web page."""

if __name__ != "slotline.apis":
    raise ImportError(f"{__file__} was imported as {__name__!r}: import slotline.apis instead")
