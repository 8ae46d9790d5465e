"""Which module may import and do what, read from the sources.

Each rule takes one parsed module and gives what is wrong with it. Below the rules, each is
tried on snippets that break it and on one that does not, so that none passes by mistake.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest

PACKAGE = Path(__file__).parent.parent / "tszmq"
CRITICAL = {"state", "readers"}
"""Guards inside which nothing may wait: ``with shared.state as flights:``."""


@attrs.frozen
class Import:
    """One imported name, as an absolute dotted path, and the line it stands on."""

    name: str
    line: int
    for_types_only: bool


@attrs.frozen
class Module:
    """A source file: its dotted name and its syntax tree."""

    name: str
    tree: ast.Module
    is_package: bool = False

    def within(self, *packages: str) -> bool:
        """Whether it is one of these modules or below one of them."""
        return _within(self.name, packages)

    def imports(self) -> list[Import]:
        """Everything imported, inside functions too."""
        typing_only = {
            id(inner)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for statement in node.body
            for inner in ast.walk(statement)
        }
        return [
            Import(name, node.lineno, id(node) in typing_only)
            for node in ast.walk(self.tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in self._names(node)
        ]

    def _names(self, node: ast.Import | ast.ImportFrom) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        base = node.module or ""
        if node.level:
            parts = self.name.split(".")
            parts = parts[: len(parts) - node.level + self.is_package]
            base = ".".join([*parts, base] if base else parts)
        return [f"{base}.{alias.name}" for alias in node.names]


Rule = Callable[[Module], Iterator[str]]


def _within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _forbid(module: Module, *packages: str, types_too: bool = True) -> Iterator[str]:
    for found in module.imports():
        if _within(found.name, packages) and (types_too or not found.for_types_only):
            yield f"{module.name}:{found.line} imports {found.name}"


def _called_name(call: ast.Call) -> str:
    """The last part of what is called: ``wait`` for both ``wait()`` and ``a.b.wait()``."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


# --- rules -----------------------------------------------------------------------------------


def errors_checks_and_types_stand_alone(module: Module) -> Iterator[str]:
    allowed = {
        "tszmq.errors": (),
        "tszmq.checks": ("tszmq.errors",),
        "tszmq.types": ("tszmq.errors", "tszmq.checks"),
    }
    if module.name not in allowed:
        return
    for found in module.imports():
        ours = _within(found.name, ("tszmq",)) and not found.for_types_only
        if ours and not _within(found.name, allowed[module.name]):
            yield f"{module.name}:{found.line} imports {found.name}"


def only_codec_imports_ormsgpack(module: Module) -> Iterator[str]:
    if not module.within("tszmq.codec"):
        yield from _forbid(module, "ormsgpack")


def only_net_and_sim_import_zmq(module: Module) -> Iterator[str]:
    if not module.within("tszmq.net", "tszmq.sim"):
        yield from _forbid(module, "zmq")


def core_and_wire_are_pure(module: Module) -> Iterator[str]:
    if module.within("tszmq.core", "tszmq.wire"):
        yield from _forbid(
            module, "threading", "_thread", "time", "logging", "zmq", "asyncio", "socket", "select"
        )


def sim_reads_the_wire_independently(module: Module) -> Iterator[str]:
    if module.within("tszmq.sim"):
        yield from _forbid(
            module, "tszmq.net", "tszmq.core", "tszmq.client", "tszmq.wire", "tszmq.cli"
        )


def wire_knows_no_client(module: Module) -> Iterator[str]:
    if module.within("tszmq.wire"):
        yield from _forbid(
            module, "tszmq.core", "tszmq.net", "tszmq.client", "tszmq.cli", "tszmq.sim"
        )


def core_knows_no_protocol(module: Module) -> Iterator[str]:
    if not module.within("tszmq.core"):
        return
    yield from _forbid(module, "tszmq.net", "tszmq.client", "tszmq.cli", "tszmq.sim")
    for found in module.imports():
        if _within(found.name, ("tszmq.wire",)) and not _within(found.name, ("tszmq.wire.base",)):
            yield f"{module.name}:{found.line} imports {found.name}; only tszmq.wire.base is open"


