"""Nothing of ours runs code out of a user's file: no pickle is loaded, YAML holds plain values, remote code stays off."""

import ast
import pickle
from pathlib import Path

import pytest

from grpo_ext.resume.state import StateError, read_state

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("grpo_ext", "recipes", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
# Calls by the end of their name: the keyword that makes them safe, with its value; None where nothing does.
CALLS = {
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
    "torch.load": ("weights_only", True),
    "yaml.load": None,
    "yaml.load_all": None,
    "yaml.full_load": None,
    "yaml.unsafe_load": None,
    "read_pickle": None,
    "eval": None,
    "exec": None,
    "os.system": None,
}
MODULES = ("pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")


def unsafe(source):
    """What a source does that could run code out of a file: [(line, what)]."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name, keywords = ast.unparse(node.func), {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            for call, safe in CALLS.items():
                called = name == call or (call == "read_pickle" and name.endswith("." + call))
                if called and (safe is None or keywords.get(safe[0]) != str(safe[1])):
                    found.append((node.lineno, name))
            if keywords.get("trust_remote_code", "False") != "False":
                found.append((node.lineno, "trust_remote_code"))
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if key is not None and ast.unparse(key) == "'trust_remote_code'" and ast.unparse(value) != "False":
                    found.append((node.lineno, "trust_remote_code"))
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [(node.lineno, name) for name in names if name.partition(".")[0] in MODULES]
    return found


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "import pickle",
        "from joblib.memory import Memory",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=chosen)",
        "kwargs = {'trust_remote_code': True}",
        "pandas.read_pickle(path)",
        "eval(text)",
    ],
)
def test_what_is_looked_for_is_found(source):
    assert unsafe(source)


def test_what_is_safe_passes():
    assert not unsafe("torch.load(p, weights_only=True); np.load(p, allow_pickle=False); yaml.safe_load(t); model.eval()")
    assert not unsafe("AutoConfig.from_pretrained(name, trust_remote_code=False)")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_code_out_of_a_file(path):
    assert unsafe(path.read_text()) == []


def test_remote_code_is_off_in_every_recipe_and_by_default():
    from grpo_ext import GRPOExtConfig

    assert GRPOExtConfig.trust_remote_code is False
    for path in (ROOT / "recipes").rglob("*.yaml"):
        assert "trust_remote_code" not in path.read_text(), path


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_in_the_place_of_a_state_file_is_refused_and_not_run(tmp_path):
    state = tmp_path / "grpo_ext_state_0.safetensors"
    state.write_bytes(pickle.dumps(Payload(tmp_path / "touched")))
    with pytest.raises(StateError, match=r"grpo_ext_state_0\.safetensors is damaged"):
        read_state(state)
    assert not (tmp_path / "touched").exists()
    pickle.loads(state.read_bytes())
    assert (tmp_path / "touched").exists()  # it would have been
