"""Intake: is this request well-formed, can it run, can the backend honour it? All before it is queued."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from slotline.backend import ALL_PARAMS, HARD_PARAMS, Capabilities
from slotline.errors import ContextLengthExceeded, InvalidParameter, UnsupportedParameter
from slotline.params import SamplingParams
from slotline.plan import IntArray
from slotline.request import Notice, SequenceRequest

if TYPE_CHECKING:
    from slotline.config import EngineConfig
    from slotline.model import Model

SEED_MASK = (1 << 64) - 1
PRIORITY = 2**31  # priorities are under it, and at least its negative: they sit in arrays
MAX_SALT = 1024  # characters


@dataclass(frozen=True, slots=True)
class Resolved:
    """A request's parameters after defaults and capabilities.

    Attributes:
        params: every numeric field has a value; unsupported soft fields are neutral.
        notices: what is not honoured.
        logprobs, prompt_logprobs: widths that the backend will be asked for.
    """

    params: SamplingParams
    notices: list[Notice]
    logprobs: int | None
    prompt_logprobs: int | None


class Intake:
    """Check requests against one model, backend and configuration.

    Args:
        longest: longest sequence that can run, in tokens.
        vocab_size: width of the logits.
        processors: factories of logits processors by name; one with a ``check`` method sees its options here.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        capabilities: Capabilities,
        longest: int,
        vocab_size: int,
        processors: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.model = model
        self.capabilities = capabilities
        self.longest = longest
        self.vocab_size = vocab_size
        self.max_logprobs = config.max_logprobs
        self.most_sequences = config.max_slots + config.max_queue
        self._processors = processors
        self._seeds = np.random.default_rng(config.seed)

    # --- parameters -------------------------------------------------------------------

    def resolve(self, params: SamplingParams) -> Resolved:
        """Fill in defaults and settle what the backend can honour.

        Raises:
            InvalidParameter: a value does not fit this model or configuration.
            UnsupportedParameter: the answer would be wrong without a field the backend lacks.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidParameter.of("params", params, "SamplingParams, or None")
        given = params.given()
        notices = [self._notice(name) for name in sorted(given & ALL_PARAMS - HARD_PARAMS) if self._lacks(name)]
        for name in sorted(given & HARD_PARAMS):
            if self._lacks(name):
                raise self._unsupported(name)
        self._check_plugins(params)
        self._check_ids(params)
        logprobs, notice = self._width("logprobs", params.logprobs, supported=self.capabilities.logprobs)
        notices += notice
        prompt, notice = self._width(
            "prompt_logprobs", params.prompt_logprobs, supported=self.capabilities.prompt_logprobs
        )
        notices += notice
        self._check_mode(params, wanted=logprobs is not None or prompt is not None)
        return Resolved(params.resolved(self.model.generation), notices, logprobs, prompt)

    def _lacks(self, name: str) -> bool:
        return name not in self.capabilities.params

    def _notice(self, name: str) -> Notice:
        return Notice(f"{name}_unsupported", name, f"this backend does not honour {name}; the answer ignores it")

    def _unsupported(self, name: str) -> UnsupportedParameter:
        return UnsupportedParameter(
            f"{name} is not supported by this backend, and the answer would be wrong without it; leave it out, "
            "or serve the model with a backend that has it (see capabilities)",
            param=name,
        )

    def _check_plugins(self, params: SamplingParams) -> None:
        if params.constraint is not None:
            raise self._unsupported("constraint")
        for name, options in params.extra.items():
            if name not in self.capabilities.processors:
                known = ", ".join(sorted(self.capabilities.processors)) or "none"
                raise UnsupportedParameter(
                    f"extra names {name!r}, which this backend does not have; known: {known}", param="extra"
                )
            check = getattr(self._processors.get(name), "check", None)
            if check is not None:
                check(options)

    def _check_mode(self, params: SamplingParams, *, wanted: bool) -> None:
        mode = params.logprobs_mode or "raw"
        if wanted and mode not in self.capabilities.logprobs_modes:
            raise UnsupportedParameter(
                f"logprobs_mode is {mode!r}; this backend has: {', '.join(self.capabilities.logprobs_modes)}",
                param="logprobs_mode",
            )

    def _check_ids(self, params: SamplingParams) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(params, name) or ():
                if token_id >= self.vocab_size:
                    raise InvalidParameter.of(name, token_id, f"token ids from 0 to {self.vocab_size - 1}")

    def _width(self, name: str, width: int | None, *, supported: bool) -> tuple[int | None, list[Notice]]:
        if width is None:
            return None, []
        if not supported:
            return None, [Notice(f"{name}_unsupported", name, f"this backend has no {name}; the answer has none")]
        cap = min(self.max_logprobs, self.capabilities.max_logprobs)
        if width > cap:
            raise InvalidParameter.of(name, width, f"0 to {cap}", "Ask for fewer, or raise max_logprobs.")
        return width, []

    def check_place(self, priority: Any, cache_salt: Any, deadline: Any, client: Any) -> None:
        """Refuse what says nothing about the answer, but where its sequences stand, if it is out of range.

        Raises:
            InvalidParameter: naming the argument.
        """
        if isinstance(priority, bool) or not isinstance(priority, int) or not -PRIORITY <= priority < PRIORITY:
            raise InvalidParameter.of("priority", priority, f"an integer from {-PRIORITY} to {PRIORITY - 1}")
        if cache_salt is not None and not (isinstance(cache_salt, str) and 1 <= len(cache_salt) <= MAX_SALT):
            raise InvalidParameter.of("cache_salt", cache_salt, f"a string of 1 to {MAX_SALT} characters")
        number = isinstance(deadline, int | float) and not isinstance(deadline, bool)
        if deadline is not None and not (number and deadline > 0):
            raise InvalidParameter.of("deadline", deadline, "seconds, more than 0")
        if client is not None and not isinstance(client, str):
            raise InvalidParameter.of("client", client, "a string")

    def check_count(self, prompts: int, n: int) -> None:
        """Refuse more sequences than there will ever be room for, before any of their prompts is encoded.

        Raises:
            InvalidParameter: saying how many there may be.
        """
        if prompts * n > self.most_sequences:
            asked = f"{prompts} prompts" if n == 1 else f"{prompts} prompts with n {n}"
            message = (
                f"the request has {asked}; allowed: up to {self.most_sequences} sequences at once, each choice one"
            )
            raise InvalidParameter(message, param="prompt" if prompts > 1 else "n")

    def check_kind(self, adapter: str | None, *, embed: bool) -> None:
        """Refuse an adapter, and embedding where the backend gives no hidden states.

        Raises:
            UnsupportedParameter: saying so.
        """
        if adapter is not None:
            raise UnsupportedParameter("adapter is not supported by this backend; leave it out", param="adapter")
        if embed and not self.capabilities.embeddings:
            message = "this backend gives no hidden states, so it cannot embed; serve the model with one that does"
            raise UnsupportedParameter(message, param="input")

    # --- prompts ----------------------------------------------------------------------

    def check_ids(self, where: str, token_ids: Sequence[int]) -> IntArray:
        """Return ids [P] as an array; refuse those outside the vocabulary.

        Raises:
            InvalidParameter: naming the first of them.
        """
        with contextlib.suppress(OverflowError):  # of an id that needs more than 32 bits
            array = np.array(token_ids, np.int32)
            if not len(array) or (array.min() >= 0 and array.max() < self.vocab_size):
                return array
        self._refuse_ids(where, token_ids)

    def _refuse_ids(self, where: str, token_ids: Sequence[int]) -> NoReturn:
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidParameter(
                    f"the {where} has token id {token_id}; allowed: 0 to {self.vocab_size - 1} "
                    f"(the vocabulary has {self.vocab_size})",
                    param=where,
                )
        raise AssertionError("no id is outside the vocabulary")

    def truncated(self, prompts: Sequence[list[int]], params: SamplingParams) -> tuple[list[list[int]], list[Notice]]:
        """Cut each prompt to its last ``truncate_prompt_tokens``, where the request allows that; tell if any was."""
        most = params.truncate_prompt_tokens
        if most is None:
            return list(prompts), []
        if most == -1:  # what fits beside the answer
            most = max(self.longest - (1 if params.max_tokens is None else params.max_tokens), 1)
        if all(len(token_ids) <= most for token_ids in prompts):
            return list(prompts), []
        message = f"the prompt was cut to its last {most} tokens, as truncate_prompt_tokens asks"
        notice = Notice("prompt_truncated", "truncate_prompt_tokens", message)
        return [token_ids[-most:] for token_ids in prompts], [notice]

    def check_prompt(self, token_ids: Sequence[int], params: SamplingParams) -> tuple[IntArray, int]:
        """Check one prompt and return its ids [P] and max_tokens.

        Raises:
            InvalidParameter: it is empty, or has ids outside the vocabulary.
            ContextLengthExceeded: it does not fit, alone or with max_tokens.
        """
        if not len(token_ids):
            raise InvalidParameter(
                "the prompt has 0 tokens; allowed: at least 1. This model adds no begin token to an empty text",
                param="prompt",
            )
        room = self.longest - len(token_ids)
        wanted = params.max_tokens
        if room < 0 or (room == 0 and wanted != 0):
            raise ContextLengthExceeded(
                f"the prompt has {len(token_ids)} tokens and at most {self.longest} fit, prompt and answer together; "
                "shorten it",
                param="prompt",
            )
        array = self.check_ids("prompt", token_ids)
        if wanted is not None and wanted > room:
            raise ContextLengthExceeded(
                f"max_tokens is {wanted} and the prompt has {len(token_ids)} tokens; at most {self.longest} fit "
                f"together: lower max_tokens to {room} or shorten the prompt",
                param="max_tokens",
            )
        most = room if wanted is None else wanted
        if (params.min_tokens or 0) > most:
            raise InvalidParameter.of("min_tokens", params.min_tokens, f"0 to max_tokens ({most})")
        return array, most

    # --- sequences --------------------------------------------------------------------

    def sequences(
        self,
        first_id: int,
        prompts: Sequence[Sequence[int]],
        resolved: Resolved,
        **common: Any,
    ) -> list[SequenceRequest]:
        """Return one sequence per prompt and choice, prompt-major."""
        params = resolved.params
        stop_ids = self._stop_ids(params)
        bad_words = self._bad_words(params)
        made: list[SequenceRequest] = []
        for token_ids in prompts:
            array, max_tokens = self.check_prompt(token_ids, params)
            seed = self._seed(params)
            leader = first_id + len(made)
            for choice in range(params.n):
                made.append(
                    SequenceRequest(
                        seq_id=first_id + len(made),
                        token_ids=array,
                        params=params,
                        seed=choice_seed(seed, choice),
                        stop_ids=stop_ids,
                        max_tokens=max_tokens,
                        bad_words=bad_words,
                        logprobs=resolved.logprobs,
                        prompt_logprobs=resolved.prompt_logprobs if choice == 0 else None,
                        leader=leader if choice else None,
                        **common,
                    )
                )
        return made

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        ends = () if params.ignore_eos else tuple(sorted(self.model.eos_ids))
        return tuple(dict.fromkeys((*ends, *(params.stop_token_ids or ()))))

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences that spell a bad word, at a start and after a space."""
        found = dict[tuple[int, ...], None]()
        for word in params.bad_words or ():
            for text in (word, " " + word):
                ids = tuple(self.model.tokenizer.encode(text, parse_special=False, add_special=False))
                if ids:
                    found[ids] = None
        return tuple(found)

    def _seed(self, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed & SEED_MASK
        return int(self._seeds.integers(0, 2**63))


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of choice ``choice`` of n: the seed itself for the first, mixed for others.

    The mixing is the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
    """
    if choice == 0:
        return seed & SEED_MASK
    z = (seed + choice * 0x9E3779B97F4A7C15) & SEED_MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & SEED_MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & SEED_MASK
    return z ^ (z >> 31)
