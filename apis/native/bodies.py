"""Body of LMDeploy v0.1's conversation routes, older and newer spellings of it alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from slotline.apis.openai.models import Body
from slotline.errors import InvalidParameter
from slotline.params import SamplingParams

# Fields that mean the same in a body and in SamplingParams.
_SAME = (
    "ignore_eos",
    "min_p",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "temperature",
    "top_k",
    "top_p",
)


class InteractiveBody(Body):
    """Body of POST /v1/chat/interactive and /generate."""

    prompt: str | list[Any]
    model: str | None = None
    session_id: int | None = None  # -1, too, is none
    interactive_mode: bool | None = None
    stream: bool | None = None
    stop: bool | str | list[str] | None = None  # true breaks off, in v0.1; strings are stop strings, later
    cancel: bool | None = None  # the later name for that
    request_output_len: int | None = None
    sequence_start: bool | None = None  # true begins anew
    sequence_end: bool | None = None  # true ends the conversation with this answer
    renew_session: bool | None = None  # another name for sequence_start

    ignore_eos: bool | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    skip_special_tokens: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    renamed: ClassVar[Mapping[str, str]] = {"max_tokens": "request_output_len", "messages": "prompt"}

    @property
    def breaks_off(self) -> bool:
        """Tell whether this is about the answer that is being given."""
        return self.stop is True or bool(self.cancel)

    @property
    def ends(self) -> bool:
        """Tell whether this only ends a conversation: LMDeploy's client says so with nothing to answer."""
        return self.prompt in ("", []) and self.request_output_len == 0

    @property
    def begins_anew(self) -> bool:
        """Tell whether what was said before is to be forgotten."""
        return bool(self.sequence_start or self.renew_session)

    @property
    def keeps(self) -> bool:
        """Tell whether the conversation goes on after this answer."""
        return bool(self.interactive_mode) and not self.sequence_end

    def params(self, max_tokens: int) -> SamplingParams:
        """Return what the engine is asked for.

        Raises:
            InvalidParameter: naming the field by the name that it has here.
        """
        given: dict[str, Any] = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        if self.stop and self.stop is not True:
            given["stop"] = self.stop
        try:
            return SamplingParams(max_tokens=max_tokens, **given)
        except InvalidParameter as error:
            name = str(error.param)
            field = self.renamed.get(name, name)
            raise InvalidParameter(error.message.replace(name, field), param=field) from None
