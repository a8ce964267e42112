"""Content logits grow fast in a model that had settled: what precedes concentration.

Fast growth is normal in the first few hundred steps, when kap climbs from 0 to about 1. What
healthy runs do not show is doubling within the memory of the slow average while already past 1,
with J falling along.
"""

import numpy as np

from entropy_monitor.alerts.concentration import at_random
from entropy_monitor.alerts.view import Condition, View


def growth(view: View) -> Condition:
    """The median head's kap multiplied against its slow average, past freezing, with J falling."""
    rule, policy = view.policy.logit_growth, view.policy
    evenness, log_spread = view.reliable
    first = 1 + view.layout.layers
    spread = np.log(view.by_level(rule.spread_model, rule.spread_layer, np.inf))
    even = view.by_level(rule.evenness_model, rule.evenness_layer, 0.0)
    group = view.reading.members >= policy.concentration.full_group
    group[first:] = False
    with np.errstate(invalid="ignore"):
        past = log_spread - view.log_spread_before > np.log(rule.factor)
        on = group & past & (log_spread > spread) & (evenness < even)
        keep = group & (view.log_spread > spread - np.log(policy.margin))
        keep &= view.evenness < policy.margin * even
    on &= np.bool_(view.settled and view.same_length)
    on &= at_random(view, on)
    return Condition(name="growth", on=on, keep=keep, persist=policy.persist)


def bound(view: View) -> Condition:
    """A head's largest logit passed the fixed bound, if the policy sets one."""
    limit = view.policy.logit_growth.max_logit
    on, keep = view.nothing(), view.nothing()
    if limit is not None:
        heads = slice(1 + view.layout.layers, None)
        with np.errstate(invalid="ignore"):
            on[heads] = view.reading.max_logit.ravel() > limit
            keep[heads] = view.reading.max_logit.ravel() > limit / view.policy.margin
    return Condition(name="bound", on=on, keep=keep, persist=view.policy.persist)
