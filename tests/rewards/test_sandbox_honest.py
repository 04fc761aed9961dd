"""Right answers of many kinds, each with a wrong twin: the fence and the judge take no point from honest work."""

from __future__ import annotations

import importlib.util

from trimtab.rewards.sandbox import Limits, share_passed

LIMITS = Limits(seconds=30, megabytes=512)

RAISING = """
class TooLow(ValueError):
    def __init__(self, floor):
        super().__init__(f"below {floor}")
        self.floor = floor
def check(x):
    if x < %d: raise TooLow(%d)
    return x
"""
FRACTION = """
class Ratio:
    def __init__(self, n, d): self.n, self.d = n, d
    def __add__(self, other): return Ratio(self.n * other.d + other.n * self.d, self.d * other.d)
    def __eq__(self, other): return self.n * other.d == other.n * self.d
    def __repr__(self): return f"{self.n}/{self.d}"
"""
POINT = """
from dataclasses import dataclass
@dataclass(frozen=True, order=True)
class Point:
    x: int
    y: int
    def moved(self, dx): return Point(self.x + dx, self.y)
    def __mul__(self, k): return Point(self.x * k, self.y * k)
    def __sub__(self, other): return Point(self.x - other, self.y - other) if isinstance(other, int) else other
    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5
"""

