from slotline.testing import BackendConformance


class TestBigram(BackendConformance, backend="bigram", model=__file__):
    """Everything slotline expects of a backend."""
