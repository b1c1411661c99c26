"""When log-probs are computed, how, and what for. Pure: `window`, `ratio`, `metrics`; the rest knows the trainer."""
