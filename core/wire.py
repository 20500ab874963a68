"""The messages between an engine process and its clients, as bytes: MessagePack around raw columns, no pickle.

A frame is a length of four bytes, then one message. Arrays travel as their bytes; their types are
those that the dataclasses of the core say. What arrives is checked against the types below before
anything is made of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from slotline import errors
from slotline.backend import BackendInfo, Capabilities
from slotline.errors import EngineError, InvalidParameter, SlotlineError
from slotline.outputs import OutputBatch
from slotline.params import SamplingParams
from slotline.plan import LogprobColumns
from slotline.request import SequenceRequest
from slotline.stats import CoreStats, RequestCounts

MAX_FRAME = 1 << 30

# --- parts ----------------------------------------------------------------------------


class Columns(msgspec.Struct, array_like=True):
    """LogprobColumns."""

    indptr: bytes
    ids: bytes
    values: bytes
    ranks: bytes


class Failure(msgspec.Struct, array_like=True):
    """An error by the name of its class, which is one of slotline.errors."""

    name: str
    message: str
    param: str | None = None
    retry_after: float | None = None


class Asked(msgspec.Struct, array_like=True):
    """A SequenceRequest; ``params`` is its place in the table of the message."""

    seq_id: int
    token_ids: bytes
    params: int
    seed: int
    stop_ids: tuple[int, ...]
    max_tokens: int
    bad_words: tuple[tuple[int, ...], ...]
    priority: int
    client: str | None
    deadline: float | None
    cache_salt: str | None
    adapter: int
    logprobs: int | None
    prompt_logprobs: int | None
    leader: int | None
    embed: bool = False


# --- from a client --------------------------------------------------------------------


class Submit(msgspec.Struct, tag=1, array_like=True):
    """Take in sequences, all or none; ``Accepted`` answers."""

    ticket: int
    params: list[dict[str, Any]]
    sequences: list[Asked]


class Abort(msgspec.Struct, tag=2, array_like=True):
    """End sequences."""

    seq_ids: list[int]


class Ask(msgspec.Struct, tag=3, array_like=True):
    """Tell the counters of all; ``Told`` answers. The client's own come with the question."""

    ticket: int
    counts: RequestCounts


class Report(msgspec.Struct, tag=4, array_like=True):
    """What the client has counted: asked for by ``Inquire``, or told now and then."""

    counts: RequestCounts


# --- from the engine process ----------------------------------------------------------


class Hello(msgspec.Struct, tag=11, array_like=True):
    """The first message: what the engine is."""

    version: str
    backend: str
    longest: int
    capabilities: Capabilities
    info: BackendInfo


class Accepted(msgspec.Struct, tag=12, array_like=True):
    """Sequences came in, or did not."""

    ticket: int
    failure: Failure | None


class Outputs(msgspec.Struct, tag=13, array_like=True):
    """An OutputBatch."""

    step_id: int
    seq_ids: bytes
    tokens: bytes
    width: int
    n_tokens: bytes
    finish: bytes
    logprobs: Columns | None
    prompt_counts: bytes | None
    prompt_logprobs: Columns | None
    admitted: tuple[tuple[int, int], ...]
    failures: tuple[tuple[int, Failure], ...]
    device_ms: float
    embeddings: tuple[tuple[int, bytes], ...] = ()


class Told(msgspec.Struct, tag=14, array_like=True):
    """Counters of the core, and of all clients but the one that asked."""

    ticket: int
    core: CoreStats
    others: RequestCounts


class Inquire(msgspec.Struct, tag=15, array_like=True):
    """Report what you have counted."""


class Beat(msgspec.Struct, tag=16, array_like=True):
    """The engine process is alive, and this is how it is."""

    status: str
    detail: str
    core: CoreStats


ToEngine = Submit | Abort | Ask | Report
ToClient = Hello | Accepted | Outputs | Told | Inquire | Beat

_encoder = msgspec.msgpack.Encoder()
to_engine = msgspec.msgpack.Decoder(ToEngine)
to_client = msgspec.msgpack.Decoder(ToClient)