TOP = ("tszmq", "tszmq.__main__", "tszmq.cli")
CLIENT_PARTS = ("tszmq.bound", "tszmq.bulk", "tszmq.embedded", "tszmq.many")
"""What the client is made of and which is handed the client: it may name its type."""


def nothing_below_imports_the_client(module: Module) -> Iterator[str]:
    if module.name in TOP or module.within("tszmq.client"):
        return
    yield from _forbid(module, "tszmq.cli")
    yield from _forbid(module, "tszmq.client", types_too=module.name not in CLIENT_PARTS)
    for found in module.imports():
        root = found.name.split(".")
        # ``from tszmq import Client`` comes from the package itself, modules are lower case.
        if found.name == "tszmq" or (
            len(root) == 2 and root[0] == "tszmq" and root[1][0].isupper()
        ):
            yield f"{module.name}:{found.line} imports the package itself"


def only_command_lines_print(module: Module) -> Iterator[str]:
    if module.name in ("tszmq.cli", "tszmq.sim.__main__"):
        return
    for node in ast.walk(module.tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "print"
        ):
            yield f"{module.name}:{node.lineno} prints"


def no_module_is_named_for_nothing(module: Module) -> Iterator[str]:
    vague = {"util", "utils", "helper", "helpers", "manager", "managers", "misc", "common"}
    parts = {part.strip("_") for part in module.name.split(".")}
    for part in sorted(parts & vague):
        yield f"{module.name} says nothing about what is in it: {part}"


def critical_sections_do_not_wait(module: Module) -> Iterator[str]:
    for section in critical_sections(module):
        for statement in section.body:
            for node in _runs_inside(statement):
                problem = _waits(node)
                if problem:
                    yield f"{module.name}:{node.lineno} {problem} while it holds a guard"


def critical_sections(module: Module) -> list[ast.With]:
    """Every ``with`` one of whose guards is named in CRITICAL."""
    return [
        node
        for node in ast.walk(module.tree)
        if isinstance(node, ast.With) and any(map(_is_critical, node.items))
    ]


def _is_critical(item: ast.withitem) -> bool:
    guard = item.context_expr
    name = guard.attr if isinstance(guard, ast.Attribute) else getattr(guard, "id", "")
    return name.lstrip("_") in CRITICAL


