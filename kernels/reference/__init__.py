"""PyTorch references of the ops: a module, a function and a signature for each, short, slow, for any device."""
