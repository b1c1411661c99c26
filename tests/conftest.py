"""Settings every test runs under, and the tiny models most of them use."""

import os

# Before torch, vLLM or DeepSpeed are imported: no hub, one thread, and only errors on the console.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Directory of tiny models: `models(kind, **config)` builds each once and returns its path."""
    from tests.tiny import build_model

    root = tmp_path_factory.mktemp("models")
    built = {}

    def get(kind: str = "qwen2", **config):
        key = (kind, tuple(sorted(config.items(), key=str)))
        if key not in built:
            built[key] = str(build_model(root / f"{kind}-{len(built)}", kind, **config))
        return built[key]

    return get
