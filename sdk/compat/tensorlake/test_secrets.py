"""Secrets: named, changed, listed without their values, removed."""

import json

import pytest

from helpers import lifecycle, own, request

VALUE = "the-value-that-nobody-may-see-6f1d"
CHANGED = "the-changed-value-that-nobody-may-see-9b2c"


def create(name, value=VALUE):
    body = {"name": name, "value": value}
    return lifecycle("POST", "/secrets", body=body, headers={"Idempotency-Key": name * 2})


@pytest.fixture
def secret():
    """A secret, and the record that came back when it was made."""
    answer = create("API_TOKEN")
    assert answer.status in (200, 201), answer
    yield answer.json()
    lifecycle("DELETE", f"/secrets/{answer.json()['id']}")


def test_a_secret_is_made_and_its_value_is_not_told(secret):
    assert secret["name"] == "API_TOKEN"
    assert isinstance(secret["created_at_ms"], int)
    listed = lifecycle("GET", "/secrets")
    assert isinstance(listed.json(), list)
    assert [one["name"] for one in listed.json()] == ["API_TOKEN"]
    one = lifecycle("GET", f"/secrets/{secret['id']}")
    assert one.json()["name"] == "API_TOKEN"
    by_name = lifecycle("GET", "/secret-names/API_TOKEN")
    assert by_name.json()["id"] == secret["id"]
    for answer in (listed, one, by_name):
        assert VALUE.encode() not in answer.body


def test_a_name_that_is_taken_is_refused_and_gets_a_new_version(secret):
    assert create("API_TOKEN", CHANGED).status == 409
    path = f"/secrets/{secret['id']}/versions"
    answer = lifecycle("POST", path, body={"value": CHANGED}, headers={"Idempotency-Key": "x"})
    assert answer.status in (200, 201), answer
    assert CHANGED.encode() not in answer.body


def test_a_secret_is_removed():
    made = create("SHORT_LIVED").json()
    assert lifecycle("DELETE", f"/secrets/{made['id']}").status in (200, 204)
    for path in (f"/secrets/{made['id']}", "/secret-names/SHORT_LIVED"):
        assert lifecycle("GET", path).status == 404
    assert lifecycle("DELETE", f"/secrets/{made['id']}").status == 404


def test_a_value_is_neither_in_the_ledger_nor_in_the_log(secret, world):
    lifecycle("POST", f"/secrets/{secret['id']}/versions", body={"value": CHANGED})
    made = lifecycle("POST", "/sandboxes", body={"secret_names": ["API_TOKEN"]}).json()
    taken = lifecycle(
        "POST", f"/sandboxes/{made['sandbox_id']}/snapshot", body={"snapshot_type": "memory"}
    )
    told = [
        lifecycle("GET", f"/sandboxes/{made['sandbox_id']}").body,
        lifecycle("GET", f"/snapshots/{taken.json()['snapshot_id']}").body,
        own("GET", f"/sandboxes/{made['sandbox_id']}").body,
        world.daemon.log.read_bytes(),
    ]
    files = [path for path in world.data_dir.iterdir() if path.is_file()]
    assert any(path.name.startswith("ledger.db") for path in files)
    told += [path.read_bytes() for path in files]
    for text in told:
        assert VALUE.encode() not in text
        assert CHANGED.encode() not in text


def test_a_sandbox_with_a_secret_that_nobody_knows_is_refused(nothing_leaked):
    answer = lifecycle("POST", "/sandboxes", body={"secret_names": ["NO_SUCH_SECRET"]})
    assert answer.status in (400, 404, 422)
    assert b"NO_SUCH_SECRET" in answer.body


def test_a_secret_that_makes_no_sense_is_refused():
    wrong = [{}, {"name": "A"}, {"name": 1, "value": 2}]
    wrong += [{"name": name, "value": "x"} for name in ("", "A=B", "A B")]
    for body in wrong:
        assert lifecycle("POST", "/secrets", body=body).status in (400, 422), json.dumps(body)
    assert lifecycle("GET", "/secrets").json() == []


def test_the_list_that_the_command_line_program_reads_has_names_only(secret):
    answer = request("GET", "/platform/v1/organizations/any/projects/any/secrets?pageSize=100")
    assert answer.status == 200
    assert [one["name"] for one in answer.json()["items"]] == ["API_TOKEN"]
    assert VALUE.encode() not in answer.body
