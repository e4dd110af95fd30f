"""Token losses in torch, one module each; `registry.token_losses` puts loss, correction and KL term together.

Notation: lp = log-prob under the policy being optimised (gradient), lp_old = proximal policy, lp_mu = sampler,
lp_ref = reference, r = exp(lp - lp_old), A = advantage, [lo, hi] = [1 - clip_low, 1 + clip_high], sg = stop-gradient.
Formulas are losses, to be minimised. Each function gives one value per token; aggregation is a weight per token
(algo.aggregation).
"""
