"""Content logits grow fast in a model that had settled: what precedes concentration.

Fast growth is normal in the first few hundred steps, when kap climbs from 0 to about 1. What
healthy runs do not show is doubling within the memory of the slow average while already past 1,
with J falling along.
"""

import numpy as np

from entropy_monitor.alerts.view import Condition, View


def growth(view: View) -> Condition:
    """The kap of a model's median head at least doubled against its slow average, past freezing, with J falling."""
    rule, policy = view.policy.logit_growth, view.policy
    full = policy.concentration.full_group
    evenness, log_spread = view.reliable
    on, keep = view.nothing(), view.nothing()
    past = log_spread - view.log_spread_before > np.log(rule.factor)
    far = (log_spread > np.log(max(rule.spread, 1e-9))) & (evenness < rule.evenness)
    fell = evenness < rule.fall * view.evenness_before
    first = view.reading.members[0] >= full
    on[0] = bool(view.settled and view.same_length and first and (past & far & fell)[0])
    keep[0] = bool(
        view.log_spread[0] > np.log(max(rule.spread / policy.margin, 1e-9))
        and view.evenness[0] < min(1.0, policy.margin * rule.evenness)
    )
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
