"""Statements of the project about itself are true."""

import ast
import functools
import re
import shlex
import subprocess
import sys
from importlib import metadata

import pytest
from repository import ROOT

import raydl
from raydl.cli import data, options, planning, reporting, runs
from raydl.cli.commands import COMMANDS
from raydl.cli.comparing import parse_own
from raydl.config import TrainConfig
from raydl.methods import METHODS
from raydl.metrics import TAGS, TIME_PARTS
from raydl.models import MODELS
from raydl.run.versions import DISTRIBUTION, installed_version, requirements
from raydl.tools.comparison import Comparison
from raydl.tools.comparison.settings import method_names, trials_of

MAY_IMPORT_RAY = re.compile(
    r"ray_backend/.*|collective/ray_collective\.py|parameter_server/ray_transport\.py"
)
STANDARD_LIBRARY_ALONE = (
    "text", "errors", "config", "ray_backend/session",
    "ray_backend/setup_worker", "launch/spot_notice", "run/versions",
)  # fmt: skip
ARITHMETIC = (
    "core/rules", "core/flat", "core/non_trainable", "core/membership", "core/replica",
    "core/stop_condition", "core/compression", "core/optimizers", "core/cost_model",
    "core/autotune", "data/ledger", "elastic/stragglers",
)  # fmt: skip


def packages():
    """Return the packages and top-level modules of raydl, in the order of the docs."""
    text = (ROOT / "docs/architecture.md").read_text()
    block = re.search(r"^## Source layout\n.*?^```text\n(.*?)^```", text, re.M | re.S)[1]
    return [line.split()[0] for line in block.splitlines()]


def modules(root):
    """Yield (package or top-level module, path) of every file of raydl."""
    for path in sorted((root / "raydl").rglob("*.py")):
        yield path.relative_to(root / "raydl").parts[0].removesuffix(".py"), path


@functools.cache
def tree_of(path):
    """Return the syntax tree of a file; it is cached for several tests."""
    return ast.parse(path.read_text())


@functools.cache
def imports(path):
    """Return (imported module, whether at the top level) for each import of a file."""
    tree = tree_of(path)
    top = set(map(id, tree.body))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "raydl":
            found += [(f"raydl.{alias.name}", id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.module, id(node) in top)]
    return found


def test_the_docs_list_every_package_once(root):
    assert sorted(packages()) == sorted({name for name, _ in modules(root)})


def test_a_package_imports_only_those_above_it(root):
    rank = {name: number for number, name in enumerate(packages())}
    for name, path in modules(root):
        for module, _ in imports(path):
            parts = module.split(".")
            if parts[0] != "raydl" or parts[1:2] == [name]:
                continue
            assert len(parts) > 1, f"{path} reaches all of raydl by its public names"
            if parts[1] in rank:
                assert rank[parts[1]] < rank[name], f"{path} imports {module}"


def test_ray_is_imported_only_at_the_edge(root):
    for _, path in modules(root):
        if not MAY_IMPORT_RAY.fullmatch(path.relative_to(root / "raydl").as_posix()):
            assert all(m.split(".")[0] != "ray" for m, _ in imports(path)), path


@pytest.mark.parametrize("name", STANDARD_LIBRARY_ALONE)
def test_modules_that_must_start_fast_import_only_the_standard_library(root, name):
    folder = root / "raydl" / name
    paths = sorted(folder.glob("*.py")) or [folder.with_suffix(".py")]
    for path in paths:
        for module, is_top in imports(path):
            allowed = {*sys.stdlib_module_names, "raydl"}
            assert not is_top or module.split(".")[0] in allowed, (path, module)


@pytest.mark.parametrize("name", ARITHMETIC)
def test_the_arithmetic_uses_no_clock_and_no_randomness(root, name):
    found = {m.split(".")[0] for m, _ in imports(root / "raydl" / f"{name}.py")}
    assert not found & {"time", "random"}


