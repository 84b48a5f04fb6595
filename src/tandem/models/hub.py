"""Fetch a model from a hub that speaks Hugging Face's API.

`huggingface_hub` does the talking: authentication, redirects, retries within a transfer. On top of it we keep partial
files under names of our own, because it starts a file anew after an interruption, and check every file's hash, because
it checks sizes only.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from tandem.errors import CancelledError, DownloadError, UnsupportedModelError
from tandem.models.disk import RESERVE, check_disk_space
from tandem.models.hub_errors import hub_errors, offline_message
from tandem.models.meter import Meter
from tandem.models.progress import ProgressCallback, ignore_progress
from tandem.models.wanted import is_wanted

PARTIAL_SUFFIX = ".part"
WORKERS = 4
ATTEMPTS = 2
"""How often a file that arrives damaged is fetched."""
HASH_CHUNK = 4 << 20


class HubFile(msgspec.Struct, frozen=True):
    """One file of a repository. `digest` is SHA-256 for large files, git's blob hash for the others."""

    path: str
    size: int
    digest: str
    large: bool


class Listing(msgspec.Struct, frozen=True):
    """What a repository holds at one commit, reduced to what a model needs."""

    repository: str
    commit: str
    files: tuple[HubFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def hub_endpoint() -> str:
    """The hub's address: `HF_ENDPOINT`, else the public one."""
    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def list_repository(repository: str, *, revision: str | None = None, offline: bool = False) -> Listing:
    """Ask the hub what `repository` holds.

    Raises:
        DownloadError: offline, gated, not found, refused, unreachable.
        UnsupportedModelError: it holds no safetensors.
    """
    if offline or constants.is_offline_mode():
        raise DownloadError(offline_message(repository))
    endpoint = hub_endpoint()
    with hub_errors(repository, endpoint):
        api = HfApi(endpoint=endpoint, library_name="tandem")
        info = api.model_info(repository, revision=revision)
        entries = [
            entry
            for entry in api.list_repo_tree(repository, recursive=True, revision=info.sha)
            if isinstance(entry, RepoFile)
        ]
    files = tuple(
        HubFile(entry.path, entry.lfs.size, entry.lfs.sha256, True)
        if entry.lfs is not None
        else HubFile(entry.path, entry.size, entry.blob_id, False)
        for entry in entries
        if is_wanted(entry.path, [other.path for other in entries])
    )
    if not any(file.path.endswith(".safetensors") for file in files):
        gguf = [entry.path for entry in entries if entry.path.endswith(".gguf")]
        advice = (
            f"It holds GGUF files: fetch one of them ({', '.join(gguf[:3])}) and use: tandem models import FILE"
            if gguf
            else "Choose a repository with safetensors weights."
        )
        raise UnsupportedModelError(f"{repository} holds no *.safetensors weights. {advice}")
    return Listing(repository, str(info.sha), files)


def download(listing: Listing, staging: Path, progress: ProgressCallback = ignore_progress) -> None:
    """Fetch the listed files into `staging`, going on from what an earlier, interrupted call left there.

    The caller holds a lock that guards `staging`. On return it holds the listed files, checked, and nothing else.

    Raises:
        NoSpaceError: too little disk space.
        DownloadError: transfer broken, a file damaged twice.
    """
    staging.mkdir(parents=True, exist_ok=True)
    _drop_unlisted(listing, staging)
    arrived = sum(file.size for file in listing.files if (staging / file.path).is_file())
    partial = sum(path.stat().st_size for path in staging.rglob(f"*{PARTIAL_SUFFIX}"))
    check_disk_space(staging, listing.size - arrived - partial, listing.repository, RESERVE)
    meter = Meter("download", listing.size, progress)
    missing = [file for file in listing.files if not (staging / file.path).is_file()]
    meter.add(arrived)
    with hub_errors(listing.repository, hub_endpoint()), ThreadPoolExecutor(WORKERS) as pool:
        jobs = [pool.submit(_fetch, listing, file, staging, meter) for file in missing]
        try:
            wait(jobs, return_when=FIRST_EXCEPTION)
        finally:
            if not all(job.done() for job in jobs):
                meter.stop()  # or leaving this block would wait for gigabytes
                pool.shutdown(cancel_futures=True)
        failures = [error for job in jobs if not job.cancelled() and (error := job.exception()) is not None]
        # The first failure stops the other files, so theirs say nothing.
        failures.sort(key=lambda error: isinstance(error, CancelledError))
        if failures:
            raise meter.cause or failures[0]


def file_digest(path: Path, *, large: bool) -> str:
    """SHA-256 of a large file; for others git's blob hash: SHA-1 of `blob <size>\\0` and the content."""
    digest = (
        hashlib.sha256() if large else hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    )
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _fetch(listing: Listing, file: HubFile, staging: Path, meter: Meter) -> None:
    """Fetch one file; a damaged one is fetched anew once."""
    final = staging / file.path
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(f"{final.name}.{file.digest[:16]}{PARTIAL_SUFFIX}")
    for _ in range(ATTEMPTS):
        _transfer(listing, file, partial, meter)
        if partial.stat().st_size == file.size and file_digest(partial, large=file.large) == file.digest:
            partial.rename(final)
            return
        meter.add(-partial.stat().st_size)
        partial.unlink()
    raise DownloadError(
        f"{file.path} of {listing.repository} arrived damaged {ATTEMPTS} times: its hash is not the one the hub names. "
        "Try again later, or another HF_ENDPOINT."
    )


def _transfer(listing: Listing, file: HubFile, partial: Path, meter: Meter) -> None:
    endpoint = hub_endpoint()
    url = hf_hub_url(listing.repository, file.path, revision=listing.commit, endpoint=endpoint)
    headers = build_hf_headers(library_name="tandem")
    metadata = get_hf_file_metadata(url, endpoint=endpoint, headers=headers)
    if urlsplit(metadata.location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)  # the token is the hub's, not its content network's
    with partial.open("ab") as output:
        start = output.tell()
        meter.add(start)
        if start < file.size:
            http_get(
                metadata.location,
                output,
                resume_size=start,
                headers=headers,
                expected_size=file.size,
                displayed_filename=file.path,
                tqdm_class=meter.bar_class(),
            )


def _drop_unlisted(listing: Listing, staging: Path) -> None:
    """Remove what an earlier try fetched of another commit. Whole files stay if their hash is still the listed one."""
    listed = {file.path: file for file in listing.files}
    for path in [path for path in staging.rglob("*") if path.is_file()]:
        name = path.relative_to(staging).as_posix()
        if path.name.endswith(PARTIAL_SUFFIX):
            whole, digest = name.removesuffix(PARTIAL_SUFFIX).rsplit(".", 1)
            keep = whole in listed and listed[whole].digest.startswith(digest)
        else:
            file = listed.get(name)
            keep = file is not None and file_digest(path, large=file.large) == file.digest
        if not keep:
            path.unlink()
