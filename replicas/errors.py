"""The tree of errors; each class says what kind of failure it is and whether a retry can help.

MantaError                     internal
├── InvalidRequest             invalid      the request is wrong; sending it again will not help
│   ├── PromptTooLong          invalid      prompt (+ max_new_tokens) does not fit the model or the pool: trim it
│   └── InvalidAdapter         invalid      a folder is no adapter of this model
├── UnknownModel               not found
├── RequestAborted             cancelled    the client went away, or asked for the abort
├── Overloaded                 unavailable  retryable: the waiting queue is full
│   └── AdapterNotReadable     unavailable  retryable: this machine cannot read an adapter's folder, or it has changed
├── StepFailed                 internal     retryable once: a step failed with this request alone; the engine goes on
├── EngineDead                 unavailable  retryable: no step works any more, or a rank died; the replica is replaced
│   └── DiedInStep             unavailable  retryable once: the request was in the step that ended the engine
├── InvalidConfig              internal     a setting is impossible; says which, why, and what is allowed
│   └── UnsupportedModel       internal     architecture not known; lists those that are
├── PagesExhausted             internal     an allocation was short; the scheduler evicts or retracts on it
└── RowsExhausted              internal     every row of the request table is taken; the scheduler waits
"""

import enum


class Fault(enum.Enum):
    """The kind of a failure. HTTP has a status for each (deployments/http/http_errors.py)."""

    INVALID = "invalid"  # the request is wrong
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    GONE = "gone"
    CONFLICT = "conflict"
    TOO_LARGE = "too_large"
    TOO_SLOW = "too_slow"  # its client sends the request too slowly
    WRONG_TYPE = "wrong_type"  # of content
    TOO_MANY = "too_many"  # requests: of its key, or of all
    CANCELLED = "cancelled"  # by its client
    TIMED_OUT = "timed_out"
    INTERNAL = "internal"
    UNAVAILABLE = "unavailable"
    DISK_FULL = "disk_full"


class MantaError(Exception):
    """The root of the tree. A message says what was wanted, what was found, and what to do."""

    fault = Fault.INTERNAL
    retryable = False
    code: str | None = None  # the name that OpenAI's clients know it by; None: its status


class InvalidRequest(MantaError):
    """The request cannot be served as it is. ``param`` names the offending field where there is one."""

    fault = Fault.INVALID

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_invalid_request, (type(self), str(self), self.param))


def _rebuild_invalid_request(cls: type[InvalidRequest], message: str, param: str | None) -> InvalidRequest:
    return cls(message, param=param)


class PromptTooLong(InvalidRequest):
    """The prompt, or prompt plus requested output, exceeds the context length or the whole KV pool.

    Clients know it by its code or by the words "maximum context length is" (OpenAI, vLLM) and "is longer than the
    model's context length" (SGLang): they trim the conversation, or ask a model with a longer context.
    """

    code = "context_length_exceeded"

    @classmethod
    def of_prompt(
        cls, num_tokens: int, *, longest: int, param: str, room: int = 1, at_least: bool = False, why: str = ""
    ) -> "PromptTooLong":
        """The prompt alone is too long.

        Args: num_tokens: of the prompt; ``at_least``: they were not counted to the end.
              longest: prompt + output that fit; ``why``: what sets it, where that is not the model's context.
              room: tokens of output that must fit too.
        """
        text = "messages" if param == "messages" else "prompt"
        output = f", and the output needs {room} more" if room else ""
        return cls(
            f"This model's maximum context length is {longest} tokens{why}. However, your {text} resulted in "
            f"{'at least ' * at_least}{num_tokens} tokens{output}, which is longer than the model's context length: "
            f"shorten the {text} to at most {longest - room} tokens.",
            param=param,
        )

    @classmethod
    def of_output(cls, num_tokens: int, max_new_tokens: int, *, longest: int, param: str) -> "PromptTooLong":
        """A prompt of ``num_tokens`` fits, but not with an output of ``max_new_tokens``, asked for in ``param``."""
        return cls(
            f"This model's maximum context length is {longest} tokens. However, you requested "
            f"{num_tokens + max_new_tokens} tokens ({num_tokens} in the prompt, {max_new_tokens} in the completion), "
            f"which is longer than the model's context length: shorten the prompt, or lower {param} to at most "
            f"{longest - num_tokens}.",
            param=param,
        )


class InvalidAdapter(InvalidRequest):
    """A folder holds no adapter (LoRA) that this model can use."""


class UnknownModel(MantaError):
    """The request names a model that is not served here."""

    fault = Fault.NOT_FOUND
    code = "model_not_found"


class RequestAborted(MantaError):
    """The client disconnected or called abort."""

    fault = Fault.CANCELLED


class Overloaded(MantaError):
    """The waiting queue is full; try again later or elsewhere."""

    fault = Fault.UNAVAILABLE
    retryable = True


class NotSent(Overloaded):
    """A plan could not be sent to the other ranks; none of them got it, so all are where they were."""


class AdapterNotReadable(Overloaded):
    """A folder that held an adapter (LoRA) cannot be read here, or holds another one: elsewhere it may be there."""


class StepFailed(MantaError):
    """A step failed with this request alone, and the engine went on without it. One other engine may try it."""

    retryable = True
    code = "step_failed"


class EngineDead(MantaError):
    """No step works any more or a rank died; every open request gets this and the replica becomes unhealthy. ``rids``:
    the requests of the step that ended it."""

    fault = Fault.UNAVAILABLE
    retryable = True

    def __init__(self, message: str, *, rids: frozenset[str] = frozenset()) -> None:
        super().__init__(message)
        self.rids = rids


class DiedInStep(EngineDead):
    """The request was in the step that ended its engine. One other engine may try it."""


class InvalidConfig(MantaError):
    """Settings are impossible on this model or machine. ``problems`` has a sentence for each of them."""

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


class UnsupportedModel(InvalidConfig):
    """The model's architecture has no file in ``replicas/models``."""


class PagesExhausted(MantaError):
    """Fewer pages are free than an allocation needs; nothing was taken."""


class RowsExhausted(MantaError):
    """Every row of the ReqToTokenPool is taken; nothing was taken."""
