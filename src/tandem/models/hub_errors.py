"""Say what to do about each way in which a model hub can fail."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

# HTTPError is that of whichever HTTP client the library uses.
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tandem.errors import DownloadError, NotFoundError

RETRY_AFTER_DEFAULT = 60.0


@contextmanager
def hub_errors(repository: str, endpoint: str) -> Iterator[None]:
    """Turn what `huggingface_hub` raises in this block into our errors.

    Raises:
        DownloadError: gated, not found, refused, overloaded, unreachable, disk full: each with its next step.
        NotFoundError: `repository` is not a possible name.
    """
    try:
        yield
    except HFValidationError as error:
        raise NotFoundError(f"{repository!r} is neither a local model nor a hub repository's name: {error}") from error
    except OfflineModeIsEnabled as error:
        raise DownloadError(offline_message(repository)) from error
    except GatedRepoError as error:
        raise DownloadError(
            f"{repository} is gated. Accept its terms at {endpoint}/{repository}, then set HF_TOKEN to a token of "
            "that account and try again."
        ) from error
    except RepositoryNotFoundError as error:
        raise DownloadError(
            f"{endpoint} has no public model {repository}. Check the spelling; if the model is private, set HF_TOKEN "
            "to a token that may read it."
        ) from error
    except RevisionNotFoundError as error:
        raise DownloadError(f"{repository} has no such revision. Leave the revision out to take the newest.") from error
    except HfHubHTTPError as error:
        raise _refused(repository, endpoint, error) from error
    except HTTPError as error:
        raise DownloadError(
            f"{endpoint} cannot be reached ({type(error).__name__}: {error}). Check the network, or set HF_ENDPOINT to "
            "a mirror; what has arrived is kept, and the next try goes on from there."
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DownloadError(
                f"The disk filled up while {repository} was fetched. Free some space and try again; what has arrived "
                "is kept."
            ) from error
        # huggingface_hub reports a transfer of the wrong length as a plain OSError.
        raise DownloadError(f"Fetching {repository} failed: {error}. Try again; what has arrived is kept.") from error


def offline_message(repository: str) -> str:
    """Why nothing is fetched, and what to do."""
    return (
        f"{repository} is not on this machine and offline mode is on. Unset TANDEM_OFFLINE and HF_HUB_OFFLINE to fetch "
        "it, or import it from a folder with: tandem models import PATH"
    )


def _refused(repository: str, endpoint: str, error: HfHubHTTPError) -> DownloadError:
    status = error.response.status_code if error.response is not None else 0
    if status == 401:
        return DownloadError(f"{endpoint} does not accept the token in HF_TOKEN (401). Set a valid one, or unset it.")
    if status == 403:
        return DownloadError(f"{endpoint} forbids access to {repository} (403). Use a token that may read it.")
    if status == 429:
        wait = _retry_after(error)
        return DownloadError(
            f"{endpoint} answers too many requests (429). Try again in {wait:.0f} seconds, or set HF_TOKEN for a "
            "higher limit.",
            retry_after=wait,
        )
    return DownloadError(
        f"{endpoint} answers {status} for {repository}. Try again later; what has arrived is kept.",
        retry_after=RETRY_AFTER_DEFAULT if status >= 500 else None,
    )


def _retry_after(error: HfHubHTTPError) -> float:
    value = error.response.headers.get("Retry-After", "")
    return float(value) if value.isdigit() else RETRY_AFTER_DEFAULT
