"""Who may import whom. A module that is not in the table fails here: give it a layer."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A module belongs to the longest entry that its name begins with; a package's modules share its layer.
LAYERS = {
    "lit_collect.errors": 0,
    "lit_collect.frames": 0,
    "lit_collect.paths": 0,
    "lit_collect.seeding": 0,
    "lit_collect.shared": 0,
    "lit_collect.successors": 0,
    "lit_collect.budget": 1,
    "lit_collect.config": 1,
    "lit_collect.devices": 2,
    "lit_collect.halves": 1,
    "lit_collect.hooks": 1,
    "lit_collect.schemes": 1,
    "lit_collect.weights": 1,
    "lit_collect.envs": 2,
    "lit_collect.actors": 2,
    "lit_collect.calls": 2,
    "lit_collect.policies": 2,
    "lit_collect.recurrent": 2,
    "lit_collect.lowering": 2,
    "lit_collect.decoding": 2,
    "lit_collect.mlp": 2,
    "lit_collect.assembly": 3,
    "lit_collect.blank": 3,
    "lit_collect.sampling": 2,
    "lit_collect.columns": 3,
    "lit_collect.rollout": 3,
    "lit_collect.trajectories": 3,
    "lit_collect.assembler": 3,
    "lit_collect.finished": 3,
    "lit_collect.fragments": 3,
    "lit_collect.pieces": 3,
    "lit_collect.replay": 3,
    "lit_collect.episodes": 2,
    "lit_collect.metrics": 3,
    "lit_collect.profiling": 3,
    "lit_collect.messages": 4,
    "lit_collect.worker": 4,
    "lit_collect.backends": 5,
    "lit_collect.gaps": 6,
    "lit_collect.gathering": 6,
    "lit_collect.members": 6,
    "lit_collect.publishing": 6,
    "lit_collect.supervisor": 6,
    "lit_collect.background": 7,
    "lit_collect.packing": 7,
    "lit_collect.pacing": 7,
    "lit_collect.writing": 7,
    "lit_collect.stream": 7,
    "lit_collect.ledger": 7,
    "lit_collect.questions": 7,
    "lit_collect.collector": 7,
    "lit_collect.ahead": 8,
    "lit_collect.dataset": 8,
    "lit_collect.feeding": 8,
    "lit_collect.offline": 8,
    "lit_collect.plan": 8,
    "lit_collect.replaying": 8,
    "lit_collect.supply": 8,
    "lit_collect.learner": 8,
    "lit_collect.ranks": 8,
    "lit_collect.datamodule": 8,
    "lit_collect.strategies": 8,
    "lit_collect.evaluation": 8,
    "lit_collect.evaluated": 8,
    "lit_collect.recording": 8,
    "lit_collect.callbacks": 8,
    "lit_collect.tools": 9,
    "lit_collect.cli": 9,
    "lit_collect.testing": 10,
    "lit_collect": 11,
    "trainers.functional": 12,
    "trainers.continuous_functional": 12,
    "trainers.off_policy_functional": 12,
    "trainers.distributions": 13,
    "trainers.encoders": 13,
    "trainers.networks": 13,
    "trainers.q_networks": 13,
    "trainers.normalization": 13,
    "trainers": 14,
}
STRANGERS = ("lit_collect.rollout", "lit_collect.trajectories", "lit_collect.replay", "lit_collect.metrics")
LIGHTNING = ("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning")
PROCESSES = ("multiprocessing", "ray", "submitit", "torch.distributed", "torch.multiprocessing")
OPTIONAL = {
    "ray": "lit_collect.backends.ray",
    "submitit": "lit_collect.backends.submitit",
    "jsonargparse": "lit_collect.cli",
    "minari": "lit_collect.offline.minari",
    "h5py": "lit_collect.offline.minari",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(p): p for folder in ("lit_collect", "trainers") for p in sorted((ROOT / folder).rglob("*.py"))}


def within(name: str, package: str) -> bool:
    """Whether a dotted name is a module or lies below it."""
    return name == package or name.startswith(package + ".")


def entry(module: str) -> str:
    """The line of the table that a module belongs to."""
    candidates = [name for name in LAYERS if name == module or ("." in name and within(module, name))]
    if module.startswith("trainers."):
        candidates.append("trainers")
    return max(candidates, key=len, default="")


def imported_names(module: str, tree: ast.Module) -> Iterator[str]:
    """Dotted names of everything a module imports, wherever in the file, relative imports resolved."""
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            yield f"torch.{node.attr}"  # torch.distributed needs no import of its own


IMPORTS = {module: sorted(set(imported_names(module, ast.parse(path.read_text())))) for module, path in MODULES.items()}


def own_imports(module: str) -> set[str]:
    """The modules of this repository that a module imports: `from package import thing` is one of the package."""
    targets = set()
    for name in IMPORTS[module]:
        owner = name if name in MODULES else name.rpartition(".")[0]
        if owner in MODULES:
            targets.add(owner)
    return targets - {module}


def test_every_module_has_a_layer() -> None:
    assert [module for module in MODULES if not entry(module)] == []


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_no_higher_layer(module: str) -> None:
    layer = LAYERS[entry(module)]
    assert [target for target in own_imports(module) if LAYERS[entry(target)] > layer] == []


@pytest.mark.parametrize("module", [m for m in MODULES if entry(m) in STRANGERS])
def test_collecting_assembling_replaying_and_measuring_do_not_know_each_other(module: str) -> None:
    others = [name for name in STRANGERS if name != entry(module)]
    assert [target for target in own_imports(module) if entry(target) in others] == []


@pytest.mark.parametrize("module", [m for m in MODULES if within(m, "lit_collect.backends")])
def test_backends_do_not_know_each_other(module: str) -> None:
    if module == "lit_collect.backends":  # the registry knows them all
        return
    known = {"lit_collect.backends.base"}
    if module == "lit_collect.backends.process" or "._" in module:  # which are several files of one backend
        known |= {name for name in MODULES if name.startswith("lit_collect.backends._")}
    if module == "lit_collect.backends.submitit":
        known.add("lit_collect.backends.distributed")
    assert [t for t in own_imports(module) - known if within(t, "lit_collect.backends")] == []


@pytest.mark.parametrize("module", [m for m in MODULES if LAYERS.get(entry(m), 0) <= 7])
def test_layers_below_the_lightning_face_do_not_import_lightning(module: str) -> None:
    assert [name for name in IMPORTS[module] if any(within(name, package) for package in LIGHTNING)] == []


@pytest.mark.parametrize("module", [m for m in MODULES if LAYERS.get(entry(m), 0) <= 4])
def test_layers_below_the_backends_do_not_know_processes(module: str) -> None:
    assert [name for name in IMPORTS[module] if any(within(name, package) for package in PROCESSES)] == []


@pytest.mark.parametrize("module", MODULES)
def test_optional_package_is_imported_only_where_it_is_needed(module: str) -> None:
    allowed = [package for package, owner in OPTIONAL.items() if module == owner]
    used = [package for package in OPTIONAL if any(within(name, package) for name in IMPORTS[module])]
    assert [package for package in used if package not in allowed] == []


@pytest.mark.parametrize("module", [m for m in MODULES if within(m, "trainers")])
def test_trainers_use_only_public_names_of_lit_collect(module: str) -> None:
    used = [name for name in IMPORTS[module] if within(name, "lit_collect")]
    assert [name for name in used if any(part.startswith("_") for part in name.split("."))] == []


def test_no_imports_go_in_a_circle() -> None:
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"circle: {' -> '.join([*trail[trail.index(module) :], module])}"
        if module not in done:
            for target in sorted(own_imports(module)):
                visit(target, (*trail, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())