HONEST: dict[str, tuple[str, str, str]] = {
    # name: a right answer, a wrong one, the test
    "a stack": (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def pop(self): return self.items.pop()\n    def is_empty(self): return not self.items",
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def pop(self): return self.items.pop(0)\n    def is_empty(self): return False",
        "s = Stack()\nassert s.is_empty()\ns.push(1)\ns.push(2)\nassert not s.is_empty()\nassert s.pop() == 2",
    ),
    "in place": (
        "def f(a): a.sort()",
        "def f(a): a.reverse()",
        "a = [3, 1, 2]\nassert f(a) is None\nassert a == [1, 2, 3]",
    ),
    "in place, deep": (
        "def f(m):\n    for row in m: row.reverse()",
        "def f(m): m.reverse()",
        "m = [[1, 2], [3]]\nf(m)\nassert m == [[2, 1], [3]]",
    ),
    "a dict in place": (
        "def f(d): d['n'] = d.get('n', 0) + 1",
        "def f(d): return {'n': 1}",
        "d = {}\nf(d)\nf(d)\nassert d == {'n': 2}",
    ),
    "a generator": (
        "def f(n):\n    a, b = 0, 1\n    while a < n:\n        yield a\n        a, b = b, a + b",
        "def f(n):\n    yield from range(n)",
        "assert list(f(10)) == [0, 1, 1, 2, 3, 5, 8]",
    ),
    "a generator without end": (
        "import itertools\ndef f(): return (n * n for n in itertools.count())",
        "import itertools\ndef f(): return itertools.count()",
        "import itertools\nassert list(itertools.islice(f(), 4)) == [0, 1, 4, 9]",
    ),
    "a generator that is told": (
        "def f():\n    n = 0\n    while True: n += (yield n)",
        "def f():\n    while True: yield 0",
        "g = f()\nnext(g)\nassert g.send(3) == 3 and g.send(4) == 7",
    ),
    "an iterator of its own": (
        "class Down:\n    def __init__(self, n): self.n = n\n    def __iter__(self): return self\n"
        "    def __next__(self):\n"
        "        if not self.n: raise StopIteration\n        self.n -= 1\n        return self.n + 1",
        "class Down:\n    def __init__(self, n): pass\n    def __iter__(self): return iter(())",
        "assert list(Down(3)) == [3, 2, 1] and max(Down(4)) == 4 and 2 in Down(3) and 5 not in Down(3)",
    ),
    "an error that is wanted": (
        RAISING % (0, 0),
        RAISING % (-9, 0),
        "try:\n    check(-1)\nexcept TooLow as e:\n    assert str(e) == 'below 0' and e.floor == 0\n"
        "else:\n    assert False",
    ),
    "an error of Python's": (
        "def f(d, k): return d[k]",
        "def f(d, k): return d.get(k)",
        "try:\n    f({}, 'x')\nexcept KeyError as e:\n    assert e.args == ('x',)\nelse:\n    assert False",
    ),
    "an error by its base": (
        "class A(Exception): pass\nclass B(A): pass\ndef f(): raise B('b')",
        "class A(Exception): pass\nclass B(Exception): pass\ndef f(): raise B('b')",
        "try:\n    f()\nexcept A as e:\n    assert e.args == ('b',)",
    ),
    "a key of the test's": (
        "def f(items, key): return sorted(items, key=key)[0]",
        "def f(items, key): return items[0]",
        "assert f(['bbb', 'a', 'cc'], key=len) == 'a' and f([3, -5], key=lambda x: -x) == 3",
    ),
    "a callback that keeps": (
        "def f(items, see):\n    for i in items: see(i)",
        "def f(items, see): see(items)",
        "seen = []\nf([1, 2], seen.append)\nassert seen == [1, 2]",
    ),
    "a callback that raises": (
        "def f(g):\n    try: return g()\n    except ZeroDivisionError: return 'caught'",
        "def f(g): return 'no'",
        "assert f(lambda: 1 / 0) == 'caught'",
    ),
    "an iterator of the test's, without end": (
        "import itertools\ndef f(items, n): return list(itertools.islice(items, n))",
        "def f(items, n): return [next(items)]",
        "import itertools\nassert f(itertools.count(3), 3) == [3, 4, 5] and f(iter('ab'), 5) == ['a', 'b']",
    ),
    "an error of a library": (
        "import json\ndef f(text): return json.loads(text)",
        "def f(text): raise KeyError",
        "import json\ntry:\n    f('{')\nexcept json.JSONDecodeError as e:\n    assert e.pos == 1\n"
        "else:\n    assert False",
    ),
    "changes itself by an operator": (
        "class Total:\n    n = 0\n    def __iadd__(self, k):\n        self.n += k\n        return self",
        "class Total:\n    n = 0\n    def __iadd__(self, k): return self",
        "t = Total()\nsame = t\nt += 3\nt += 4\nassert t.n == 7 and same is t",
    ),
    "gives one after the other, waiting": (
        "async def f(n):\n    for i in range(n): yield i * i",
        "async def f(n):\n    yield n",
        "import asyncio\nasync def all_of(): return [x async for x in f(3)]\nassert asyncio.run(all_of()) == [0, 1, 4]",
    ),
    "a decorator": (
        "def twice(g): return lambda *a: g(g(*a))",
        "def twice(g): return g",
        "@twice\ndef more(x): return x + 1\nassert more(1) == 3",
    ),
    "a context manager": (
        "import contextlib\nlog = []\n@contextlib.contextmanager\ndef f(n):\n    log.append(n)\n"
        "    yield n * 2\n    log.append(-n)",
        "import contextlib\nlog = []\n@contextlib.contextmanager\ndef f(n): yield n",
        "with f(2) as got:\n    assert got == 4 and log == [2]\nassert log == [2, -2]",
    ),
    "a context manager that swallows": (
        "class Quiet:\n    def __enter__(self): return self\n    def __exit__(self, kind, error, trace):\n"
        "        self.kind = kind.__name__ if kind else ''\n"
        "        return kind is not None and issubclass(kind, KeyError)",
        "class Quiet:\n    kind = ''\n    def __enter__(self): return self\n"
        "    def __exit__(self, *a): return False",
        "q = Quiet()\nwith q:\n    {}['x']\nassert q.kind == 'KeyError'",
    ),
    "floats": (
        "def f(x): return x / 3",
        "def f(x): return x // 3",
        "import math\n"
        "assert abs(f(1) - 0.333333) < 1e-5 and math.isclose(f(2), 2 / 3) and round(f(1), 2) == 0.33",
    ),
    "not a number": (
        "def f(): return float('nan'), float('-inf')",
        "def f(): return 0.0, 0.0",
        "import math\na, b = f()\nassert math.isnan(a) and b < -1e308",
    ),
    "points that are equal": (
        POINT,
        POINT.replace("self.x + dx", "self.x"),
        "assert Point(1, 2).moved(3) == Point(4, 2)",
    ),
    "points, equal and not": (
        POINT,
        POINT.replace("    x: int\n", "    x = 0\n    def __new__(c, *a): return object.__new__(c)\n"),
        "assert Point(1, 2) == Point(1, 2) != Point(2, 1) and Point(1, 2) != Point(2, 2)",
    ),
    "points that are equal, alone": (
        POINT,
        POINT.replace("frozen=True, order=True", "eq=False"),
        "assert Point(1, 2) == Point(1, 2)",
    ),
    "points in order": (
        POINT,
        POINT.replace("order=True", "order=False"),
        "a, b = Point(1, 2), Point(2, 1)\n"
        "assert a < b and b >= a and sorted([b, a])[0].x == 1 and max(a, b).x == 2",
    ),
    "points in a set": (
        POINT,
        POINT.replace("frozen=True", "eq=False").replace(", order=True", ""),
        "assert len({Point(1, 2), Point(1, 2), Point(2, 1)}) == 2 and {Point(1, 2): 'a'}[Point(1, 2)] == 'a'",
    ),
    "points, multiplied": (
        POINT,
        POINT.replace("* k,", "+ k,"),
        "p = Point(3, 4) * 2\nassert p.x == 6 and abs(p) == 10",
    ),
    "points, less a number": (
        POINT,
        POINT.replace("- other,", "+ other,"),
        "assert (Point(3, 4) - 1).x == 2",
    ),
    "an equality that is more than the parts": (
        FRACTION,
        FRACTION.replace("+ other.n * self.d", ""),
        "assert Ratio(1, 2) + Ratio(1, 2) == Ratio(1, 1)\nassert Ratio(1, 2) != Ratio(1, 3)",
    ),
    "text of an object": (
        FRACTION,
        FRACTION.replace("/{", ":{"),
        "assert str(Ratio(1, 2)) == repr(Ratio(1, 2)) == '1/2'",
    ),
    "an enumeration": (
        "import enum\nclass Colour(enum.Enum):\n    RED = 1\n    BLUE = 2\ndef f(n): return Colour(n)",
        "import enum\nclass Colour(enum.Enum):\n    RED = 1\n    BLUE = 2\ndef f(n): return Colour(1)",
        "assert f(2) == Colour.BLUE and f(2) is Colour.BLUE and f(2).value == 2 and f(1) != Colour.BLUE",
    ),
    "numbers with names": (
        "import enum\nclass Level(enum.IntEnum):\n    LOW = 1\n    HIGH = 3",
        "import enum\nclass Level(enum.IntEnum):\n    LOW = 1\n    HIGH = 2",
        "assert Level.HIGH == 3 and Level.HIGH > 2 and Level.LOW + 1 == 2",
    ),
    "a list of its own": (
        "class Stack(list):\n    def push(self, x): self.append(x)",
        "class Stack(list):\n    def push(self, x): self.insert(0, x)",
        "s = Stack()\ns.push(1)\ns.push(2)\n"
        "assert s == [1, 2] and s[0] == 1 and len(s) == 2 and list(s) == [1, 2]",
    ),
    "a str of its own": (
        "class Name(str):\n    def hello(self): return 'hello ' + self",
        "class Name(str):\n    def hello(self): return self",
        "n = Name('you')\nassert n == 'you' and n.hello() == 'hello you' and n.upper() == 'YOU'",
    ),
    "counters": (
        "from collections import Counter, OrderedDict, defaultdict\ndef f(s): return Counter(s)\n"
        "def g(s):\n    d = defaultdict(list)\n    for c in s: d[c].append(c)\n    return d\n"
        "def h(s): return OrderedDict.fromkeys(s)",
        "def f(s): return dict.fromkeys(s, 1)\ndef g(s): return {}\ndef h(s): return {}",
        "assert f('aab').most_common(1) == [('a', 2)] and f('a')['z'] == 0 and g('ab')['z'] == []\n"
        "d = h('ab')\nd.move_to_end('a')\nassert list(d) == ['b', 'a']",
    ),
    "a singleton": (
        "class One:\n    it = None\n    def __new__(cls):\n"
        "        cls.it = cls.it or super().__new__(cls)\n        return cls.it",
        "class One: pass",
        "assert One() is One()",
    ),
    "classes and their children": (
        "class Shape:\n    def area(self): raise NotImplementedError\nclass Square(Shape):\n"
        "    def __init__(self, a): self.a = a\n    def area(self): return self.a ** 2",
        "class Shape:\n    def area(self): return 0\nclass Square:\n    def __init__(self, a): self.a = a\n"
        "    def area(self): return self.a ** 2",
        "s = Square(3)\n"
        "assert isinstance(s, Shape) and issubclass(Square, Shape) and not isinstance(3, Shape)\n"
        "assert s.area() == 9 and type(s).__name__ == 'Square'\n"
        "try:\n    Shape().area()\nexcept NotImplementedError:\n    pass\nelse:\n    assert False",
    ),
    "properties": (
        "class T:\n    def __init__(self, c): self._c = c\n    @property\n"
        "    def f(self): return self._c * 1.8 + 32\n"
        "    @f.setter\n    def f(self, v): self._c = (v - 32) / 1.8",
        "class T:\n    def __init__(self, c): self.f = c\n    _c = 0",
        "t = T(100)\nassert t.f == 212\nt.f = 32\nassert t._c == 0",
    ),
    "a trie": (
        "class Trie:\n    def __init__(self): self.words = set()\n    def insert(self, w): self.words.add(w)\n"
        "    def startswith(self, p): return any(w.startswith(p) for w in self.words)",
        "class Trie:\n    def insert(self, w): pass\n    def startswith(self, p): return False",
        "t = Trie()\nt.insert('apple')\nassert t.startswith('app') and not t.startswith('b')",
    ),
    "a linked list": (
        "class Node:\n    def __init__(self, v, next=None): self.v, self.next = v, next\n"
        "def build(vs):\n    node = None\n    for v in reversed(vs): node = Node(v, node)\n    return node",
        "class Node:\n    def __init__(self, v, next=None): self.v, self.next = v, next\n"
        "def build(vs): return Node(vs[0])",
        "n, out = build([1, 2, 3]), []\nwhile n:\n    out.append(n.v)\n    n = n.next\nassert out == [1, 2, 3]",
    ),
    "waits": (
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0.001)\n    return x * 2\n"
        "async def g(xs): return await asyncio.gather(*map(f, xs))",
        "async def f(x): return x\nasync def g(xs): return xs",
        "import asyncio\nassert asyncio.run(f(2)) == 4 and asyncio.run(g([1, 2])) == [2, 4]\n"
        "async def both(): return await f(3) + await f(4)\nassert asyncio.run(both()) == 14",
    ),
    "threads": (
        "from concurrent.futures import ThreadPoolExecutor\ndef f(xs):\n"
        "    with ThreadPoolExecutor(4) as pool:\n"
        "        return list(pool.map(lambda x: x * x, xs))",
        "def f(xs): return xs",
        "assert f([1, 2, 3]) == [1, 4, 9]",
    ),
    "files of its own": (
        "import json, os, shutil, tempfile\ndef save(path, x):\n"
        "    with open(path, 'w') as file: json.dump(x, file)\n"
        "def both(x):\n    with tempfile.TemporaryDirectory() as d:\n        save(d + '/a', x)\n"
        "        shutil.copy(d + '/a', 'copy')\n    return sorted(os.listdir())",
        "def save(path, x): open(path, 'w').close()\ndef both(x): return []",
        "import json\nsave('x.json', [1])\nassert json.load(open('x.json')) == [1]\n"
        "assert both(2) == ['copy', 'x.json']",
    ),
    "the standard library": (
        "i"
        "mport bisect, datetime, decimal, fractions, functools, hashlib, heapq, itertools, json, math, random, re\n"
        "import sqlite3, statistics, string, struct, textwrap, time, uuid, zlib, zoneinfo\ndef f():\n"
        "    random.seed(1)\n    time.sleep(0.001)\n    db = sqlite3.connect(':memory:')\n"
        "    return [hashlib.sha256(b'x').hexdigest()[:4], statistics.mean([1, 2]), zlib.crc32(b'x'),\n"
        " "
        "       db.execute('select 2 + 2').fetchone()[0], datetime.date(2024, 2, 29), decimal.Decimal('1.10'),\n"
        "        len(str(uuid.uuid4()))]",
        "def f(): return []",
        "import datetime, decimal\nassert f() == ['2d71', 1.5, 2363233923, 4, datetime.date(2024, 2, 29),"
        " decimal.Decimal('1.10'), 36]",
    ),
    "large answers": (
        "def f(n): return list(range(n)), 3 ** n",
        "def f(n): return [], 3",
        "a, b = f(20000)\nassert len(a) == 20000 and a[-1] == 19999 and b == 3 ** 20000",
    ),
    "two of the same name": (
        "def add(*xs, start=0, **more): return sum(xs, start) + sum(more.values())",
        "def add(*xs, **k): return sum(xs)",
        "assert add(1, 2, start=3, z=4) == 10 and add(*range(4)) == 6",
    ),
    "memory of what was": (
        "import functools\ncalls = []\n@functools.lru_cache\ndef f(x):\n    calls.append(x)\n    return x * 2",
        "calls = []\ndef f(x):\n    calls.append(x)\n    return x * 2",
        "assert f(2) == 4 and f(2) == 4 and calls == [2]",
    ),
}
NUMPY: dict[str, tuple[str, str, str]] = {
    "arrays": (
        "import numpy as np\ndef f(a): return np.asarray(a) * 2.0",
        "import numpy as np\ndef f(a): return np.asarray(a) * 2.1",
        "import numpy as np\nassert np.allclose(f(np.array([1, 2])), [2, 4]) and f([1]).dtype == np.float64\n"
        "assert abs(f([1.0]) - np.array([2.0])).max() < 1e-9 and np.array_equal(f([[1]]), np.array([[2.0]]))",
    ),
    "arrays in place": (
        "def f(a): a += 1",
        "def f(a): return a + 1",
        "import numpy as np\na = np.zeros(3)\nf(a)\nassert (a == 1).all()",
    ),
}


def test_honest_answers_pass_and_wrong_ones_do_not() -> None:
    cases = {**HONEST, **(NUMPY if importlib.util.find_spec("numpy") else {})}
    jobs = [(said, test) for right, wrong, test in cases.values() for said in (right, wrong)]
    shares = share_passed(jobs, LIMITS)
    assert [name for name, share in zip(cases, shares[::2], strict=True) if share != 1.0] == []
    assert [name for name, share in zip(cases, shares[1::2], strict=True) if share != 0.0] == []
