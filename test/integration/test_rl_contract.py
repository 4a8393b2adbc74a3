"""The committed contract against the real miles-rl that ``test/run.sh`` has installed."""

from __future__ import annotations

from pathlib import Path

from musa_titan.doctor.upstreams import upstream_at
from musa_titan.patching.lock import Lock
from musa_titan.rl import contract

SITE = next((Path(__file__).resolve().parents[2] / ".venv-rl").glob("lib/python*/site-packages"))


def test_the_installed_miles_is_as_the_contract_says() -> None:
    assert contract.compare("miles", SITE, "miles 0.0.2") == []


def test_doctor_knows_every_patched_definition_of_it_and_of_the_megatron_that_it_brings() -> None:
    upstream = upstream_at(SITE)
    assert upstream.title == "megatron-core 0.16.0rc0 and miles"
    found = upstream.findings(contract.patches_of("miles"), Lock.read())
    assert {finding.state for finding in found} == {"known", "present"}
    assert all("miles 0.0.2" in finding.seen_in for finding in found if finding.state == "known")
