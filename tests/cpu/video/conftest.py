"""Small models of Diffusers: Wan's run the kernels in the interpreter; the others' adapters, and what is beside those of Wan,
are looked at in plain torch."""

import pytest

from torch_cpu import torch_cpu  # noqa: F401


@pytest.fixture(autouse=True)
def adapters_without_kernels(request):
    if any(name in request.node.name for name in ("hunyuan", "ltx", "cogvideox", "[wan, ")):
        request.getfixturevalue("torch_cpu")
