"""Silence the stack unless asked. Light on purpose: it must run before torch, transformers, vLLM and DeepSpeed are imported."""

import logging
import os
import warnings

VERBOSE_VARIABLE = "GRPO_EXT_VERBOSE"


def quiet() -> None:
    """Turn the chatter of vLLM, DeepSpeed and transformers off; errors stay. Does nothing with GRPO_EXT_VERBOSE=1."""
    if os.environ.get(VERBOSE_VARIABLE, "0") not in ("", "0"):
        return
    for name, value in {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # read when torch is imported
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)
    import torch

    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns that it had to guess
    for logger in ("DeepSpeed", "vllm.triton_utils.importing", "torch._library.triton", "torch.distributed.elastic"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    for module in ("torch.distributed.c10d_logger", "vllm", "torch"):
        warnings.filterwarnings("ignore", category=FutureWarning, module=module)
    warnings.filterwarnings("ignore", message=".*pin_memory.*")
    warnings.filterwarnings("ignore", message=".*torch.distributed.reduce_op.*")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
