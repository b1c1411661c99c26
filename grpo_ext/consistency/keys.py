"""Names under which the agreement of rollouts and actor is logged, and the files it is dumped to. Here and nowhere else.

d: |p_rollout - p_actor| of a sampled token; l: log pi_old - log mu in nats; rho = exp(l); all over the loss mask.
"""

PREFIX = "training/"

MAX = "training/rollout_probs_diff_max"
MEAN = "training/rollout_probs_diff_mean"
STD = "training/rollout_probs_diff_std"
PEARSON = "training/rollout_actor_probs_pearson_corr"
P50 = "training/rollout_probs_diff_p50"
P99 = "training/rollout_probs_diff_p99"
P999 = "training/rollout_probs_diff_p99.9"
QUANTILES = {P50: 0.5, P99: 0.99, P999: 0.999}
DECILE = "training/rollout_probs_diff_decile/{decile}"  # mean d in tenths of each row, 0 the first
RATIO_OUTSIDE = "training/rollout_ratio_outside_fraction"  # share of tokens with rho outside RATIO_BOUNDS
RATIO_BOUNDS = (0.9, 1.1)
BIAS = "training/rollout_logp_bias"  # mean l: negative where the engine is surer of its tokens than the actor
LOGP_MAX = "training/rollout_logp_diff_max"  # max |l|
TOKENS = "training/rollout_tokens"
UNSCORED = "training/rollout_unscored_tokens"  # the engine returned no log-prob
NON_FINITE = "training/rollout_nonfinite_tokens"  # a log-prob is there, but infinite, or the actor's is none
VERSION = "training/rollout_policy_version"  # newest policy version among the rollouts

# Metrics only, under the names verl users know.
KL = "rollout_corr/kl"
K3 = "rollout_corr/k3_kl"
ROLLOUT_PPL = "rollout_corr/rollout_ppl"
TRAINING_PPL = "rollout_corr/training_ppl"
CHI2_TOKEN = "rollout_corr/chi2_token"
CHI2_SEQ = "rollout_corr/chi2_seq"
EFFECTIVE_SAMPLE_SIZE = "rollout_corr/eff_sample_size"

CELL = "training/rollout_probs_diff/s{sample}_p{position:04d}"

DIFF_FILE = "prob_diff_step_{step}.npy"
MASK_FILE = "prob_mask_step_{step}.npy"
TOKENS_FILE = "prob_tokens_step_{step}.parquet"
