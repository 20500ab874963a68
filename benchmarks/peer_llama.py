"""llama.cpp as a peer of bench_cpu.py, in a process and an environment of its own (llama-cpp-python).

Answers lines of stdin, {"prompts": [[ids]], "tokens": [counts]}, with lines {"seconds": s, "answers": [[ids]]}: all
sequences in one batch, one token each a step, greedy; a sequence leaves when it has its tokens. Prompts go in as one
batch.

    python benchmarks/peer_llama.py MODEL.gguf THREADS
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

import llama_cpp as lib
import numpy as np

MAX_SEQUENCES, CONTEXT = 32, 16384
_QUIET = lib.llama_log_callback(lambda level, text, data: None)


class Peer:
    """A model and one context, whose memory is emptied before each request."""

    def __init__(self, path: str, threads: int) -> None:
        lib.llama_log_set(_QUIET, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = CONTEXT, 2048, MAX_SEQUENCES
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self._context = lib.llama_init_from_model(self._model, params)
        self._vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._batch = lib.llama_batch_init(2048, 0, MAX_SEQUENCES)

    def answer(self, prompts: list[list[int]], tokens: list[int]) -> tuple[float, list[list[int]]]:
        """Return seconds and answers."""
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        answers: list[list[int]] = [[] for _ in prompts]
        began = time.perf_counter()
        entries = [(i, p, t) for i, prompt in enumerate(prompts) for p, t in enumerate(prompt)]
        ends = np.cumsum([len(p) for p in prompts]) - 1
        wanted = list(zip(range(len(prompts)), ends.tolist(), strict=True))
        while wanted:
            for sequence, token in self._step(entries, wanted):
                answers[sequence].append(token)
            going = [i for i, _ in wanted if len(answers[i]) < tokens[i]]
            entries = [(i, len(prompts[i]) + len(answers[i]) - 1, answers[i][-1]) for i in going]
            wanted = [(i, place) for place, i in enumerate(going)]
        return time.perf_counter() - began, answers

    def _step(self, entries: list[tuple[int, int, int]], wanted: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Compute entries of (sequence, position, token); return the next token at the places that are wanted."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for place, (sequence, position, token) in enumerate(entries):
            batch.token[place], batch.pos[place], batch.n_seq_id[place] = token, position, 1
            batch.seq_id[place][0], batch.logits[place] = sequence, 0
        for _, place in wanted:
            batch.logits[place] = 1
        if lib.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        return [(sequence, self._best(place)) for sequence, place in wanted]

    def _best(self, place: int) -> int:
        logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(self._context, place), shape=(self._vocab,))
        return int(logits.argmax())


def main() -> None:
    """Answer requests until stdin ends."""
    peer = Peer(sys.argv[1], int(sys.argv[2]))
    print(json.dumps({"version": lib.__version__}), flush=True)
    for line in sys.stdin:
        seconds, answers = peer.answer(**json.loads(line))
        print(json.dumps({"seconds": seconds, "answers": answers}), flush=True)


if __name__ == "__main__":
    main()
