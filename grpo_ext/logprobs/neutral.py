"""Where grouping, trimming or sharing prompts would change what is learned. Each function names the obstacle, or returns None.

Checked by trial over loss types, correction modes, off-policy masks, tool masks and truncated rows: the gradient summed over an
optimizer window stays the same for the losses in `NEUTRAL_LOSSES`. The others normalise, rank or balance within one slice.
"""

from typing import Any

from trl import GRPOTrainer

from grpo_ext import _trl
from grpo_ext.logprobs.positions import dynamic_rope_limit, is_prompt_learning
from grpo_ext.logprobs.tree_forward import ATTENTIONS
from grpo_ext.rollout.guards import corrected_sampling
from grpo_ext.rules.logps import NEUTRAL_LOSSES


def grouping_obstacle(trainer: Any, asked_for: bool = False) -> str | None:
    """Why rows must stay in the slices TRL put them in. asked_for: whether the user set `group_rollouts_by_length=True`."""
    if trainer.loss_type not in NEUTRAL_LOSSES:
        return (
            f"loss_type={trainer.loss_type!r} averages over the tokens of a slice, so which rows share one matters. "
            "Set loss_type='dapo', which averages over the whole batch, to have them grouped."
        )
    if trainer.top_entropy_quantile < 1.0:
        return (
            f"top_entropy_quantile={trainer.top_entropy_quantile} takes its threshold from each slice. "
            "Set top_entropy_quantile=1.0 to have them grouped."
        )
    if trainer._entropy_bonus_enabled:
        return "the entropy bonus is a mean over each slice. Set entropy_coef=0.0 to have them grouped."
    if trainer.aux_loss_enabled:
        return (
            "the load-balancing loss of this mixture of experts is taken over each slice. Set router_aux_loss_coef=0.0 to have "
            "them grouped."
        )
    if not asked_for and type(trainer)._compute_loss is not GRPOTrainer._compute_loss:
        return (
            f"{type(trainer).__name__} brings its own `_compute_loss`, which may depend on the rows of a slice. Set "
            "group_rollouts_by_length=True if it is a sum over rows."
        )
    return None


def trimming_obstacle(trainer: Any, width: int) -> str | None:
    """Why padding must stay on rows of `width` columns (prompt and completion)."""
    low, high = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
    clips = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    if clips and trainer.loss_type == "vespo" and ((low is not None and low > 1) or (high is not None and high < 1)):
        return (
            f"loss_type='vespo' sums the clipped log-ratio over padding too, where the bounds [{low}, {high}] make it differ "
            "from 0. Set bounds that include 1 to have it cut."
        )
    if is_prompt_learning(trainer.model):
        return (
            "this adapter puts its virtual tokens before the padding, so that padding moves them away from the prompt. Train a "
            "LoRA adapter to have it cut."
        )
    limit = dynamic_rope_limit(trainer.model.config)
    if limit is not None and width > limit:
        return (
            f"this model's rotary frequencies follow the width of the batch beyond {limit} tokens, and rows of {width} were "
            "generated. Keep prompt plus completion within that to have it cut."
        )
    return None


def sharing_obstacle(trainer: Any) -> str | None:
    """Why prompts cannot be shared, whatever the rows: the model does not attend as a tree asks, or not in a forward of ours."""
    from grpo_ext.trainer import GRPOExtMixin

    model = trainer.model
    config, attention = model.config, _trl.attention_of(model)
    if config.get_text_config() is not config:
        return "this model is multimodal and numbers its own positions. Set shared_prompt=False."
    if is_prompt_learning(model):
        return "this adapter puts its virtual tokens before every row. Train a LoRA adapter to have them shared."
    layers = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if attention is None or layers:
        what = f"layers of kind {', '.join(layers)}" if layers else "an attention of its own, or a recurrent state"
        return f"{type(model).__name__} has {what}, which no mask reaches. Set shared_prompt=False."
    if attention not in ATTENTIONS:
        return (
            f"attn_implementation={attention!r} knows no trees. Load the model with attn_implementation='sdpa' (or "
            "'flex_attention' on a GPU) to have them shared."
        )
    if trainer.aux_loss_enabled:
        return (
            "the load-balancing loss of this mixture of experts counts every row's own prompt. Set router_aux_loss_coef=0.0 to "
            "have them shared."
        )
    if trainer.args.torch_compile:
        return "a compiled model would be compiled anew for every tree. Set torch_compile=False to have them shared."
    if corrected_sampling(trainer) is not None:
        return "sampling_mismatch='correct' needs the logits of rows. Sample from the whole vocabulary to have them shared."
    owner = _trl.scores_by_itself(trainer, GRPOExtMixin)
    if owner is not None:
        return f"{owner} makes log-probs by a method of its own, which expects rows. Set shared_prompt=False."
    return None


def longest_tree_row(config: Any) -> float:
    """Tokens of a row up to which a tree attends as the row does: the sliding window, or where rotary frequencies begin to move."""
    layers = config.per_layer_config
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * len(layers)
    windows = [
        getattr(layer, "sliding_window", None) for layer, kind in zip(layers, kinds, strict=True) if kind == "sliding_attention"
    ]
    return min((limit for limit in (*windows, dynamic_rope_limit(config)) if limit), default=float("inf"))
