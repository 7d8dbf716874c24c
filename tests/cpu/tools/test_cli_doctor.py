"""`tilefold doctor`: facts, what runs here, why the rest does not, and the exit code."""

import json

import pytest
import torch

from cases.cli import command
from tilefold.cli import doctor
from tilefold.ops import environment

run = command("doctor")


def test_it_names_versions_and_support():
    result = run()
    for text in (
        "machine",
        "libraries",
        "runs here",
        "extras",
        torch.__version__,
        "interpreter on the CPU",
        "AMD GPUs",
    ):
        assert text in result.output
    assert max(map(len, result.output.splitlines())) <= 100


def test_json_has_the_same_findings():
    document = json.loads(run("--json").output)
    assert document["usable"] is True
    assert [each["what"] for each in document["findings"]] == [each.what for each in doctor.findings()]
    assert {each["state"] for each in document["findings"]} <= {"yes", "no", ""}


@pytest.mark.parametrize(
    ("versions", "fault"),
    [
        ({"triton": "3.6.0", "numpy": "2.3.5"}, None),
        ({"triton": "3.6.0", "numpy": "2.4.0"}, "numpy 2.4.0 breaks the interpreter of triton 3.6.0"),
        ({"triton": "3.9.0", "numpy": "2.5.2"}, None),
        ({"triton": "3.6.0", "numpy": None}, "numpy is not installed"),
        ({"torch": "2.8.1", "triton": "3.6.0", "numpy": "2.3.5"}, "torch 2.8.1 is too old; 2.9 or newer is needed"),
        ({"triton": "3.4.1", "numpy": "2.3.5"}, "triton 3.4.1 is too old; 3.6 or newer is needed"),
    ],
)
def test_what_the_interpreter_needs(monkeypatch, versions, fault):
    monkeypatch.setattr(environment, "installed", versions.get)
    found = environment.interpreter_fault()
    assert (found is None) if fault is None else found.startswith(fault)


def test_exit_code_1_where_nothing_can_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(environment, "installed", {"triton": "3.6.0", "numpy": "2.4.1"}.get)
    result = run(code=1)
    assert "tilefold cannot run here: numpy 2.4.1 breaks" in result.output
    assert json.loads(run("--json", code=1).output)["usable"] is False


@pytest.mark.parametrize(
    ("capability", "portable", "boxes"),
    [((7, 5), "no", "no"), ((8, 0), "yes", "no"), ((9, 0), "yes", "yes"), ((12, 0), "yes", "yes")],
)
def test_support_follows_the_compute_capability(monkeypatch, capability, portable, boxes):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    states = {each.what: each.state for each in doctor.support()}
    assert states["portable kernels on a GPU"] == portable
    assert states["descriptor (TMA) loads"] == boxes


@pytest.mark.parametrize(
    ("version", "number"), [("3.6.0", (3, 6, 0)), ("2.11.0+cu130", (2, 11, 0)), ("3.6.0rc1", (3, 6, 1)), (None, ())]
)
def test_version_numbers(version, number):
    assert environment.number(version)[:2] == number[:2]
