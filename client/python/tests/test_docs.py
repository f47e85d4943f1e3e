"""The examples in docstrings run, and every public name has a docstring and a type."""

import ast
import asyncio
import contextlib
import doctest
import importlib
import inspect
import io
import pathlib
import types

import farside
import farside.aio
import farside.lmcache
import pytest

CLASSES = [farside.Client, farside.Buffer, farside.Value, farside.Outcome, farside.Scan]
CLASSES += [farside.lmcache.Connector]
CONNECTOR = ["event_fd", "submit_batch_get", "submit_batch_set", "submit_batch_exists"]
CONNECTOR += ["submit_batch_delete", "drain_completions", "close"]


def documented_in(owner):
    yield owner.__name__, owner
    for name, member in vars(owner).items():
        if not name.startswith("_") and callable(member):
            yield f"{owner.__name__}.{name}", member


def documented():
    for module in (farside, farside.aio):
        yield module.__name__, module
    for owner in CLASSES:
        yield from documented_in(owner)


def of_asyncio():
    yield from documented_in(farside.aio.Client)


@pytest.mark.one_fabric
@pytest.mark.parametrize("name, documented", list(documented()))
def test_examples(client, server, name, documented):
    assert documented.__doc__, f"{name} has no docstring"
    names = {"client": client, "server": server, "farside": farside, "asyncio": asyncio}
    test = doctest.DocTestParser().get_doctest(documented.__doc__, names, name, None, 0)
    lines = []
    failed = doctest.DocTestRunner().run(test, out=lines.append).failed
    assert not failed, "".join(lines)


@pytest.mark.one_fabric
@pytest.mark.parametrize("name, documented", list(of_asyncio()))
def test_examples_of_asyncio(client, server, name, documented):
    """They are run as `python -m asyncio` does it."""

    async def run():
        async with farside.aio.Client(server) as tasks:
            names = {"client": tasks, "server": server, "aio": farside.aio}
            for example in doctest.DocTestParser().get_examples(documented.__doc__, name):
                code = compile(example.source, name, "single", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                with contextlib.redirect_stdout(io.StringIO()) as printed:
                    running = types.FunctionType(code, names)()
                    if inspect.iscoroutine(running):
                        await running
                assert printed.getvalue() == example.want, example.source

    asyncio.run(run())


def test_every_method_has_an_example():
    members = [*documented(), *((f"aio.{name}", member) for name, member in of_asyncio())]
    names = {name for name, member in members if ">>>" not in member.__doc__}
    # The example of their class has them.
    of_classes = {f"Connector.{name}" for name in CONNECTOR}
    of_classes |= {"Client.close", "aio.Client.connect", "aio.Client.close"}
    assert names <= of_classes | {"Value", "Outcome", "Scan"}


def stub_names(module):
    """The names that a stub has, and those of its classes' methods with their arguments."""
    path = pathlib.Path(farside.__file__).parent / f"{module}.pyi"
    tree = ast.parse(path.read_text())
    names = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name not in ("_Tensor", "Settings", "Limits"):
            names[node.name] = {}
            for method in node.body:
                if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    of = method.args
                    arguments = [a.arg for a in of.posonlyargs + of.args + of.kwonlyargs]
                    names[node.name].setdefault(method.name, arguments)
    return names


@pytest.mark.parametrize("module", ["_farside", "aio"])
def test_the_stubs_have_the_methods_and_arguments(module):
    stubs = stub_names(module)
    native = importlib.import_module(f"farside.{module}")
    for name, methods in stubs.items():
        owner = getattr(native, name)
        members = vars(owner).items()
        public = {n for n, member in members if not n.startswith("_") and callable(member)}
        assert public <= methods.keys(), f"{name}: the stub lacks {public - methods.keys()}"
        invented = {n for n in methods if not hasattr(owner, n)} - {"__buffer__"}
        assert not invented, f"{name}: the stub invents {invented}"
        for method in public:
            arguments = list(inspect.signature(getattr(owner, method)).parameters)
            assert methods[method] == arguments, f"{name}.{method}"
