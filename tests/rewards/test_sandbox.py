"""Code that a model wrote, run behind a fence: it can fail, spin, allocate and cheat, and gets what it earned."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from trimtab.config.schema import GrpoSettings
from trimtab.rewards.builtin import builtin_reward
from trimtab.rewards.sandbox import Limits, network_is_cut, run_tests

LIMITS = Limits(seconds=60, megabytes=256)


@pytest.mark.parametrize(
    ("code", "tests", "share"),
    [
        ("def f(x): return x + 1", ["assert f(1) == 2", "assert f(1) == 3"], 0.5),
        ("def f(x): return x + 1", "assert f(1) == 2\nassert f(2) == 3", 1.0),
        ("def f(", "pass", 0.0),
        ("import os; os._exit(0)", "assert False", 0.0),
        ("import sys; sys.exit(0)", "assert False", 0.0),
        ("raise SystemExit", "pass", 0.0),
        ("x = bytearray(10**9)", "pass", 0.0),
        ("import os\nos.write(1, b'passed 1 0')", "assert False", 0.0),
        ("open('big', 'wb').write(b'0' * 3 * 2**20)", "pass", 0.0),
        ("import os\ntry:\n    os.fork()\nexcept OSError:\n    pass", ["pass"], 1.0),
    ],
)
def test_what_code_gets(code: str, tests: str | list[str], share: float) -> None:
    assert run_tests(code, tests, LIMITS)[0] == share


def test_annotations_are_evaluated_as_python_does() -> None:
    assert run_tests("def f(x: Unknown): return x", "pass", LIMITS)[0] == float(sys.version_info >= (3, 14))


def test_the_judge_imports_no_module_that_the_completion_could_have_written() -> None:
    code = "import sys, types\nfake = sys.modules['trimtab'] = types.ModuleType('trimtab')\nfake.answer = lambda: 42"
    tests = ["assert fake.answer() == 42", "import sys\nfake\nassert 'trimtab' not in sys.modules"]
    assert run_tests(code, tests, LIMITS)[0] == 1.0


def test_code_that_does_not_end_is_ended() -> None:
    assert run_tests("while True: pass", "pass", Limits(seconds=1, megabytes=256)) == (0.0, False)


def test_a_test_cannot_change_what_the_next_one_sees() -> None:
    assert run_tests("n = 1", ["n = 5", "assert n == 1"], LIMITS)[0] == 1.0


def test_it_sees_no_variable_or_folder_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SOME_TOKEN", "secret")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("")
    tests = ["import os; assert 'SOME_TOKEN' not in os.environ", "import os; assert os.listdir() == []"]
    assert run_tests("", tests, LIMITS)[0] == 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")
def test_the_network_is_out_of_reach_where_the_kernel_allows_it() -> None:
    if not network_is_cut():
        pytest.skip("no user namespaces for this user")
    # Also this machine's own addresses: a namespace of its own has not even a loopback that is up.
    reach = """
import socket
def reach():
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    socket.create_connection(server.getsockname(), timeout=2)
"""
    assert run_tests(reach, ["reach()", reach + "reach()", "reach"], LIMITS)[0] == pytest.approx(1 / 3)


PLAIN = """
from collections import Counter, defaultdict, deque, namedtuple
from dataclasses import dataclass
from typing import get_type_hints
import math

class Stack:
    def __init__(self, items=()): self.items = list(items)
    def push(self, item): self.items.append(item)
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, i): return self.items[i]
    def __add__(self, other): return Stack([*self.items, other])
    def __rmul__(self, times): return Stack(self.items * times)
    def __eq__(self, other): return self.items == other.items

@dataclass(frozen=True)
class Point:
    x: int
    y: int

class Odd(ValueError): pass
Pair = namedtuple("Pair", "a b")
log = []

def same(x): return x
def sort(x): x.sort()
def note(x): log.append(x)
def odd(x):
    if x % 2: raise Odd("odd", x)
    return x
def counted(text): return Counter(text)
def queue(n): return deque(range(n))
def squares(n):
    for i in range(n): yield i * i
def apply(f, x): return f(x)
def adder(n): return lambda x: x + n
def greet(name): print("hello", name)
def typed(x: "Point"): return x
@dataclass
class Typed:
    x: "int"
    unset: "Later" = None
