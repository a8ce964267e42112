import dataclasses
from pathlib import Path

import pytest

from entropy_monitor.alerts import AlertPolicy
from entropy_monitor.alerts.presets import PRESETS

CONFIGS = Path(__file__).parents[2] / "configs" / "alerts"


def test_round_trip():
    policy = AlertPolicy.load("strict")
    assert AlertPolicy.from_dict(policy.to_dict()) == policy


@pytest.mark.parametrize("name", PRESETS)
def test_config_files_are_the_presets(name):
    assert AlertPolicy.load(CONFIGS / f"{name}.yaml") == AlertPolicy.load(name)


def test_toml(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text(
        "persist = 50\n[concentration]\nspread_model = 3\n[logit_growth]\nmax_logit = 100\n"
    )
    policy = AlertPolicy.load(path)
    assert (policy.persist, policy.concentration.spread_model) == (50.0, 3.0)
    assert policy.logit_growth.max_logit == 100.0
    assert policy.concentration.spread_layer == AlertPolicy().concentration.spread_layer


def test_values_pass_through_load():
    policy = AlertPolicy(persist=40.0)
    assert AlertPolicy.load(policy) is policy
    assert AlertPolicy.load(None) == AlertPolicy()


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        AlertPolicy().persist = 1.0


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"persists": 5}, "`policy` has no 'persists'; it has warmup, smoothing"),
        ({"concentration": {"evennes": 1}}, "`policy.concentration` has no 'evennes'"),
        (
            {"concentration": {"evenness_model": 1.5}},
            r"`evenness_model` must be a number in \[0, 1\], got 1.5",
        ),
        ({"concentration": 3}, "`policy.concentration` must be a table of names and values, got 3"),
        ({"concentration": {"enabled": "yes"}}, "must be true or false, got 'yes'"),
        ({"persist": "long"}, "`policy.persist` must be a number, got 'long'"),
        ({"persist": True}, "`policy.persist` must be a number, got True"),
        ({"persist": -1}, "`persist` must be a number at least 0, got -1"),
        ({"report": "loud"}, "`report` must be one of info, warn, error, got 'loud'"),
        ({"margin": 0.5}, "`margin` must be a number at least 1, got 0.5"),
    ],
)
def test_errors_say_what_is_wrong(data, words):
    with pytest.raises(ValueError, match=words):
        AlertPolicy.from_dict(data)


def test_unknown_name_lists_names():
    with pytest.raises(
        ValueError, match=r"must be default, strict, quiet or a \.toml or \.yaml file, got 'loud'"
    ):
        AlertPolicy.load("loud")


def test_unreadable_files(tmp_path):
    for name, text in (("a.toml", "= 3"), ("a.yaml", "a: [")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match="is no valid"):
            AlertPolicy.load(tmp_path / name)
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ValueError, match=r"ends in \.toml, \.yaml"):
        AlertPolicy.load(tmp_path / "a.json")
