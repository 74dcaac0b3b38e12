"""What holds for the project as a whole: one version, one license, the typing marker, the files that people look for."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_the_same_everywhere() -> None:
    from memfit._version import __version__

    assert project()["project"]["version"] == __version__
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_package_is_marked_as_typed() -> None:
    assert (ROOT / "src" / "memfit" / "py.typed").exists()


@pytest.mark.parametrize("name", ["LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/decisions.md"])
def test_files_that_people_look_for(name: str) -> None:
    assert (ROOT / name).stat().st_size > 500


def test_the_tests_use_the_versions_that_made_the_measured_truth() -> None:
    wanted = project()["project"]["optional-dependencies"]["test"]
    assert {"torch==2.13.0", "transformers==5.24.0"} <= set(wanted)
    assert "'torch==2.13.0'" in (ROOT / "scripts" / "test").read_text()


def test_the_tool_needs_neither_torch_nor_numpy() -> None:
    names = {re.split(r"[<>=~!]", wanted)[0].lower() for wanted in project()["project"]["dependencies"]}
    assert names == {"rich", "rich-argparse", "argcomplete", "huggingface_hub", "pyyaml"}


@pytest.mark.parametrize("name", ["scripts/test", ".ci/run", ".ci/full"])
def test_scripts_can_be_run(name: str) -> None:
    assert os.access(ROOT / name, os.X_OK)


def test_every_room_has_its_place_in_the_contract() -> None:
    layers = next(one for one in project()["tool"]["importlinter"]["contracts"] if one["type"] == "layers")
    placed = {name.strip(" ()") for layer in layers["layers"] for name in re.split(r"[|:]", layer)}
    rooms = {path.stem for path in (ROOT / "src" / "memfit").glob("*.py") if not path.stem.startswith("_")}
    rooms |= {path.parent.name for path in (ROOT / "src" / "memfit").glob("*/__init__.py")}
    assert rooms <= placed, f"rooms without a place: {rooms - placed}"
