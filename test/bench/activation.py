"""What activation costs an interpreter: CPU time of ``python -c pass``, off and on, by each way in.

usage: python -m test.bench.activation [--runs N]

The last line is one JSON object, milliseconds of CPU time (medians of N runs, taken in turns) and the .pth line alone.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import timeit
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PTH = ROOT / "musa_titan" / "patching" / "musa_titan.pth"
ON = {"MILES_MUSA_PATCH_AT_STARTUP": "1"}


def cpu_ms(python: Path, environment: dict[str, str]) -> float:
    """CPU time of one interpreter that does nothing."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([str(python), "-c", "pass"], env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1000


def environment_of(folder: Path, with_pth: bool) -> Path:
    venv.create(folder, with_pip=False, symlinks=True)
    if with_pth:
        site = next(folder.glob("lib/python*/site-packages"))
        (site / "_editable_impl_musa_titan.pth").write_text(f"{ROOT}\n")
        (site / "musa_titan.pth").write_text(PTH.read_text())
    return folder / "bin" / "python"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40)
    runs = parser.parse_args().runs
    base = {"PATH": os.defpath}
    checkout = {**base, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        bare = environment_of(Path(folder) / "bare", with_pth=False)
        installed = environment_of(Path(folder) / "installed", with_pth=True)
        cases = {
            "without": (bare, base),
            "pth_off": (installed, base),
            "pth_on": (installed, {**base, **ON}),
            "sitecustomize_off": (bare, checkout),
            "sitecustomize_on": (bare, {**checkout, **ON}),
        }
        times: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(runs):
            for name, case in cases.items():
                times[name].append(cpu_ms(*case))
    result = {f"{name}_ms": round(statistics.median(values), 2) for name, values in times.items()}
    line = PTH.read_text()
    result["pth_line_off_us"] = round(timeit.timeit(lambda: exec(line), number=2000) / 2000 * 1e6, 1)
    print(json.dumps({"bench": "activation", "python": sys.version.split()[0], "runs": runs, **result}))


if __name__ == "__main__":
    main()