def frame(message: ToEngine | ToClient) -> bytes:
    """Return a message as it is sent.

    Raises:
        TypeError: it holds something that is no plain data.
    """
    data = _encoder.encode(message)
    return len(data).to_bytes(4, "big") + data


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the next message's bytes.

    Raises:
        asyncio.IncompleteReadError: the other side is gone.
        EngineError: what came is no frame.
    """
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > MAX_FRAME:
        raise EngineError(f"a message of {size} bytes between processes; at most {MAX_FRAME} fit")
    return await reader.readexactly(size)


# --- to and from what the core speaks of ----------------------------------------------


def pack_submit(ticket: int, requests: Sequence[SequenceRequest]) -> bytes:
    """Return a Submit, framed; parameters that sequences share are sent once.

    Raises:
        InvalidParameter: the options of a plugin are no plain data.
    """
    table: dict[int, int] = {}
    params: list[dict[str, Any]] = []
    for request in requests:
        if id(request.params) not in table:
            table[id(request.params)] = len(params)
            params.append(_plain(request.params))
    asked = [_asked(request, table[id(request.params)]) for request in requests]
    try:
        return frame(Submit(ticket, params, asked))
    except TypeError as error:
        text = f"extra or constraint holds what cannot be sent to an engine process: {error}"
        raise InvalidParameter(text, param="extra") from None


def unpack_submit(message: Submit) -> list[SequenceRequest]:
    """Return the sequences.

    Raises:
        RequestError: the parameters are out of range.
    """
    params = [SamplingParams(**given) for given in message.params]
    made = []
    for asked in message.sequences:
        values = {name: getattr(asked, name) for name in Asked.__struct_fields__}
        values["params"] = params[asked.params]
        values["token_ids"] = np.frombuffer(asked.token_ids, np.int32)
        made.append(SequenceRequest(**values))
    return made


def pack_batch(batch: OutputBatch) -> Outputs:
    """Return a batch of news as a message."""
    return Outputs(
        batch.step_id,
        batch.seq_ids.astype(np.int64, copy=False).tobytes(),
        batch.tokens.astype(np.int32, copy=False).tobytes(),
        batch.tokens.shape[1],
        batch.n_tokens.astype(np.int32, copy=False).tobytes(),
        batch.finish.astype(np.int32, copy=False).tobytes(),
        _pack_columns(batch.logprobs),
        None if batch.prompt_counts is None else batch.prompt_counts.astype(np.int32, copy=False).tobytes(),
        _pack_columns(batch.prompt_logprobs),
        batch.admitted,
        tuple((seq_id, pack_error(error)) for seq_id, error in batch.errors),
        batch.device_ms,
        tuple((seq_id, _bytes(vector)) for seq_id, vector in batch.embeddings),
    )


def unpack_batch(message: Outputs) -> OutputBatch:
    """Return a message as a batch of news."""
    counts = message.prompt_counts
    return OutputBatch(
        message.step_id,
        np.frombuffer(message.seq_ids, np.int64),
        np.frombuffer(message.tokens, np.int32).reshape(-1, message.width),
        np.frombuffer(message.n_tokens, np.int32),
        np.frombuffer(message.finish, np.int32),
        _unpack_columns(message.logprobs),
        None if counts is None else np.frombuffer(counts, np.int32),
        _unpack_columns(message.prompt_logprobs),
        message.admitted,
        tuple((seq_id, unpack_error(failure)) for seq_id, failure in message.failures),
        message.device_ms,
        tuple((seq_id, np.frombuffer(data, np.float32)) for seq_id, data in message.embeddings),
    )


def pack_error(error: SlotlineError) -> Failure:
    """Return an error as plain data."""
    return Failure(
        type(error).__name__, error.message, getattr(error, "param", None), getattr(error, "retry_after", None)
    )


def unpack_error(failure: Failure) -> SlotlineError:
    """Return the error, of its own class where slotline.errors has that."""
    kind = getattr(errors, failure.name, None)
    if not (isinstance(kind, type) and issubclass(kind, SlotlineError)):
        kind = EngineError
    error = kind(failure.message)
    for name in ("param", "retry_after"):
        if (value := getattr(failure, name)) is not None:
            setattr(error, name, value)
    return error


def _asked(request: SequenceRequest, params: int) -> Asked:
    values = {name: getattr(request, name) for name in Asked.__struct_fields__}
    values["params"] = params
    values["token_ids"] = np.asarray(request.token_ids, np.int32).tobytes()
    return Asked(**values)


def _plain(params: SamplingParams) -> dict[str, Any]:
    given = {f.name: getattr(params, f.name) for f in fields(params)}
    return {name: value for name, value in given.items() if value is not None}


def _pack_columns(columns: LogprobColumns | None) -> Columns | None:
    if columns is None:
        return None
    return Columns(*(_bytes(getattr(columns, name)) for name in ("indptr", "ids", "values", "ranks")))


def _bytes(array: npt.NDArray[Any]) -> bytes:
    kind = np.float32 if array.dtype.kind == "f" else np.int32
    return array.astype(kind, copy=False).tobytes()


def _unpack_columns(columns: Columns | None) -> LogprobColumns | None:
    if columns is None:
        return None
    integers = [np.frombuffer(data, np.int32) for data in (columns.indptr, columns.ids, columns.ranks)]
    indptr, ids, ranks = integers
    return LogprobColumns(indptr, ids, np.frombuffer(columns.values, np.float32), ranks)