def _runs_inside(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """The node and all below it, but for bodies of functions, which run when called."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return
    if isinstance(node, (ast.expr, ast.stmt)):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _runs_inside(child)


LOGGERS = {"log", "logger", "logging"}
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def _waits(node: ast.AST) -> str:
    if isinstance(node, (ast.Yield, ast.YieldFrom)):
        return "yields"
    if isinstance(node, (ast.Await, ast.AsyncWith, ast.AsyncFor)):
        return "awaits"
    if not isinstance(node, ast.Call):
        return ""
    name = _called_name(node)
    if name in ("acquire", "wait", "wait_for", "sleep"):
        return f"calls {name}()"
    if name in LEVELS and isinstance(node.func, ast.Attribute):
        receiver = ast.unparse(node.func.value).split(".")[-1].strip("_").lower()
        return "logs" if receiver in LOGGERS else ""
    return ""


RULES: list[Rule] = [
    errors_checks_and_types_stand_alone,
    only_codec_imports_ormsgpack,
    only_net_and_sim_import_zmq,
    core_and_wire_are_pure,
    sim_reads_the_wire_independently,
    wire_knows_no_client,
    core_knows_no_protocol,
    nothing_below_imports_the_client,
    only_command_lines_print,
    no_module_is_named_for_nothing,
    critical_sections_do_not_wait,
]


# --- the package -----------------------------------------------------------------------------


def modules() -> list[Module]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["tszmq", *path.relative_to(PACKAGE).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found.append(Module(name, ast.parse(path.read_text("utf-8"), str(path)), is_package))
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Rule) -> None:
    problems = [problem for module in modules() for problem in rule(module)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "name", ["errors", "types", "codec", "cli", "client", "core", "net", "sim", "wire", "wire.base"]
)
def test_the_modules_that_the_rules_name_exist(name: str) -> None:
    assert f"tszmq.{name}" in {module.name for module in modules()}


def test_the_package_has_critical_sections() -> None:
    """Renamed guards would make the rule about them pass on nothing."""
    assert any(critical_sections(module) for module in modules() if module.within("tszmq.net"))


# --- the rules themselves --------------------------------------------------------------------


def parsed(name: str, source: str) -> Module:
    return Module(name, ast.parse(source), is_package=name in ("tszmq", "tszmq.net", "tszmq.wire"))


def inside_guard(body: str, guard: str = "shared.state as flights") -> str:
    return f"async def f():\n    with {guard}:\n        {body}\n"


TYPES_ONLY = "if TYPE_CHECKING:\n    from tszmq.client import Client"

BROKEN: list[tuple[Rule, str, str]] = [
    (errors_checks_and_types_stand_alone, "tszmq.errors", "import tszmq.types"),
    (errors_checks_and_types_stand_alone, "tszmq.types", "from tszmq.wire.base import AddRequest"),
    (errors_checks_and_types_stand_alone, "tszmq.types", "from .codec import pack"),
    (errors_checks_and_types_stand_alone, "tszmq.checks", "def f():\n    from . import types"),
    (only_codec_imports_ormsgpack, "tszmq.wire.vllm", "import ormsgpack"),
    (only_codec_imports_ormsgpack, "tszmq.sim.engine", "from ormsgpack import packb"),
    (only_net_and_sim_import_zmq, "tszmq.client", "import zmq"),
    (only_net_and_sim_import_zmq, "tszmq.wire.base", "from zmq.utils import monitor"),
    (core_and_wire_are_pure, "tszmq.core.routing", "import threading"),
    (core_and_wire_are_pure, "tszmq.core.routing", "from time import monotonic"),
    (core_and_wire_are_pure, "tszmq.wire.vllm", "def f():\n    import logging.handlers"),
    (core_and_wire_are_pure, "tszmq.wire", "import zmq"),
    (sim_reads_the_wire_independently, "tszmq.sim.engine", "from tszmq.wire import base"),
    (sim_reads_the_wire_independently, "tszmq.sim.engine", "from ..core.routing import pick"),
    (sim_reads_the_wire_independently, "tszmq.sim", "import tszmq.net.sockets"),
    (sim_reads_the_wire_independently, "tszmq.sim.__main__", "from tszmq.client import Client"),
    (wire_knows_no_client, "tszmq.wire.vllm", "from tszmq.core import routing"),
    (wire_knows_no_client, "tszmq.wire", "from ..net import sockets"),
    (wire_knows_no_client, "tszmq.wire.base", "import tszmq.client"),
    (core_knows_no_protocol, "tszmq.core.flights", "from tszmq.wire.vllm import VllmProtocol"),
    (core_knows_no_protocol, "tszmq.core.flights", "from tszmq.wire import tokenspeed"),
    (core_knows_no_protocol, "tszmq.core.flights", "from tszmq.net.shared import Shared"),
    (core_knows_no_protocol, "tszmq.core.flights", "from .. import client"),
    (nothing_below_imports_the_client, "tszmq.net.stream", "from tszmq.client import Client"),
    (nothing_below_imports_the_client, "tszmq.net.stream", "from tszmq import Client"),
    (nothing_below_imports_the_client, "tszmq.codec", "import tszmq"),
    (nothing_below_imports_the_client, "tszmq.net.stream", "from .. import client"),
    (nothing_below_imports_the_client, "tszmq.net.stream", TYPES_ONLY),
    (nothing_below_imports_the_client, "tszmq.bulk", "from tszmq.client import Client"),
    (only_command_lines_print, "tszmq.client", "print('hello')"),
    (only_command_lines_print, "tszmq.sim.engine", "def f():\n    print()"),
    (no_module_is_named_for_nothing, "tszmq.net.utils", ""),
    (no_module_is_named_for_nothing, "tszmq._helpers", ""),
    (no_module_is_named_for_nothing, "tszmq.manager.sockets", ""),
    *(
        (critical_sections_do_not_wait, "tszmq.net.shared", inside_guard(body))
        for body in (
            "yield 1",
            "yield from range(3)",
            "x = await f()",
            "logger.warning('late')",
            "self._log.info('late')",
            "logging.error('late')",
            "self.lock.acquire()",
            "event.wait(1)",
            "wait([future])",
            "condition.wait_for(ready)",
            "time.sleep(1)",
            "if x:\n            for y in z:\n                event.wait()",
            "x = [lock.acquire() for lock in locks]",
        )
    ),
    *(
        (critical_sections_do_not_wait, "tszmq.net.shared", inside_guard("event.wait()", guard))
        for guard in (
            "self._shared.state",
            "self._state as flights",
            "state",
            "reader.readers as place",
            "suppress(KeyError), shared.state as flights",
        )
    ),
]

SOUND: list[tuple[Rule, str, str]] = [
    (
        errors_checks_and_types_stand_alone,
        "tszmq.errors",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tszmq.types import A",
    ),
    (errors_checks_and_types_stand_alone, "tszmq.types", "import attrs\nimport tszmq.errors"),
    (only_codec_imports_ormsgpack, "tszmq.codec", "import ormsgpack"),
    (only_codec_imports_ormsgpack, "tszmq.wire.vllm", "from tszmq.codec import pack"),
    (only_net_and_sim_import_zmq, "tszmq.net.sockets", "import zmq"),
    (only_net_and_sim_import_zmq, "tszmq.sim.engine", "import zmq"),
    (core_and_wire_are_pure, "tszmq.core.routing", "import timeit, attrs"),
    (core_and_wire_are_pure, "tszmq.net.shared", "import threading, time, logging"),
    (sim_reads_the_wire_independently, "tszmq.sim.engine", "from tszmq import codec, types"),
    (wire_knows_no_client, "tszmq.wire.vllm", "from . import base\nfrom tszmq.codec import pack"),
    (core_knows_no_protocol, "tszmq.core.flights", "from tszmq.wire.base import EngineBatch"),
    (core_knows_no_protocol, "tszmq.core.flights", "from ..wire import base"),
    (nothing_below_imports_the_client, "tszmq.cli", "from tszmq.client import Client"),
    (nothing_below_imports_the_client, "tszmq", "from tszmq.client import Client"),
    (nothing_below_imports_the_client, "tszmq.client", "from tszmq.net import sockets"),
    (nothing_below_imports_the_client, "tszmq.bulk", TYPES_ONLY),
    (nothing_below_imports_the_client, "tszmq.sim", "from tszmq import __version__"),
    (only_command_lines_print, "tszmq.cli", "print('hello')"),
    (only_command_lines_print, "tszmq.net.shared", "self.print()\npprint()"),
    (no_module_is_named_for_nothing, "tszmq.net.mailbox", ""),
    (
        critical_sections_do_not_wait,
        "tszmq.net.shared",
        inside_guard("flights.error(x)\n        later = lambda: event.wait()\n    event.wait()"),
    ),
    (critical_sections_do_not_wait, "tszmq.net.shared", inside_guard("event.wait()", "self.other")),
]


@pytest.mark.parametrize(("rule", "name", "source"), BROKEN)
def test_a_rule_finds_what_breaks_it(rule: Rule, name: str, source: str) -> None:
    assert list(rule(parsed(name, source))), f"{rule.__name__} passes on\n{source}"


@pytest.mark.parametrize(("rule", "name", "source"), SOUND)
def test_a_rule_lets_pass_what_keeps_it(rule: Rule, name: str, source: str) -> None:
    assert list(rule(parsed(name, source))) == []


def test_every_rule_was_tried_both_ways() -> None:
    assert {rule for rule, _, _ in BROKEN} == {rule for rule, _, _ in SOUND} == set(RULES)
