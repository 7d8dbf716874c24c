"""tilefold as an attention backend of vLLM, which finds it by the entry point `tilefold` of the group vllm.general_plugins.

`plugin` only registers a name: nothing of tilefold's kernels or of the backend is imported before vLLM asks for it."""

__all__ = ["plugin"]

BACKEND = "tilefold.integrations.vllm_backend.TilefoldBackend"


def plugin() -> None:
    """Make `--attention-backend CUSTOM` vLLM's name for tilefold's kernels.  vLLM calls this in each of its processes.

    Source: vllm/v1/attention/backends/registry.py of vLLM 0.33 (https://github.com/vllm-project/vllm)."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
