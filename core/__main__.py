"""``python -m slotline``: the command line, loaded by name, since the core imports no surface."""

import importlib

if __name__ == "__main__":
    importlib.import_module("slotline.apis.cli").main()
