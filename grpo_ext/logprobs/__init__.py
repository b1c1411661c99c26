"""When log-probs are computed, how, and what for. All but `forward` is pure."""