class Later: pass
def hints(): return [get_type_hints(Typed)["unset"].__name__]
async def later(x): return x
"""


@pytest.mark.parametrize(
    "test",
    [
        "x = [1, (2, {3: {4}}), b'5', 6j, None, 1e300, 10**5000, 'ü', range(3), float('inf')]\nassert same(x) == x",
        "x = [3, 1, 2]\nsort(x)\nassert x == [1, 2, 3]",
        "x = [1]\nassert same(x) is x",
        "note(1)\nassert log == [1]",
        "assert counted('aab') == {'a': 2, 'b': 1} and queue(2) == __import__('collections').deque([0, 1])",
        "assert list(squares(4)) == [0, 1, 4, 9] and next(squares(1)) == 0 and sum(squares(3)) == 5",
        "assert apply(lambda v: v * 2, 4) == 8 and adder(2)(3) == 5 and list(map(adder(1), [1])) == [2]",
        "assert apply(len, 'abc') == 3 and apply(int, '7') == 7 and same(int) is int",
        "try:\n    odd(3)\n    assert False\nexcept Odd as e:\n    assert e.args == ('odd', 3)",
        "try:\n    odd(3)\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError",
        "try:\n    odd('a')\nexcept TypeError:\n    pass\nelse:\n    raise AssertionError",
        "s = Stack()\ns.push(4)\nassert len(s) == 1 and s[0] == 4 and list(s) == s.items and s == Stack([4])",
        "assert list(2 * (Stack([1]) + 2)) == [1, 2, 1, 2] and isinstance(Stack(), Stack) and not isinstance(3, Stack)",
        "assert Point(1, 2) == Point(1, 2) != Point(2, 1) and len({Point(1, 2), Point(1, 2)}) == 1",
        "assert Pair(1, 2) == (1, 2) and Pair(1, b=2).b == 2",
        "assert math.isclose(same(0.1) + 0.2, 0.3) and same.__name__ == 'same'",
        "import typing\nassert typed.__annotations__ == {'x': 'Point'} and Typed(1).x == 1 and hints() == ['Later']",
        "import asyncio\nassert asyncio.run(later(5)) == 5",
        "import contextlib, io\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    greet('you')\n"
        "assert out.getvalue() == 'hello you\\n'",
        "def check(candidate):\n    assert candidate(2) == 2\ncheck(odd)",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        with self.assertRaises(Odd):\n"
        "            odd(1)\nassert unittest.TextTestRunner().run(T('test')).wasSuccessful()",
    ],
)
def test_tests_see_the_completion_as_if_it_were_there(test: str) -> None:
    assert run_tests(PLAIN, [test, f"{test}\nassert False"], LIMITS)[0] == 0.5


CHEATS = {
    "leaves with success": "import os\nos._exit(0)",
    "leaves in the function": "import os\ndef f(x): os._exit(0)",
    "raises an exit in the function": "def f(x): raise SystemExit(0)",
    "leaves later": """
import threading, os, time
threading.Timer(0.05, os._exit, (0,)).start()
def f(x): time.sleep(9)
""",
    "at exit": """
import atexit, os, sys
atexit.register(lambda: [os.write(fd, b'{"passed": [true]}') for fd in range(3, 64)])
sys.exit(0)
""",
    "writes to every file descriptor": """
import os
def f(x):
    for fd in range(64):
        for text in (b'{"word": "", "passed": [true], "isolated": true, "unsupported": ""}\\n', b'{"value": null}\\n'):
            try:
                os.write(fd, text)
            except OSError:
                pass
    return 0
""",
    "searches frames, objects and files for the tests and the word": """
import gc, os, re, sys
found, needle = [], bytes(reversed(b"q7z1k")).decode()
def look(value):
    if isinstance(value, str) and (needle in value != needle or re.fullmatch("[0-9a-f]{32}", value)):
        found.append(value)
frame = sys._getframe()
while frame:
    for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
        look(value)
    frame = frame.f_back
for value in gc.get_objects():
    for part in gc.get_referents(value):
        look(part)
for name in ("cmdline", "environ"):
    look(open(f"/proc/self/{name}").read() if os.path.exists(f"/proc/self/{name}") else "")
def f(x):
    frame = sys._getframe()
    while frame:
        for value in frame.f_locals.values():
            look(value)
        frame = frame.f_back
    return 2 if found else 0
""",
    "takes the harness over": """
import sys
taken = 0
for module in list(sys.modules.values()):
    for name in ("Judge", "Worker", "Side"):
        if hasattr(module, name):
            getattr(module, name).passes = lambda *_: True
            getattr(module, name).encode = lambda *_: None
            taken += 1
assert taken
def f(x): return 0
""",
    "equals everything": """
class Any:
    __eq__ = __lt__ = __le__ = __gt__ = __contains__ = lambda self, other: True
    __sub__ = __rsub__ = lambda self, other: 0.0
    def __abs__(self): return 0.0
    def __float__(self): return 0.0
def f(x): return Any()
""",
    "equals everything as a number": "class Any(int):\n    __eq__ = lambda s, o: True\ndef f(x): return Any(7)",
    "changes the built-ins": """
import builtins
builtins.AssertionError = builtins.abs = builtins.compile = builtins.exec = lambda *a, **k: 0
def abs(x): return 0
def f(x): return 0
""",
    "swallows what a test raises": """
