"""Problems as in the benchmarks of generated code: a right answer passes every test, a wrong one does not."""

from __future__ import annotations

from trimtab.rewards.sandbox import Limits, share_passed

LIMITS = Limits(seconds=60, megabytes=512)

PROBLEMS: dict[str, tuple[str, str, list[str]]] = {
    # name: a right answer, a wrong one, the tests
    "max chain": (
        "def longest(words):\n    return max(words, key=len)",
        "def longest(words):\n    return max(words)",
        ["assert longest(['z', 'abc', 'de']) == 'abc'", "assert longest(['a']) == 'a'"],
    ),
    "remove occurrences": (
        "def remove_ends(s, c):\n    s = s.replace(c, '', 1)\n    i = s.rfind(c)\n"
        "    return s if i < 0 else s[:i] + s[i + 1:]",
        "def remove_ends(s, c):\n    return s.replace(c, '')",
        ["assert remove_ends('hello', 'l') == 'heo'", "assert remove_ends('pxpxp', 'p') == 'xpx'"],
    ),
    "sort matrix": (
        "def sort_matrix(m):\n    return sorted(m, key=sum)",
        "def sort_matrix(m):\n    return sorted(m)",
        ["assert sort_matrix([[1, 9], [2, 3]]) == [[2, 3], [1, 9]]"],
    ),
    "counted words": (
        "from collections import Counter\ndef common(words):\n    return Counter(words).most_common(2)",
        "from collections import Counter\ndef common(words):\n    return list(Counter(words).items())",
        ["assert common(['a', 'b', 'b', 'c', 'c', 'c']) == [('c', 3), ('b', 2)]"],
    ),
    "volume": (
        "import math\ndef volume(r):\n    return 4 / 3 * math.pi * r ** 3",
        "def volume(r):\n    return 4 * 3.14 * r ** 2",
        [
            "assert math.isclose(volume(10), 4188.790204786391, rel_tol=0.001)",
            "assert abs(volume(1) - 4.18879) < 1e-4",
        ],
    ),
    "regular expression": (
        "import re\ndef match(text):\n    return 'Found' if re.search(r'ab{3}', text) else 'Not'",
        "def match(text):\n    return 'Found' if 'ab' in text else 'Not'",
        ["assert match('aabbbbc') == 'Found'", "assert match('ab') == 'Not'"],
    ),
    "shared elements": (
        "def shared(a, b):\n    return tuple(set(a) & set(b))",
        "def shared(a, b):\n    return a + b",
        ["assert set(shared((3, 4, 5, 6), (5, 7, 4, 10))) == set((4, 5))"],
    ),
    "heap": (
        "import heapq as hq\ndef largest(nums, n):\n    return hq.nlargest(n, nums)",
        "def largest(nums, n):\n    return nums[:n]",
        ["assert largest([25, 35, 22, 85], 2) == [85, 35]"],
    ),
    "has close elements": (
        "from typing import List\ndef has_close_elements(numbers: List[float], threshold: float) -> bool:\n"
        "    s = sorted(numbers)\n    return any(b - a < threshold for a, b in zip(s, s[1:]))",
        "def has_close_elements(numbers, threshold):\n    return True",
        [
            "def check(candidate):\n    assert candidate([1.0, 2.0, 3.9], 0.3) == False\n"
            "    assert candidate([1.0, 2.0, 2.1], 0.3) == True\ncheck(has_close_elements)"
        ],
    ),
    "parentheses": (
        "def separate(text):\n    out, depth, now = [], 0, ''\n    for c in text.replace(' ', ''):\n        now += c\n"
        "        depth += 1 if c == '(' else -1\n        if not depth:\n            out.append(now); now = ''\n"
        "    return out",
        "def separate(text):\n    return text.split()",
        ["def check(f):\n    assert f('( ) (( )) (( )( ))') == ['()', '(())', '(()())']\ncheck(separate)"],
    ),
    "in place": (
        "def move_zeros(nums):\n    nums.sort(key=lambda n: n == 0)",
        "def move_zeros(nums):\n    return sorted(nums, key=lambda n: n == 0)",
        ["x = [0, 1, 0, 3]\nmove_zeros(x)\nassert x == [1, 3, 0, 0]"],
    ),
    "recursion": (
        "def ackermann(m, n):\n    if m == 0: return n + 1\n    if n == 0: return ackermann(m - 1, 1)\n"
        "    return ackermann(m - 1, ackermann(m, n - 1))",
        "def ackermann(m, n):\n    return ackermann(m - 1, n)",
        ["assert ackermann(2, 3) == 9"],
    ),
    "large numbers": (
        "import functools\n@functools.lru_cache(None)\ndef fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)",
        "def fib(n):\n    return round(((1 + 5 ** 0.5) / 2) ** n / 5 ** 0.5)",
        ["assert fib(100) == 354224848179261915075"],
    ),
    "raises": (
        "def root(x):\n    if x < 0:\n        raise ValueError('negative')\n    return x ** 0.5",
        "def root(x):\n    return abs(x) ** 0.5",
        [
            "try:\n    root(-1)\nexcept ValueError as e:\n    assert 'negative' in str(e)\nelse:\n    assert False"
        ],
    ),
    "class": (
        "class Account:\n    def __init__(self): self.balance = 0\n    def deposit(self, n):\n"
        "        self.balance += n\n        return self",
        "class Account:\n    balance = 0\n    def deposit(self, n): return self",
        ["a = Account()\na.deposit(5).deposit(6)\nassert a.balance == 11 and Account().balance == 0"],
    ),
    "linked list": (
        "class Node:\n    def __init__(self, value, next=None): self.value, self.next = value, next\n"
        "def turned(node):\n    before = None\n    while node:\n"
        "        node.next, before, node = before, node, node.next\n    return before",
        "class Node:\n    def __init__(self, value, next=None): self.value, self.next = value, next\n"
        "def turned(node):\n    return node",
        ["n = turned(Node(1, Node(2)))\nassert n.value == 2 and n.next.value == 1 and n.next.next is None"],
    ),
    "higher order": (
        "def compose(*fs):\n    def run(x):\n        for f in reversed(fs): x = f(x)\n        return x\n    return run",
        "def compose(*fs):\n    return fs[0]",
        ["assert compose(lambda x: x + 1, lambda x: x * 2, abs)(-3) == 7"],
    ),
    "generator": (
        "def primes(n):\n    for p in range(2, n):\n        if all(p % d for d in range(2, p)): yield p",
        "def primes(n):\n    yield from range(2, n)",
        ["assert list(primes(12)) == [2, 3, 5, 7, 11]"],
    ),
    "numpy": (
        "import numpy as np\ndef norm(rows):\n    m = np.array(rows, float)\n"
        "    return m / m.sum(1, keepdims=True)",
        "import numpy as np\ndef norm(rows):\n    return np.array(rows, float)",
        ["import numpy as np\nassert np.allclose(norm([[1, 3], [2, 2]]), [[0.25, 0.75], [0.5, 0.5]])"],
    ),
    "nested": (
        "def tree(pairs):\n    out = {}\n    for child, parent in pairs: out.setdefault(parent, []).append(child)\n"
        "    return out",
        "def tree(pairs):\n    return dict(pairs)",
        ["assert tree([(1, None), (2, 1), (3, 1)]) == {None: [1], 1: [2, 3]}"],
    ),
}


