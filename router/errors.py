"""What goes wrong with a request, as exceptions whose text is fit for the caller.

RequestError
├── InvalidArgument          a field breaks a rule
│   └── ContextLengthExceeded    the prompt and max_tokens do not fit
├── NotFound                 no such model or adapter
├── FailedPrecondition       a feature is not enabled
├── Unimplemented            a field or feature that this version does not serve
├── ResourceExhausted        a caller's own limit
├── Unavailable              another replica, or a later try, may serve
├── DeadlineExceeded         the caller's deadline passed
├── Cancelled                the caller went away
└── InternalError            our fault; the text never carries an exception's own

StartupError                 the server cannot start; its text is one sentence that tells the fix
"""

from __future__ import annotations


class RequestError(Exception):
    """Ends one request; `str(error)` is sent to the caller."""


class InvalidArgument(RequestError):
    """`field` is the path in the request message, for example `sampling.top_p`."""

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description


class ContextLengthExceeded(InvalidArgument):
    """The prompt and max_tokens exceed `limit` tokens."""

    def __init__(self, field: str, description: str, limit: int) -> None:
        super().__init__(field, description)
        self.limit = limit


class NotFound(RequestError):
    """No such model or adapter."""


class FailedPrecondition(RequestError):
    """A feature that is not enabled, or a state that forbids the call."""


class Unimplemented(RequestError):
    """A field or feature that this version does not serve."""


class ResourceExhausted(RequestError):
    """A limit on the caller's own use."""


class Unavailable(RequestError):
    """Not now; `retry_s` is when to try again."""

    def __init__(self, message: str, retry_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class DeadlineExceeded(RequestError):
    """The caller's deadline passed, in the queue or while running."""


class Cancelled(RequestError):
    """The caller went away."""


class InternalError(RequestError):
    """Our fault; the log has the cause under the request's id."""


class StartupError(Exception):
    """The server cannot start; the text is one sentence that tells the fix."""
