"""Every exception slotline raises on purpose.

::

    SlotlineError
    ├── ConfigError               an engine option is wrong
    ├── PluginError               a plugin or hook is wrong
    ├── ModelError                a model cannot be opened
    │   ├── ModelNotFound         no source knows the name
    │   ├── UnsupportedModel      the backend cannot run models of this kind
    │   ├── DownloadError         a source knows it but cannot fetch it
    │   ├── CheckpointError       files are missing, truncated or do not fit together
    │   └── TokenizerError        the tokenizer is missing or unusable
    ├── RequestError              one request is wrong; it is refused before it runs
    │   ├── InvalidParameter      a field has a value outside its range
    │   ├── UnsupportedParameter  the chosen backend cannot honour a field
    │   ├── ContextLengthExceeded the prompt, or prompt and answer, do not fit
    │   └── ChatTemplateError     the chat template is missing or refuses the messages
    ├── OverloadError             try again later
    │   ├── QueueFull             the whole engine is at its limit
    │   └── ClientLimitExceeded   this client is at its limit
    ├── DeadlineExceeded          the request's own deadline passed
    ├── RequestAborted            somebody aborted the request
    └── EngineError               the engine, not the request, is at fault
        ├── EngineClosed          the engine is not open any more
        ├── StepFailed            a step raised; its requests end with this
        ├── NumericalError        the model gave no finite logits for one row
        ├── EngineLost            the engine's process ended; another one is started
        └── EngineUnhealthy       the engine cannot run again

``code`` is stable and independent of transport: surfaces translate it, nothing else.
"""

from __future__ import annotations

from typing import Any, ClassVar


class SlotlineError(Exception):
    """Base of every error raised by slotline."""

    code: ClassVar[str] = "error"

    @property
    def message(self) -> str:
        """Return the text without the class name."""
        return str(self.args[0]) if self.args else ""


# --- set-up ---------------------------------------------------------------------------


class ConfigError(SlotlineError, ValueError):
    """An engine option is unknown or outside its range."""

    code = "invalid_config"


class PluginError(SlotlineError):
    """A plugin could not be loaded, or registered something twice."""

    code = "plugin_error"


class ModelError(SlotlineError):
    """A model cannot be opened."""

    code = "model_error"


class ModelNotFound(ModelError):
    """No model source recognises the name."""

    code = "model_not_found"


class UnsupportedModel(ModelError):
    """The backend cannot run models of this kind; another one may. With backend "auto", the next best is taken."""

    code = "unsupported_model"


class DownloadError(ModelError):
    """A source knows the model but cannot fetch or verify it."""

    code = "download_failed"


class CheckpointError(ModelError):
    """Checkpoint files are missing, damaged, or do not fit the architecture."""

    code = "bad_checkpoint"


class TokenizerError(ModelError):
    """The tokenizer is missing, or of a kind that is not supported."""

    code = "bad_tokenizer"


# --- one request ----------------------------------------------------------------------


class RequestError(SlotlineError, ValueError):
    """One request is refused; ``param`` names the field at fault."""

    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class InvalidParameter(RequestError):
    """A field's value is outside what is allowed."""

    code = "invalid_parameter"

    @classmethod
    def of(cls, param: str, value: object, allowed: str, advice: str = "") -> InvalidParameter:
        """Build the standard message: field, value, allowed range, what to do."""
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        text = f"{param} is {shown}; allowed: {allowed}"
        return cls(f"{text}. {advice}" if advice else text, param=param)


class UnsupportedParameter(RequestError):
    """The chosen backend cannot honour a field without which the answer would be wrong."""

    code = "unsupported_parameter"


class ContextLengthExceeded(RequestError):
    """The prompt, or prompt plus max_tokens, does not fit the context or the KV pool."""

    code = "context_length_exceeded"


class ChatTemplateError(RequestError):
    """The model has no chat template, or the template refuses the messages."""

    code = "chat_template_error"


# --- load -----------------------------------------------------------------------------


class OverloadError(SlotlineError):
    """The request was refused because of load; try again after ``retry_after`` seconds."""

    code = "overloaded"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class QueueFull(OverloadError):
    """The engine already holds as many requests, or queued tokens, as it may."""

    code = "queue_full"


class ClientLimitExceeded(OverloadError):
    """This client already holds its share of the queue."""

    code = "client_limit"


class DeadlineExceeded(SlotlineError, TimeoutError):
    """The request did not finish before its deadline."""

    code = "deadline_exceeded"


class RequestAborted(SlotlineError):
    """The request was aborted before it finished."""

    code = "aborted"


# --- the engine -----------------------------------------------------------------------


class EngineError(SlotlineError):
    """The engine, not the request, is at fault."""

    code = "engine_error"


class EngineClosed(EngineError):
    """The engine is closed or closing."""

    code = "engine_closed"


class StepFailed(EngineError):
    """A step raised inside the backend; every request in it ends with this error."""

    code = "step_failed"


class EngineLost(EngineError):
    """The engine's process ended, with what it was running; try again after ``retry_after`` seconds."""

    code = "engine_lost"
    retry_after = 2.0


class NumericalError(EngineError):
    """The model returned no finite logits for this request's row."""

    code = "numerical_error"


class EngineUnhealthy(EngineError):
    """The backend failed again after its restart, or the device is lost."""

    code = "engine_unhealthy"


def _rebuild(cls: type[SlotlineError], args: tuple[Any, ...], state: dict[str, Any]) -> SlotlineError:
    """Recreate an error whose constructor takes keywords (pickle would drop them)."""
    error = cls(*args)
    error.__dict__.update(state)
    return error
