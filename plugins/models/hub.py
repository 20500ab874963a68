"""The source ``org/name``: a model repository of the Hugging Face Hub, in the hub library's own cache."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slotline.config import EngineConfig
from slotline.errors import DownloadError, ModelNotFound
from slotline.plugins.models.cache import DISK_FULL, CachedModel, explained, folder_format
from slotline.plugins.models.gguf_split import first_parts, parts_of
from slotline.plugins.models.progress import Advance, Progress
from slotline.plugins.models.sources import Located

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, HFCacheInfo

PREFIX = "hf:"
_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?(?::([^:@]+\.gguf))?")
_SMALL = (".json", ".jinja", ".model", ".tiktoken")
_TIMEOUT = 10.0


class HubSource:
    """Fetches ``org/name``, or ``hf:org/name[@revision][:file.gguf]``.

    The hub library honours HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE, and verifies what it fetches. Only
    files that a model needs are fetched. Without a network, what is in the cache is used.
    """

    def resolve(self, name: str, config: EngineConfig, progress: Progress) -> Located | None:
        """Return the repository's folder, or the chosen file in it.

        Raises:
            ModelNotFound: the hub has no such repository, revision or file.
            DownloadError: the hub cannot be reached or refuses, and the model is not in the cache.
        """
        match = _NAME.fullmatch(name.removeprefix(PREFIX))
        if match is None:
            if name.startswith(PREFIX):
                raise ModelNotFound(f"model {name!r} is not of the form hf:org/name[@revision][:file.gguf]")
            return None
        repo, revision, file = match[1], match[2], match[3]
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            folder = _cached(repo, revision, "HF_HUB_OFFLINE is set")
        else:
            folder = _fetched(repo, revision, file, config, progress)
        if file is not None and not (folder / file).is_file():
            raise ModelNotFound(f"{repo} in the cache has no file {file}; fetch it online, without HF_HUB_OFFLINE")
        return Located(folder if file is None else folder / file, f"{PREFIX}{repo}@{folder.name}")

    def list_cached(self) -> list[CachedModel]:
        """Return the repositories in the hub library's cache that hold weights."""
        found = []
        for repo in _cached_repos():
            kind = folder_format(Path(repo.repo_path))
            if kind:
                found.append(CachedModel(repo.repo_id, Path(repo.repo_path), repo.size_on_disk, kind))
        return sorted(found, key=lambda model: model.name)

    def remove(self, name: str) -> bool:
        """Delete all revisions of a repository from the cache; return whether there were any."""
        wanted = name.removeprefix(PREFIX)
        hashes = [
            revision.commit_hash for repo in _cached_repos() if repo.repo_id == wanted for revision in repo.revisions
        ]
        if not hashes:
            return False
        _scan().delete_revisions(*hashes).execute()
        return True


def _scan() -> HFCacheInfo:
    """Look through the cache that downloads go to; the library's own default is fixed when it is imported."""
    from huggingface_hub import constants, scan_cache_dir

    return scan_cache_dir(constants.HF_HUB_CACHE)


def _cached_repos() -> list[CachedRepoInfo]:
    from huggingface_hub import CacheNotFound

    try:
        return [repo for repo in _scan().repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []


def _fetched(repo: str, revision: str | None, file: str | None, config: EngineConfig, progress: Progress) -> Path:
    """Ask the hub for the file list, then fetch what is needed of it."""
    from huggingface_hub import HfApi, errors, snapshot_download

    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=_TIMEOUT)
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"{repo} is gated: accept its terms at the hub and set HF_TOKEN to a token that may read it"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        at = f" at revision {revision!r}" if revision else ""
        raise ModelNotFound(f"the hub has no model {repo!r}{at}, or HF_TOKEN may not see it") from error
    except errors.HFValidationError as error:
        raise ModelNotFound(f"{repo!r} is not a Hugging Face id: {error}") from error
    except Exception as error:  # which transport errors there are depends on the library's version
        return _cached(repo, revision, f"the hub cannot be reached: {_first_line(error)}")
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}
    chosen = choose_files(repo, list(sizes), file, trust_pickle=config.trust_pickle)
    try:
        with progress.step(f"fetching {repo}", sum(sizes[name] for name in chosen)) as advance:
            folder = snapshot_download(
                repo, revision=info.sha, allow_patterns=list(chosen), tqdm_class=_bars(advance), etag_timeout=_TIMEOUT
            )
    except Exception as error:  # as above
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise DownloadError(f"cannot fetch {repo}: {explained(error, 'HF_HOME')}") from error
        raise DownloadError(
            f"cannot fetch {repo}: {_first_line(error)}; try again, what has arrived is kept"
        ) from error
    return Path(folder)


def choose_files(repo: str, names: Sequence[str], file: str | None, *, trust_pickle: bool) -> list[str]:
    """Return the files of a repository that a model needs: safetensors before GGUF before pickles.

    Raises:
        ModelNotFound: there are no weights, or several GGUF files to choose from.
    """
    top = [name for name in names if "/" not in name]
    small = [name for name in top if name.endswith(_SMALL)]
    if file is not None:
        if file not in names:
            raise ModelNotFound(f"{repo} has no file {file}; it has {_some([n for n in names if n.endswith('.gguf')])}")
        return [name for name in parts_of(file) if name in names]
    tensors = [name for name in top if name.endswith(".safetensors")]
    if tensors:
        # Some repositories carry the same weights twice, in the publisher's own layout.
        return small + ([name for name in tensors if name.startswith("model")] or tensors)
    packed = [name for name in top if name.endswith(".gguf")]
    if len(first_parts(packed)) == 1:
        return small + packed
    if packed:
        choice = _some(first_parts(packed))
        raise ModelNotFound(f"{repo} holds several models; choose one as hf:{repo}:FILE from {choice}")
    pickles = [name for name in top if name.endswith(".bin")]
    if pickles and trust_pickle:
        return small + pickles
    hint = "; it has pickled weights (.bin), which trust_pickle allows" if pickles else ""
    raise ModelNotFound(f"{repo} holds no safetensors or GGUF weights{hint}")


def _cached(repo: str, revision: str | None, why: str) -> Path:
    """Return the cached snapshot.

    Raises:
        DownloadError: there is none.
    """
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(repo, revision=revision, local_files_only=True))
    except (errors.LocalEntryNotFoundError, errors.HFValidationError, ValueError) as error:
        raise DownloadError(
            f"cannot fetch {repo}: {why}, and it is not in the cache. Check the network or HF_ENDPOINT, fetch it where "
            "there is one and copy the cache, or give the path of a model on this machine"
        ) from error


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(sorted(names)[:8]) or "none"
    return shown + (", ..." if len(names) > 8 else "")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _bars(advance: Advance) -> Any:
    """Return a stand-in for the hub library's bars that only passes on how many bytes came."""
    base: Any = importlib.import_module("huggingface_hub.utils").tqdm

    class Forwarding(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            if self._counts_bytes:
                advance(int(n or 0))

    return Forwarding
