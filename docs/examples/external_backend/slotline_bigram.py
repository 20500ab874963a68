"""A slotline backend. A text file is the model: what followed a byte there follows it here.

::

    async with slotline.Engine.open("speech.txt", backend="bigram") as engine: ...
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from slotline import BackendEntry, BackendInfo, Capabilities, EngineConfig, hookimpl
from slotline.backend import StepHandle
from slotline.errors import ModelNotFound
from slotline.model import Model
from slotline.plan import FEEDBACK, LogprobColumns, RowSetup, Status, StepPlan, StepResult

END, VOCAB = 256, 257  # the token after a text's last byte; one token a byte, and END
UNSEEN = 1e-6  # what never followed in the text is unlikely, not impossible


class ByteTokenizer:
    vocab_size = VOCAB
    special_ids = frozenset({END})

    def encode(self, text: str, *, parse_special: bool = True, add_special: bool = True) -> list[int]:
        return list(text.encode())

    def token_bytes(self) -> list[bytes]:
        return [*(bytes([i]) for i in range(256)), b"<|end|>"]


class BigramBackend:
    capabilities = Capabilities(
        logprobs=True,
        max_logprobs=VOCAB,
        logprobs_modes=("raw",),
        params=frozenset({"temperature", "seed", "stop_token_ids", "min_tokens", "ignore_eos"}),
        deterministic=True,
    )

    def __init__(self) -> None:
        self.setups: dict[int, RowSetup] = {}  # by row
        self.last: dict[int, int | None] = {}  # the token each row sampled last; None once it has ended

    def load(self, config: EngineConfig, model: Model) -> BackendInfo:
        text = [*model.checkpoint, END]
        counts = np.full((VOCAB, VOCAB), UNSEEN)
        np.add.at(counts, (text[:-1], text[1:]), 1)
        self.logprobs = np.log(counts / counts.sum(axis=1, keepdims=True)).astype(np.float32)
        length, size = config.max_model_len or model.context_length, config.block_size or 16
        tokens = config.kv_cache_tokens or config.max_slots * length  # there is no cache, but the core counts blocks
        blocks = -(-tokens // size) + 1
        return BackendInfo(
            num_blocks=blocks, block_size=size, bytes_per_block=0, max_model_len=length, vocab_size=VOCAB
        )

    def launch(self, plan: StepPlan) -> StepHandle:
        self.release(plan.ended.tolist())
        self.setups.update((setup.row, setup) for setup in plan.admitted)
        tokens, status = np.zeros((len(plan), 1), np.int32), np.zeros(len(plan), np.int8)
        n_tokens, parts = np.zeros(len(plan), np.int32), []
        final = plan.token_ids[np.cumsum(plan.count) - 1].tolist()  # the next byte depends on nothing before it
        for i, row in enumerate(plan.rows.tolist()):
            if self.last.get(row, END) is None:
                status[i] = Status.DEAD
            elif plan.sample[i]:
                setup, before = self.setups[row], self.last[row] if final[i] == FEEDBACK else final[i]
                token = self.sample(setup, self.logprobs[before], int(plan.start[i] + plan.count[i]))
                status[i] = Status.STOP if token in setup.stop_ids else Status.OK
                self.last[row] = None if token in setup.stop_ids else token
                tokens[i], n_tokens[i] = token, 1
                parts.append(columns(self.logprobs[before], token, setup.logprobs))
        table = LogprobColumns.concat(parts)
        result = StepResult(plan.step_id, plan.rows, plan.epoch, tokens, n_tokens, status, table)
        return SimpleNamespace(result=lambda: result)

    def sample(self, setup: RowSetup, logprobs: np.ndarray, position: int) -> int:
        scores = logprobs.copy()
        if position < setup.min_len:
            scores[list(setup.stop_ids)] = -np.inf
        if not setup.params.greedy:
            # Noise made of seed and position alone: no other row, and no schedule, changes the draw.
            noise = np.random.Generator(np.random.Philox(key=setup.seed, counter=position))
            scores = scores / setup.params.temperature + noise.gumbel(size=VOCAB)
        return int(scores.argmax())

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.setups.pop(row, None)
            self.last.pop(row, None)

    def close(self) -> None:
        self.setups, self.last = {}, {}


def columns(logprobs: np.ndarray, token: int, width: int) -> LogprobColumns:
    """Return one position: the sampled token, then the ``width`` best without repeating it."""
    if width < 0:
        return LogprobColumns.empty(1)
    order = np.argsort(-logprobs, kind="stable").astype(np.int32)
    ids = np.array([token, *(i for i in order[:width] if i != token)], np.int32)
    ranks = np.argsort(order)[ids].astype(np.int32) + 1
    return LogprobColumns(np.array([0, len(ids)], np.int32), ids, logprobs[ids], ranks)


def open_text(config: EngineConfig) -> Model:
    try:
        data = Path(config.model).read_bytes()
    except OSError as error:
        raise ModelNotFound(f"bigram needs a text file; {config.model!r}: {error.strerror}") from error
    eos, tokenizer = frozenset({END}), ByteTokenizer()
    return Model(
        name=config.model, tokenizer=tokenizer, vocab_size=VOCAB, context_length=4096, eos_ids=eos, checkpoint=data
    )


@hookimpl
def slotline_register_backends(register: Callable[[BackendEntry], None]) -> None:
    register(BackendEntry(name="bigram", create=BigramBackend, open_model=open_text, summary="counts bytes"))


@hookimpl
def slotline_register_chat_templates(register: Callable[[str, str], None]) -> None:
    register("dialogue", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:")