def test_no_file_is_unpickled(root):
    """Files of runs and data may come from other people: unpickling would run their code."""
    read_array = "np.lib.format.read_array"
    no_pickle = ("allow_pickle", False)
    safe = {"torch.load": ("weights_only", True), "np.load": no_pickle, read_array: no_pickle}
    found = []
    for _, path in modules(root):
        if path in (root / "raydl/data/map_style.py", root / "raydl/data/iterable_style.py"):
            continue  # they pickle only for processes of the same worker, not into files
        assert not {m for m, _ in imports(path)} & {"pickle", "dill", "cloudpickle", "joblib"}, path
        for node in ast.walk(tree_of(path)):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert not called.endswith(("pickle.load", "pickle.loads", "unsafe_load")), path
            if called in safe:
                name, value = safe[called]
                keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert keywords.get(name) == str(value), f"{called} in {path}"
                found.append(called)
    assert set(found) == set(safe)


def test_importing_raydl_imports_neither_ray_nor_torch():
    code = "import raydl, sys; sys.exit(bool({'ray', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.processes
def test_matplotlib_is_imported_with_the_first_chart_and_pyplot_never():
    code = (
        "import sys, raydl.cli, raydl.worker.loop, raydl.ray_backend.actors, raydl.run.trainer;"
        "from raydl.metrics import TIME_PARTS, charts;"
        "assert 'matplotlib' not in sys.modules;"
        "points = [(n, dict.fromkeys(TIME_PARTS, 1.0)) for n in (0, 9)];"
        "charts.areas(points).pixels(); charts.areas(points).svg('t');"
        "assert 'matplotlib.figure' in sys.modules;"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_every_public_name_can_be_imported():
    for name in set(raydl.__all__) - set(raydl._EXTRAS):  # their libraries take seconds
        assert getattr(raydl, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        raydl.Trainr  # noqa: B018


@pytest.mark.parametrize("name", raydl._EXTRAS)
def test_a_name_whose_library_is_missing_says_what_to_install(name, monkeypatch):
    library = raydl._EXTRAS[name]
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, f"raydl.{raydl._MODULES[name]}", raising=False)
    for module in [m for m in sys.modules if m.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(ImportError, match=rf"pip install -e '\.\[{library}\]'"):
        getattr(raydl, name)


def test_every_tag_has_its_sentence_in_the_docs_and_no_other(root):
    text = (root / "docs/metrics.md").read_text()
    documented = dict(re.findall(r"^\| `([a-zA-Z_/]+)` \| (.+?) \|$", text, flags=re.M))
    assert documented == {tag.name: tag.sentence for tag in TAGS.values()}


def test_every_method_and_its_equations_are_in_the_docs(root):
    text = (root / "docs/algorithms.md").read_text()
    for row in METHODS.values():
        assert f"`{row.name}`" in text, row.name
    for name in re.findall(r"`(\w+)\(\)`", text):
        sources = [p.read_text() for p in (root / "raydl").rglob("*.py")]
        assert any(re.search(rf"def {name}\(", s) for s in sources), name


def commands(text):
    """Return the raydl commands in the code blocks of a text, fenced or indented."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.M | re.S)
    blocks = [block for language, block in fenced if language in ("", "bash", "console")]
    blocks += re.findall(r"^ {4}(raydl (?:.*\\\n)*.*)$", text, flags=re.M)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("raydl ")]


class Parsed(Exception):
    """The options of a command are valid."""


def parse_alone(*arguments, **more):
    options.parse(*arguments, **more)
    raise Parsed


@pytest.mark.parametrize(
    "name",
    ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))],
)
def test_the_commands_of_the_docs_are_valid(root, name, monkeypatch):
    modules = {module.__name__: module for module in (data, planning, reporting, runs)}
    for module in modules.values():
        monkeypatch.setattr(module, "parse", parse_alone)
    for words in commands((root / name).read_text()):
        command = COMMANDS[words[1]]
        if words[1] == "train":
            config = options.parse_train(words[2:])
            assert isinstance(config, TrainConfig)
            assert config.method.name in METHODS
            assert config.model in (*MODELS, "auto")
        elif words[1] == "compare":
            comparison = parse_own(Comparison, words[2:], prog="raydl compare")
            assert set(method_names(comparison.methods)) <= set(METHODS)
            assert trials_of(comparison)
        elif words[1] == "submit":
            options.parse_train(words[words.index("--") + 1 :])
        elif command.__module__ in modules:
            with pytest.raises(Parsed):
                command(words[2:])
        else:
            assert words[1] in {"methods", "models"}, "its options are not checked"


def test_the_package_has_at_most_24_top_level_entries(root):
    """A newcomer reads all of them."""
    found = [p for p in (root / "raydl").iterdir() if p.name != "__pycache__"]
    assert len(found) <= 24, sorted(p.name for p in found)


def test_the_make_targets_of_the_readme_exist(root):
    makefile = (root / "Makefile").read_text()
    targets = re.findall(r"^make ([a-z-]+)", (root / "README.md").read_text(), flags=re.M)
    assert {"train", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


def test_the_readme_and_make_train_say_how_to_activate_the_environment(root):
    readme = (root / "README.md").read_text()
    activation = readme.index("\n. .venv/bin/activate\n")
    assert readme.index("\nmake train") < activation < readme.index("\nraydl train")
    makefile = (root / "Makefile").read_text()
    [recipe] = re.findall(r"^train:.*\n((?:\t.*\n)+)", makefile, flags=re.M)
    last = recipe.splitlines()[-1]
    assert "echo" in last
    assert ". $(BIN)/activate" in last


def test_the_files_in_the_trees_of_the_docs_exist(root):
    for name in ("README.md", "docs/architecture.md"):
        for block in re.findall(r"^```text\n(.*?)^```", (root / name).read_text(), re.M | re.S):
            for entry in re.findall(r"^ *([\w./-]+(?:/|\.\w+))(?: |$)", block, flags=re.M):
                candidates = [root / entry, root / "raydl" / entry, root / "docs" / entry]
                assert any(c.exists() for c in candidates), f"{name}: {entry}"


def test_the_modules_that_the_architecture_names_exist(root):
    text = (root / "docs/architecture.md").read_text()
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", text)
    assert len(named) > 30
    for name in named:
        assert (root / "raydl" / name).exists() or (root / name).exists(), name


def test_ci_runs_the_test_command_of_the_readme(root):
    assert (root / ".ci/run").read_text().splitlines()[-1] == "exec make test"


def test_the_eight_time_parts_are_eight():
    assert len(TIME_PARTS) == 8


# the name of the distribution

TEXTS = {".md", ".py", ".yaml", ".yml", ".toml", ".txt", ""}


def text_files():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    found = [ROOT / name for name in tracked if (ROOT / name).suffix in TEXTS]
    return [path for path in found if path.name != "test_promises.py"]


def requirements_of(line):
    """Return the requirements that a line installs with pip."""
    words = line.partition("pip install")[2].partition(" #")[0].replace("`", " ").split()
    return [word.strip("'\"();,:") for word in words]


def test_no_command_installs_raydl_from_the_index():
    """There ``raydl`` is another project, and ``elastic-raydl`` is not published yet."""
    lines = [
        (path, line)
        for path in text_files()
        for line in path.read_text().splitlines()
        if "pip install" in line
    ]
    assert len(lines) >= 10
    for path, line in lines:
        for word in requirements_of(line):
            name = re.split(r"[\[<>=~!;]", word)[0]
            assert name.lower() not in ("raydl", "elastic-raydl"), f"{path}: {line}"


@pytest.mark.parametrize(
    "line",
    [
        "pip install raydl",
        "`pip install 'raydl[ray-data]'` brings",
        "python -m pip install -U raydl==1",
    ],
)
def test_a_command_that_installs_the_foreign_package_is_detected(line):
    names = [re.split(r"[\[<>=~!;]", word)[0] for word in requirements_of(line)]
    assert "raydl" in names


def test_the_distribution_has_its_documented_name(root):
    project = (root / "pyproject.toml").read_text()
    assert re.search(r'^name = "(.+)"', project, re.M)[1] == DISTRIBUTION != "raydl"
    version = re.search(r'^version = "(.+)"', project, re.M)[1]
    assert installed_version("raydl") == metadata.version("elastic-raydl") == version
    assert any(line.startswith("torch") for line in requirements())
    assert DISTRIBUTION in (root / "README.md").read_text()
