"""``musa-titan patches``."""

from __future__ import annotations

from musa_titan.commands.output import Json, print_json, print_table
from musa_titan.doctor.upstreams import all_patches, installed_upstream
from musa_titan.patching.lock import Lock
from musa_titan.patching.spec import MusaTitanError, Patch


def patches(json: Json = False) -> None:
    """List everything that may be changed upstream: id, target, why, and its state here.

    Here are the installed Megatron, slime and miles, or those in MEGATRON_PATH, SLIME_PATH and MILES_PATH.
    """
    declared = all_patches()
    try:
        upstream = installed_upstream()
        states = {finding.id: finding.state for finding in upstream.findings(declared, Lock.read())}
        version, against = upstream.version, f"; state against {upstream.title}"
    except MusaTitanError:
        states, version, against = {}, "", ""
    rows = [_row(patch, states.get(patch.id, "no upstream")) for patch in declared]
    if json:
        print_json({"upstream_version": version, "patches": rows})
        return
    columns = ("id", "target", "feature", "why", "state")
    print_table(f"{len(rows)} patches{against}", columns, [[row[column] for column in columns] for row in rows])


def _row(patch: Patch, state: str) -> dict[str, str]:
    return {
        "id": patch.id,
        "kind": patch.kind,
        "target": patch.target,
        "feature": patch.feature,
        "why": patch.why,
        "remove_when": patch.remove_when,
        "state": state,
    }
