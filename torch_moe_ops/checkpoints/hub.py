"""Repositories of the Hugging Face Hub by name: their files in the cache that huggingface_hub keeps."""

from __future__ import annotations

import os
import re
from functools import cache

from torch_moe_ops.files.errors import CheckpointError, short

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
# What a checkpoint is read from; in folders of a repository lie other models.
_FILES = ("*.safetensors", "*.safetensors.index.json", "config.json", "hf_quant_config.json")


def is_repository(path: str) -> bool:
    """Whether `path` names a repository, "org/name" or "org/name@revision", and nothing on this machine."""
    if ".." in path.partition("@")[2].split("/") or path.endswith((".safetensors", ".json")):
        return False
    return bool(_NAME.fullmatch(path)) and not os.path.lexists(path) and not os.path.lexists(path.partition("/")[0])


@cache
def repository_folder(name: str) -> str:
    """The folder with a repository's files, downloaded if they are not in the cache. Asked once in a process.

    Raises: CheckpointError where the package or the repository is missing, or cannot be reached.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{name}: no such file or folder. To read a repository of the Hugging Face Hub, huggingface_hub must be "
            f"installed: pip install huggingface_hub ({error})"
        ) from error
    repository, _, revision = name.partition("@")
    try:
        folder = snapshot_download(
            repository, revision=revision or None, allow_patterns=list(_FILES), ignore_patterns=["*/*"]
        )
    except (OSError, ValueError) as error:  # no network, no such repository, no access
        reason = short(" ".join(str(error).split()))
        raise CheckpointError(
            f"{name}: no such file or folder, and the Hugging Face Hub or its cache gave no repository of that name: "
            f"{type(error).__name__}: {reason}"
        ) from error
    return os.fspath(folder)
