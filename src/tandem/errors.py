"""Every error Tandem raises on purpose.

```
TandemError
├── InvalidRequestError        400  the request itself is wrong
│   ├── ContextTooLongError    400  prompt + answer do not fit the model's context
│   └── UnsupportedError       400  well-formed, but this model or build cannot do it
├── AuthenticationError        401  an API key is set and the request lacks it
├── ForbiddenError             403  a web page, or a name, that is not welcome here
├── NotFoundError              404  no such model, instance, request, ...
├── PlacementError             409  the cluster as it is now cannot do this: memory, engines, nodes, roles
│   └── UnplaceableError       422  no cluster can: this model cannot be run in this way
├── PayloadTooLargeError       413  the body is over the configured limit
├── EngineError                500  the engine failed while it worked on this request
├── UnavailableError           503  try again later
│   ├── QueueFullError         503  too many requests are waiting
│   ├── InstanceNotReadyError  503  the model is still loading, or could not be loaded
│   ├── RunnerDiedError        503  the runner process ended in the middle of the request
│   ├── NodeLostError   503  another node is not there, or died before it answered
│   └── HandoffError           503  a remote prefill came to nothing, or only to a part
│       ├── WireError          503  a peer's bytes broke the protocol or failed their checksum
│       ├── PeerLostError      503  the peer cannot be reached, or the connection ended early
│       ├── PeerSilentError    503  the peer stopped sending, or stopped making progress
│       ├── PeerRefusedError   503  the peer answered with an error
│       ├── PrefillBusyError   503  the peer's queue is full; `retry_after` is its wait in seconds
│       └── IncompatiblePeerError 503  the peer's model or cluster secret is another one
├── DeadlineError              504  a wait reached its deadline
├── ModelError                 500  a model could not be found, read, converted or checked
│   ├── UnsupportedModelError  500  architecture or quantisation we do not read
│   ├── DownloadError          500  the hub or another node said no, or the transfer broke
│   │   └── NoSpaceError       507  the model does not fit on the disk
│   └── CorruptModelError      500  the files are not what they claim to be
├── StorageError               500  the data folder could not be read or written
│   ├── DiskFullError          507  there is no room left on its disk
│   └── NewerFormatError       500  a newer Tandem wrote it
├── ConfigError                500  a setting, flag or card has no usable value
└── CancelledError             499  the client went away
```

Messages tell the reader what to do next. `status` is the HTTP status an error becomes, `code` a stable
machine-readable name. Errors cross the process border as `tandem.types.Failure` and come back as the same class.
"""

from __future__ import annotations

from typing import ClassVar


class TandemError(Exception):
    """Base of all deliberate errors.

    Args:
        message: one or two sentences: what is wrong, and what to do about it.
        param: the request field or setting at fault, where there is one.
        retry_after: seconds after which the same call may succeed, where that is known.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    permanent: ClassVar[bool] = False
    """Trying the same again cannot help: files, settings or the request have to change first."""

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after


class InvalidRequestError(TandemError):
    permanent = True
    status = 400
    code = "invalid_request"


class ContextTooLongError(InvalidRequestError):
    code = "context_length_exceeded"


class UnsupportedError(InvalidRequestError):
    code = "unsupported"


class AuthenticationError(TandemError):
    status = 401
    code = "invalid_api_key"


class ForbiddenError(TandemError):
    status = 403
    code = "forbidden_origin"


class NotFoundError(TandemError):
    status = 404
    code = "not_found"


class PlacementError(TandemError):
    """409: the request is sound and conflicts with the state of things. A stopped instance or another node helps."""

    status = 409
    code = "placement_refused"


class UnplaceableError(PlacementError):
    """422: understood, and impossible whatever the cluster's state. The request has to change."""

    permanent = True
    status = 422
    code = "unplaceable"


class PayloadTooLargeError(TandemError):
    status = 413
    code = "payload_too_large"


class EngineError(TandemError):
    status = 500
    code = "engine_error"


class UnavailableError(TandemError):
    status = 503
    code = "unavailable"


class QueueFullError(UnavailableError):
    code = "queue_full"


class InstanceNotReadyError(UnavailableError):
    code = "instance_not_ready"


class RunnerDiedError(UnavailableError):
    code = "runner_died"


class NodeLostError(UnavailableError):
    code = "node_lost"


class HandoffError(UnavailableError):
    code = "handoff_failed"


class WireError(HandoffError):
    code = "wire_error"


class PeerLostError(HandoffError):
    code = "peer_lost"


class PeerSilentError(HandoffError):
    code = "peer_silent"


class PeerRefusedError(HandoffError):
    code = "peer_refused"


class PrefillBusyError(HandoffError):
    code = "prefill_busy"


class IncompatiblePeerError(HandoffError):
    code = "incompatible_peer"


class DeadlineError(TandemError):
    status = 504
    code = "deadline_exceeded"


class ModelError(TandemError):
    permanent = True
    code = "model_error"


class UnsupportedModelError(ModelError):
    code = "unsupported_model"


class DownloadError(ModelError):
    permanent = False
    code = "download_error"


class NoSpaceError(DownloadError):
    status = 507
    code = "no_space"


class CorruptModelError(ModelError):
    code = "corrupt_model"


class StorageError(TandemError):
    code = "storage_error"


class DiskFullError(StorageError):
    status = 507
    code = "disk_full"


class NewerFormatError(StorageError):
    permanent = True
    code = "newer_format"


class ConfigError(TandemError):
    permanent = True
    code = "config_error"


class CancelledError(TandemError):
    status = 499
    code = "cancelled"


def error_classes() -> dict[str, type[TandemError]]:
    """All error classes by their `code`."""
    found: dict[str, type[TandemError]] = {}
    pending: list[type[TandemError]] = [TandemError]
    while pending:
        error = pending.pop()
        found[error.code] = error
        pending.extend(error.__subclasses__())
    return found
