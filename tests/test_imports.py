"""Rooms: the tree keeps the contracts of pyproject.toml, and each contract refuses an import that breaks it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINT_IMPORTS = Path(sys.executable).parent / "lint-imports"

# By contract: a file of the tree, and an import that it may not have.
WRONG = {
    "schedgen-packages": ("schedgen/ir/header.py", "schedgen.schemes"),
    "compiler-without-analysis": ("schedgen/compiler/place.py", "schedgen.analysis"),
    "checker-without-schemes": ("schedgen/checker/jobs.py", "schedgen.schemes"),
    "schedgen-without-torch": ("schedgen/simulator/machine.py", "torch"),
    "commands-of-schedgen": ("mpirun/data/text.py", "schedgen.cli.main"),
    "commands-of-mpirun": ("mpirun/__init__.py", "mpirun.cli.options"),
    "who-compiles": ("mpirun/engine/setup.py", "schedgen.compiler.compile"),
    "mpirun-packages": ("mpirun/engine/setup.py", "mpirun.verify"),
    "model-without-mpi": ("mpirun/data/text.py", "mpi4py"),
    "comm-without-model": ("mpirun/comm/device.py", "mpirun.model"),
    "watchdog-process": ("mpirun/watchdog/rank_state.py", "numpy"),
}


def lint_imports(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`lint-imports ARGUMENTS` on the packages in a folder."""
    command = [LINT_IMPORTS, "--no-cache", "--no-logo", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_tree_keeps_its_contracts():
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout


def test_every_contract_has_a_wrong_import():
    assert re.findall(r'^id = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M) == list(WRONG)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The packages and pyproject.toml in a folder of their own."""
    folder = tmp_path_factory.mktemp("imports")
    for package in ("schedgen", "mpirun"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.mark.parametrize("contract", WRONG)
def test_a_wrong_import_is_refused(contract, copy):
    file, module = WRONG[contract]
    path = copy / file
    before = path.read_text()
    path.write_text(f"{before}\nimport {module}\n")
    try:
        done = lint_imports(copy, "--contract", contract)
    finally:
        path.write_text(before)
    importer = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    assert done.returncode == 1 and "0 kept, 1 broken." in done.stdout
    assert re.search(rf"{re.escape(importer)} -> {re.escape(module)}\b", done.stdout), done.stdout
