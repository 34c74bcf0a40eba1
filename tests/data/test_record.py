"""Recorded profiles are of the files that are in the tree, in today's format; else it is said how to renew them."""

import hashlib

import pytest

from autopar.formats.cluster import Cluster
from autopar.formats.profile import Profile
from profiled import DATA, RECORDED

RENEW = "run `python tests/data/record.py {}`"


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_profile_is_of_its_models_file_and_in_todays_format(name: str) -> None:
    file, (model, batch) = DATA / f"{name}.json", RECORDED[name]
    profile, renew = Profile.load(file), RENEW.format(name)
    assert profile.model.source == model.name
    assert profile.model.sha256 == hashlib.sha256(model.read_bytes()).hexdigest(), f"{model.name} has changed; {renew}"
    assert profile.batch == batch, renew
    assert profile.dumps() == file.read_text(), f"the format has changed; {renew}"


def test_all_that_is_recorded_is_named_and_the_cluster_is_in_todays_format() -> None:
    assert {path.stem for path in DATA.glob("*.json")} == {*RECORDED, "cluster"}
    assert Cluster.load(DATA / "cluster.json").dumps() == (DATA / "cluster.json").read_text(), RENEW.format("mlp-64")