def test_right_answers_pass() -> None:
    shares = share_passed([(right, tests) for right, _, tests in PROBLEMS.values()], LIMITS)
    assert dict(zip(PROBLEMS, shares, strict=True)) == dict.fromkeys(PROBLEMS, 1.0)


def test_wrong_answers_do_not() -> None:
    shares = share_passed([(wrong, tests) for _, wrong, tests in PROBLEMS.values()], LIMITS)
    assert [name for name, share in zip(PROBLEMS, shares, strict=True) if share == 1.0] == []


def test_what_does_not_end_or_takes_all_memory_ends_and_does_not_disturb_its_neighbours() -> None:
    right = ("def f(): return 1", ["assert f() == 1"])
    bad = [
        ("def f():\n    while True: pass", right[1]),
        ("import time\ndef f(): time.sleep(600)", right[1]),
        ("def f():\n    while True:\n        try: g()\n        except BaseException: pass", right[1]),
        ("def f():\n    x = []\n    while True: x.append(bytearray(2**20))", right[1]),
        ("def f(): return [0] * 10**9", right[1]),
        ("def f(): return 10 ** 10 ** 10", right[1]),
        ("import itertools\ndef f(): return itertools.count()", ["assert sum(f()) == 1"]),
    ]
    jobs = [job for one in bad for job in (one, right)]
    assert share_passed(jobs, Limits(seconds=1, megabytes=256)) == [0.0, 1.0] * len(bad)