import sys
sys.excepthook = lambda *a: None
def f(x): raise AssertionError
""",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheats_earn_nothing(cheat: str) -> None:
    tests = [
        "assert f(1) == 2",
        "assert abs(f(1) - 2) < 1e-6",
        "assert f(1) > 1 and f(1) < 3",
        "assert 2 in [f(1)]",
    ]
    assert run_tests("def f(x): return 2", tests, LIMITS)[0] == 1.0
    assert run_tests(CHEATS[cheat], tests, LIMITS)[0] == 0.0


def test_a_dead_worker_passes_nothing_though_the_test_catches_everything() -> None:
    tests = ["try:\n    f()\nexcept BaseException:\n    pass", "pass"]
    assert run_tests("def f(): raise ValueError", tests, LIMITS)[0] == 1.0
    assert run_tests("import os\ndef f(): os._exit(0)", tests, LIMITS)[0] == 0.0


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_code_cannot_open_the_files_or_the_memory_of_the_process_that_judges() -> None:
    if not network_is_cut():
        pytest.skip("no user namespaces for this user")
    code = """
import glob, os
opened = []
for folder in {"/proc/1", "/proc/self", f"/proc/{os.getppid()}", *glob.glob("/proc/[0-9]*")}:
    for name in ("mem", "cmdline", "environ", "fd/0", "fd/1", "fd/3"):
        try:
            opened.append(open(folder + "/" + name, "rb", buffering=0))
        except OSError:
            pass
"""
    assert run_tests(code, "assert opened == []", LIMITS)[0] == 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_the_code_can_neither_end_other_processes_nor_write_outside_its_folder(tmp_path: Path) -> None:
    if not network_is_cut():
        pytest.skip("no user namespaces for this user")
    tmp_path.chmod(0o777)
    (tmp_path / "kept.txt").write_text("kept")
    code = f"""
import ctypes, os, signal
def end(pid): os.kill(pid, signal.SIGKILL)
def remove(): os.remove({str(tmp_path / "kept.txt")!r})
def write(name): open(name, "w").write("x")
def make_writable(): return ctypes.CDLL(None).mount(None, b"/", None, 0x1020, None)
"""
    raises = "try:\n    {}\nexcept OSError:\n    pass\nelse:\n    raise AssertionError"
    tests = [
        raises.format(f"end({os.getpid()})"),
        raises.format("end(-1)"),
        raises.format("remove()"),
        raises.format(f"write({str(tmp_path / 'new.txt')!r})"),
        "assert make_writable() != 0\n" + raises.format("remove()"),
        "write('mine.txt')\nassert open('mine.txt').read() == 'x'",
    ]
    assert run_tests(code, tests, LIMITS)[0] == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]


def test_neither_side_starts_a_process_and_root_does_not_either() -> None:
    code = """
import os, subprocess
def forks():
    run, spawn = lambda: subprocess.Popen(["/bin/true"]).pid, lambda: os.posix_spawn("/bin/true", ["true"], {})
    for start in (os.fork, run, spawn):
        try:
            pid = start()
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                return repr(error)
        else:
            if pid == 0:
                os._exit(0)
            return "started a process"
    return "none"
"""
    test = "assert forks() == 'none', forks()"
    assert run_tests(code, [test, code + test], LIMITS)[0] == 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="process namespaces are Linux's")
def test_nothing_outlives_its_test() -> None:
    if not network_is_cut():
        pytest.skip("no user namespaces for this user")
    mark = f"left-behind-{os.getpid()}"
    code = f"""
import os, sys, time
try:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)", {mark!r}])
        os._exit(0)
except OSError:
    pass
"""
    assert run_tests(code, "pass", LIMITS)[0] == 1.0
    running = [path for path in Path("/proc").glob("[0-9]*/cmdline") if mark in _read(path)]
    assert running == []


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def test_a_sandbox_that_cannot_start_is_an_error_not_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="the sandbox did not start: /bin/false ended"):
        run_tests("", "pass", LIMITS)


def test_a_test_that_hands_over_what_cannot_travel_is_an_error_not_a_score() -> None:
    test = "class Node: pass\nf(Node())"
    with pytest.raises(ValueError, match="a test hands a Node to the completion"):
        run_tests("def f(x): pass", ["pass", test], LIMITS)


def test_the_reward_takes_fenced_code_and_a_column_of_tests() -> None:
    reward, columns = builtin_reward("code", GrpoSettings(tests_column="checks", test_seconds=60))
    assert columns == ("checks",)
    said = ["Here:\n```python\ndef f(): return 3\n```", "I cannot."]
    assert list(reward(completions=said, checks=[["assert f() == 3"]] * 2)) == [1.0, 0.0]


def test_a_row_without_tests_is_an_error_not_a_score() -> None:
    with pytest.raises(ValueError, match="no tests"):
        run_tests("x = 1", [], LIMITS)
