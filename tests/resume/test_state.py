"""The state file: what goes in comes out, bit by bit, and whatever happened to it on the way is noticed."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from grpo_ext.resume.state import StateError, Unsavable, check_savable, read_state, write_state

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)
tensors = st.builds(
    lambda shape, dtype, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
keys = st.text().filter(lambda key: not key.startswith("$"))
trees = st.recursive(
    plain | tensors, lambda inner: st.lists(inner) | st.dictionaries(keys, inner) | st.tuples(inner, inner), max_leaves=8
)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, float):
        return type(b) is float and (a == b or (math.isnan(a) and math.isnan(b)))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@settings(max_examples=60, deadline=None)
@given(tree=trees)
def test_what_goes_in_comes_out(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("state") / "s"
    write_state(path, tree)
    assert same(read_state(path), tree)


def test_strides_and_shared_storage(tmp_path):
    whole = torch.arange(24.0).reshape(4, 6)
    tree = {"cut": whole[:, :4], "turned": whole.T, "row": whole[1], "nan": torch.tensor([math.nan, -math.inf])}
    write_state(tmp_path / "s", tree)
    found = read_state(tmp_path / "s")
    assert same({**found, "nan": None}, {**tree, "nan": None}) and found["cut"].stride() == (6, 1)
    assert found["nan"][0].isnan() and found["nan"][1] == -math.inf
    found["cut"][0, 0] = 7.0
    assert found["turned"][0, 0] == 0.0


@pytest.mark.parametrize(
    "tree, message",
    [
        ({"rows": [{"image": object()}]}, r"\['rows'\]\[0\]\['image'\] is a builtins\.object"),
        ({"rows": {1: 2}}, r"\['rows'\] has the key 1"),
        ({"$tensor": 1}, r"has the key '\$tensor'"),
        ([torch.eye(2).to_sparse()], "sparse"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path, tree, message):
    for attempt in (check_savable, lambda tree: write_state(tmp_path / "s", tree)):
        with pytest.raises(Unsavable, match=message):
            attempt(tree)
    assert list(tmp_path.iterdir()) == []


def test_cut_short_anywhere(tmp_path):
    path = tmp_path / "s"
    write_state(path, {"a": torch.arange(9), "b": "text"})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(StateError, match=r"/s "):
            read_state(path)


def test_a_byte_changed_anywhere(tmp_path):
    path = tmp_path / "s"
    write_state(path, {"a": torch.arange(3), "b": "text", "c": 0.5})
    whole = path.read_bytes()
    assert len(whole) < 600
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            assert same(read_state(path), {"a": torch.arange(3), "b": "text", "c": 0.5})  # a byte that means nothing
        except StateError:
            continue


def test_foreign_files(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "weights")
    with pytest.raises(StateError, match=r"weights was not written by grpo_ext"):
        read_state(tmp_path / "weights")
    save_file({}, tmp_path / "later", {"grpo_ext_state": "99", "tree": json.dumps({})})
    with pytest.raises(StateError, match=r"later is a state of version 99, and this grpo_ext reads version 1"):
        read_state(tmp_path / "later")
    with pytest.raises(StateError, match=r"absent is damaged or cannot be read"):
        read_state(tmp_path / "absent")
