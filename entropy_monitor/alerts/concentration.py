"""Content attention collapses onto few keys: the alarm that matters.

The bounds are in `ConcentrationRule`.

Two witnesses must agree: the evenness J of the content and the spread of its logits, kap. J alone
is low in healthy previous-token and induction heads; kap alone is high where one outlier key
sticks out of otherwise even rows. On total entropy the same rule fires on sink growth; J does not
see the sink.
"""

import numpy as np

from entropy_monitor.alerts.reading import Array, Mask
from entropy_monitor.alerts.view import Condition, View


def bounds(view: View) -> tuple[Array, Array]:
    """Bounds on J and log kap per group, stricter for groups of few heads."""
    rule = view.policy.concentration
    first = 1 + view.layout.layers
    weight = view.bound_weight(rule.full_group)
    groups = view.by_level(rule.evenness_model, rule.evenness_layer, rule.evenness_head)
    evenness = rule.evenness_head + weight * (groups - rule.evenness_head)
    spread = view.by_level(rule.spread_model, rule.spread_layer, rule.spread_head)
    members = np.maximum(view.reading.members[:first], 1.0)
    spread[:first] = np.maximum(spread[:first], rule.spread_head / np.sqrt(members))
    return evenness, np.log(spread)


def conditions(view: View) -> list[Condition]:
    """`level`, `drop` and, for the severity, `severe`."""
    limits = bounds(view)
    return [level(view, limits), drop(view), severe(view, limits)]


def level(view: View, limits: tuple[Array, Array]) -> Condition:
    """J below its bound and kap above its bound, both beyond their own noise."""
    rule, margin = view.policy.concentration, view.policy.margin
    evenness_bound, spread_bound = limits
    evenness, log_spread = view.reliable
    if not view.has_spread:
        on = evenness < rule.alone * evenness_bound
        keep = view.evenness < rule.alone * margin * evenness_bound
    else:
        on = (evenness < evenness_bound) & (log_spread > spread_bound)
        keep = view.evenness < margin * evenness_bound
        keep &= view.log_spread > spread_bound - np.log(margin)
    heads = slice(1 + view.layout.layers, None)
    on[heads] &= _grew(view)[heads]
    on &= at_random(view, on)
    return Condition(name="level", on=on, keep=keep, persist=view.policy.persist)


def drop(view: View) -> Condition:
    """The model's J lost half of its slow average and is low, past freezing.

    For abrupt faults, hence unsmoothed, and only where most of the fall came at once: heads that
    sharpen within a hundred steps, for example to make up for a sink, are healthy. At model level
    only: a layer in which induction or positional heads form does just this, and is healthy.
    """
    rule, policy, reading = view.policy.concentration, view.policy, view.reading
    ready = view.settled and view.same_length and view.has_spread
    fell = reading.evenness < rule.drop * view.evenness_before
    fell &= reading.evenness < rule.drop_at_once * view.evenness_last
    beyond_noise = view.evenness_before - reading.evenness > 6.0 * view.evenness_noise
    low = (reading.evenness < rule.drop_below) & (
        reading.log_spread > np.log(max(rule.drop_spread, 1e-9))
    )
    group = np.zeros_like(low)
    group[0] = reading.members[0] >= rule.full_group
    keep = group & (view.evenness < policy.margin * rule.drop_below)
    keep &= view.log_spread > np.log(max(rule.drop_spread / policy.margin, 1e-9))
    on = group & fell & beyond_noise & low if ready else view.nothing()
    on &= at_random(view, on)
    return Condition(name="drop", on=on, keep=keep, persist=policy.abrupt)


def severe(view: View, limits: tuple[Array, Array]) -> Condition:
    """Far beyond the bounds at layer or model level, for a while: a warning becomes an error."""
    rule = view.policy.concentration
    on = view.nothing()
    if view.has_spread:
        groups = slice(0, 1 + view.layout.layers)
        evenness, log_spread = view.reliable
        far = limits[1][groups] + np.log(rule.error_spread)
        on[groups] = (evenness[groups] < limits[0][groups]) & (log_spread[groups] > far)
    persist = max(rule.error_after, view.policy.persist)
    return Condition(name="severe", on=on, keep=on, persist=persist)


def at_random(view: View, where: Mask) -> Mask:
    """Groups whose concentrated heads pick their keys no better than random logits would.

    The third witness. Copying and induction heads concentrate as far as a collapsed head does, but
    with less logit spread: their `View.waste` is about 1 nat, up to 2 while they are learning; that
    of collapsing heads is 1.4 to 5, at the lower end where a whole model starts with random logits.
    Not asked is a model beyond ``error_spread`` times its bound on kap, and a layer or head beyond
    the square of that: no task was seen to need such logits. Worked out only where of use.
    """
    rule = view.policy.concentration
    if not where.any() or not view.has_spread:
        return np.ones_like(where)
    waste = view.waste
    with np.errstate(invalid="ignore"):
        random = waste > view.by_level(rule.waste_model, rule.waste_layer, rule.waste_head)
    random |= np.isnan(waste)
    beyond = np.log(rule.error_spread)
    random |= view.log_spread > bounds(view)[1] + view.by_level(beyond, 2 * beyond, 2 * beyond)
    return np.asarray(random)


def _grew(view: View) -> Mask:
    """Heads whose kap grew: heads that are concentrated and stay so are normal."""
    rule = view.policy.concentration
    with np.errstate(invalid="ignore"):
        grew: Mask = view.log_spread - view.log_spread_before > np.log(rule.head_growth)
        if not view.has_spread:
            grew = view.evenness < view.evenness_before / rule.head_growth
    return grew if view.settled else view.nothing()
