"""Import contracts: each contract in pyproject.toml, which `make lint` checks, refuses an import that breaks it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINT_IMPORTS = Path(sys.executable).parent / "lint-imports"

# For each contract: a file of the tree, and an import that is forbidden in it.
WRONG = {
    "schedgen-packages": ("schedgen/ir/header.py", "schedgen.schemes"),
    "compiler-without-analysis": ("schedgen/compiler/place.py", "schedgen.analysis"),
    "checker-without-schemes": ("schedgen/checker/row_rules.py", "schedgen.schemes"),
    "schedgen-without-torch": ("schedgen/simulator/machine.py", "torch"),
    "commands-of-schedgen": ("mpirun/data/text.py", "schedgen.cli.main"),
    "commands-of-mpirun": ("mpirun/__init__.py", "mpirun.cli.options"),
    "who-compiles": ("mpirun/engine/setup.py", "schedgen.compiler.compile"),
    "mpirun-packages": ("mpirun/engine/setup.py", "mpirun.verify"),
    "model-without-mpi": ("mpirun/data/text.py", "mpi4py"),
    "core-without-features": ("mpirun/engine/core/forward.py", "mpirun.engine.grad_norm"),
    "split-apart": ("mpirun/model/split/inplace.py", "mpirun.model.build_stage"),
    "comm-without-model": ("mpirun/comm/device.py", "mpirun.model"),
    "watchdog-process": ("mpirun/watchdog/hang_report.py", "numpy"),
}


def test_every_contract_refuses_a_wrong_import(tmp_path):
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert [contract["id"] for contract in contracts] == list(WRONG)
    for package in ("schedgen", "mpirun"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file, module in WRONG.values():
        with (tmp_path / file).open("a") as source:
            source.write(f"\nimport {module}\n")
    command, wide = [LINT_IMPORTS, "--no-cache", "--no-logo"], os.environ | {"COLUMNS": "200"}
    out = subprocess.run(command, cwd=tmp_path, env=wide, capture_output=True, text=True, check=False).stdout
    assert f"0 kept, {len(WRONG)} broken." in out
    for contract, (file, module) in zip(contracts, WRONG.values(), strict=True):
        (chains,) = re.findall(rf"^{re.escape(contract['name'])}\n-+\n(.*?)(?:\n---|\Z)", out, re.M | re.S)
        importer = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        assert re.search(rf"{re.escape(importer)} -> {re.escape(module)}\b", chains), chains
