"""Names and descriptions of the metrics of a training job.

docs/build.py prints them. Words in capitals stand for a value: PHASE, REASON, OUTCOME.
"""

JOB_METRICS: dict[str, str] = {
    "learn/loss": "Mean loss of the optimizer steps.",
    "learn/grad_norm": "Mean norm of the gradient before clipping.",
    "learn/entropy": "Mean entropy of the policy at the labels.",
    "learn/ratio": "Mean probability ratio of the policy to the policy at the start of the job.",
    "learn/clip_frac": "Share of labels whose ratio was clipped.",
    "learn/mismatch_kl": "KL divergence between the sampler and the learner at the start of the job, over "
    "labels with an exact log-probability.",
    "learn/kl": "KL divergence from the base model; only with `beta` or `kl_penalty_coef`.",
    "learn/pairs": "Preference pairs; this and the next four only with the loss `dpo`.",
    "learn/chosen_reward": "Mean implicit reward of the preferred trajectories: `dpo_beta` times the log-ratio "
    "of policy to reference, before each optimizer step.",
    "learn/rejected_reward": "Mean implicit reward of the rejected trajectories.",
    "learn/reward_margin": "Mean difference of the two.",
    "learn/reward_accuracy": "Share of pairs in which the preferred trajectory has the larger implicit reward.",
    "learn/learning_rate": "Mean learning rate of the optimizer steps.",
    "learn/optimizer_steps": "Optimizer steps.",
    "learn/micro_batches": "Packed rows.",
    "learn/row_tokens": "Token budget of a row.",
    "learn/groups": "Groups that were trained on.",
    "learn/flat_groups": "Groups in which all rewards are equal; they have no labels.",
    "learn/flat_rollouts": "Rollouts of these groups.",
    "learn/rollouts": "Rollouts that were trained on.",
    "learn/long_rollouts": "Rollouts that were left out because a call exceeds `max_seq_length`.",
    "learn/labels": "Tokens that were trained on.",
    "learn/labels_exact": "Of these, tokens with the unmasked log-probability of the sampler.",
    "learn/labels_inexact": "Of these, tokens whose log-probability is masked, or minus infinity "
    "(-9999); their importance weight is 1.",
    "learn/labels_without_logprob": "Of these, tokens without a log-probability; their importance weight is 1.",
    "learn/labels_dropped/REASON": "Sampled tokens that were not trained on, by reason.",
    "learn/logical_tokens": "Tokens of all labelled calls, prompts included, without sharing.",
    "learn/computed_tokens": "Tokens that the learner computed: nodes of the token trie.",
    "learn/shared_tokens": "Tokens that were not computed, because calls share their prefix.",
    "learn/oldest_call_step": "Oldest policy step that answered a call of the job.",
    "learn/newest_call_step": "Newest policy step that answered a call of the job.",
    "learn/staleness": "Steps between the oldest call and the policy that was trained.",
    "learn/tokens_per_s": "Logical tokens per second.",
    "learn/step_s": "Duration of the job in the learner.",
    "learn/PHASE_s": "Duration by phase: pack, old, policy, reference, forward, backward, optimizer, probe. "
    "On CUDA the learner launches a backward pass and does not wait for it: most of its time counts as the "
    "next row's forward phase.",
    "serve/held_s": "Time that serving was paused while the learner ran.",
    "turns/first": "Turns that were the first of their rollout. A turn is one request to the policy that is "
    "trained on; its choices share one prompt and count once.",
    "turns/bridged": "Turns whose prompt continues the ids that an earlier call was fed and sampled.",
    "turns/re-rendered": "Turns that send an earlier answer back but could not continue its ids; the prompt "
    "was rendered from text.",
    "turns/branched": "Turns that send no earlier answer back: sub-agents and other new conversations, and "
    "the same prompt again.",
    "turns/OUTCOME/REASON": "Turns by reason, with underscores for spaces; a bridged turn may have several.",
    "turns/bridged/forked": "Bridged turns that continue an answer which another turn has continued before.",
    "turns/branches": "Turns that start a branch: re-rendered, branched or forked.",
    "turns/malformed": "Answers with a tool call or reasoning that does not parse.",
    "turns/prompt_tokens": "Tokens of the prompts of all turns.",
    "turns/continued_tokens": "Of these, tokens that bridged turns took over from the ids of earlier calls.",
}

ART_NAMES = {
    "learn/loss": "loss/train",
    "learn/entropy": "loss/entropy",
    "learn/kl": "loss/kl_div",
    "learn/grad_norm": "loss/grad_norm",
    "learn/learning_rate": "loss/learning_rate",
    "learn/logical_tokens": "data/step_trainer_tokens",
    "learn/step_s": "time/step_trainer_s",
}
"""Hone's metrics, and the names that ART's clients know them by."""
