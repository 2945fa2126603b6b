"""The tree of errors; each class says how HTTP answers it and whether a retry can help.

MantaError                     500
├── InvalidRequest             400   the request is wrong; sending it again will not help
│   ├── PromptTooLong          400   prompt (+ max_new_tokens) does not fit the model or the pool: trim it
│   └── InvalidAdapter         400   a folder is no adapter of this model
├── UnknownModel               404
├── RequestAborted             499   the client went away, or asked for the abort
├── Overloaded                 503   retryable: the waiting queue is full
│   └── AdapterNotReadable     503   retryable: this machine cannot read an adapter's folder, or finds another one there
├── StepFailed                 500   retryable once: a step failed with this request alone; the engine goes on
├── EngineDead                 503   retryable: no step works any more, or a rank died; the replica is being replaced
│   └── DiedInStep             503   retryable once: the request was in the step that ended the engine
├── InvalidConfig              500   a setting is impossible; says which, why, and what is allowed
│   └── UnsupportedModel       500   architecture not known; lists those that are
├── PagesExhausted             500   internal: an allocation was short; the scheduler evicts or retracts on it
└── RowsExhausted              500   internal: every row of the request table is taken; the scheduler waits
"""


class MantaError(Exception):
    """The root of the tree. A message says what was wanted, what was found, and what to do."""

    http_status = 500
    retryable = False
    code: str | None = None  # the name that OpenAI's clients know it by; None: its HTTP status


class InvalidRequest(MantaError):
    """The request cannot be served as it is. ``param`` names the offending field where there is one."""

    http_status = 400

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

    http_status = 404
    code = "model_not_found"


class RequestAborted(MantaError):
    """The client disconnected or called abort."""

    http_status = 499


class Overloaded(MantaError):
    """The waiting queue is full; try again later or elsewhere."""

    http_status = 503
    retryable = True


class AdapterNotReadable(Overloaded):
    """A folder that held an adapter (LoRA) cannot be read here, or holds another one: elsewhere it may be there."""


class StepFailed(MantaError):
    """A step failed with this request alone, and the engine went on without it. One other engine may try it."""

    retryable = True
    code = "step_failed"


class EngineDead(MantaError):
    """No step works any more or a rank died; every open request gets this and the replica becomes unhealthy. ``rids``:
    the requests of the step that ended it."""

    http_status = 503
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
