"""The table of what caches hold: its names are of torch, of the device's constants and of the documents."""

import pytest
import torch

from tilefold.cache_formats import FORMATS, format_named, listed
from tilefold.check import CODED
from tilefold.device import cache, encode
from tilefold.plan.cache.decode import STORAGES


@pytest.mark.parametrize("one", FORMATS, ids=lambda one: one.short)
def test_a_row_is_what_its_names_say(one):
    dtype = getattr(torch, one.name)
    assert (dtype.itemsize, CODED[dtype]) == (one.itemsize, one)
    kind = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    assert (kind.min, kind.max) == one.limits
    assert one.read == (one.read_by(lambda name: name == one.feature), one.read_by(lambda name: name != one.feature))
    codes = [getattr(cache, name).value for name in ("PLAIN", *one.read)]
    assert len(set(codes)) == 3
    assert encode.PLAIN.value not in [getattr(encode, name).value for name in one.written]
    assert format_named(one.name) is one and one.name in STORAGES


def test_every_constant_of_the_device_is_in_the_table():
    """A format that kernels know and the table does not would be refused on the host."""
    values = {name for name, value in vars(cache).items() if name.isupper() and isinstance(value, type(cache.PLAIN))}
    assert values - {"PLAIN"} == {name for one in FORMATS for name in one.read}
    values = {name for name, value in vars(encode).items() if name.isupper() and isinstance(value, type(encode.PLAIN))}
    assert values - {"PLAIN"} == {name for one in FORMATS for name in one.written}
    assert listed("or") == "float8_e4m3fn or int8"
