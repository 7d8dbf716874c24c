"""tilefold's vLLM backend beside an installed vLLM's sources, which are read and not imported: they want a GPU's libraries.

    python tests/vllm_contract.py FOLDER

FOLDER: what holds vLLM's package `vllm`.  Compared are the names that the backend imports, the parameters of every method that it
overrides, what it reads of a batch, and how vLLM finds and names a backend.  The stub of the tests is held to the same."""

import ast
import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import vllm_stub

BATCH = ("num_actual_tokens", "max_query_len", "query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping", "causal",
         "mm_req_doc_ranges", "rswa_prefix_lens", "dcp_local_seq_lens")  # fmt: skip


class Patch:
    """As much of pytest's monkeypatch as the stub asks for."""

    def setitem(self, mapping, name, value):
        mapping[name] = value

    def delitem(self, mapping, name, raising=True):
        mapping.pop(name, None)


def classes_of(path):
    return {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}


def parameters(function):
    return [one.arg for one in (*function.args.posonlyargs, *function.args.args)]


def methods_of(cls):
    return {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}


def own_parameters(function):
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, one in inspect.signature(function).parameters.items() if one.kind in kinds]


def differences(folder):
    """Sentences, none if all is as it should be."""
    vllm_stub.install(Patch())
    from tilefold.integrations import vllm, vllm_backend

    attention = folder / "vllm" / "v1" / "attention"
    theirs, found = classes_of(attention / "backend.py"), []
    found += [f"backend.py has no {one.__name__}" for one in vllm_stub.BACKEND if one.__name__ not in theirs]
    pairs = (
        ("AttentionBackend", vllm_backend.TilefoldBackend, vllm_stub.AttentionBackend),
        ("AttentionMetadataBuilder", vllm_backend.TilefoldBuilder, vllm_stub.AttentionMetadataBuilder),
        ("AttentionImpl", vllm_backend.TilefoldImpl, vllm_stub.AttentionImpl),
    )
    for name, own, stub in pairs:
        methods = methods_of(theirs[name])
        abstract = {
            key for key, node in methods.items() if any("abstractmethod" in ast.unparse(d) for d in node.decorator_list)
        }
        found += [f"{name}.{key} is abstract, and not made" for key in abstract if key not in vars(own)]
        for key, value in vars(own).items():
            if not callable(getattr(value, "__func__", value)) or (key.startswith("_") and key != "__init__"):
                continue
            if key not in methods:
                found.append(f"{name} has no {key}")
                continue
            wanted = parameters(methods[key])
            for who, function in (("ours", value), ("the stub's", vars(stub).get(key))):
                if (
                    function is not None
                    and (given := own_parameters(getattr(function, "__func__", function)))[: len(wanted)] != wanted
                ):
                    found.append(f"{name}.{key} takes {wanted}, {who} {given}")
    fields = {node.target.id for node in theirs["CommonAttentionMetadata"].body if isinstance(node, ast.AnnAssign)}
    found += [f"CommonAttentionMetadata has no {field}" for field in BATCH if field not in fields]
    support = {node.targets[0].id for node in theirs["AttentionCGSupport"].body if isinstance(node, ast.Assign)}
    found += [
        f"AttentionCGSupport has no {one.name}" for one in vllm_stub.AttentionCGSupport if one.name not in support
    ]
    registry = ast.parse((attention / "backends" / "registry.py").read_text())
    register = next((node for node in registry.body if getattr(node, "name", "") == "register_backend"), None)
    if register is None or parameters(register)[:2] != ["backend", "class_path"]:
        found.append("registry.py has no register_backend(backend, class_path)")
    members = {
        node.targets[0].id for node in classes_of(attention / "backends" / "registry.py")["AttentionBackendEnum"].body
        if isinstance(node, ast.Assign)
    }  # fmt: skip
    name = vllm_backend.TilefoldBackend.get_name()
    found += [f"AttentionBackendEnum has no {name}"] * (name not in members)
    texts = SimpleNamespace(
        plugins=(folder / "vllm" / "plugins" / "__init__.py").read_text(),
        envs=(folder / "vllm" / "envs.py").read_text(),
    )
    found += ["there is no group vllm.general_plugins"] * ("vllm.general_plugins" not in texts.plugins)
    found += ["envs has no VLLM_BATCH_INVARIANT"] * (
        not re.search(r"^    VLLM_BATCH_INVARIANT: bool", texts.envs, re.M)
    )
    found += ["the plugin names another class"] * (
        not vllm.BACKEND.endswith(f".{vllm_backend.TilefoldBackend.__name__}")
    )
    return found


def main():
    found = differences(Path(sys.argv[1]))
    print("\n".join(found) or "vLLM's sources are as tilefold's backend takes them")
    return len(found) > 0


if __name__ == "__main__":
    sys.exit(main())
