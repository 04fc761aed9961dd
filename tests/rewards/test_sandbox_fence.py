"""What a hostile completion tries on the machine: files, sockets, devices, the kernel's calls, memory, other jobs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.rewards.promises import DEEDS, Promises, things_to_reach, tried
from trimtab.rewards.sandbox import Limits, Sandbox
from trimtab.rewards.sandbox_child import filter as calls

LIMITS = Limits(seconds=30, megabytes=256)
MACHINE = calls.machine()
only_with_a_filter = pytest.mark.skipif(
    MACHINE is None, reason="calls are filtered on Linux, x86-64 and arm64"
)

REFUSED = """
    ptrace:101:117 process_vm_readv:310:270 process_vm_writev:311:271 bpf:321:280 perf_event_open:298:241
    userfaultfd:323:282 mount:165:40 umount2:166:39 unshare:272:97 setns:308:268 pivot_root:155:41 chroot:161:51
    kexec_load:246:104 init_module:175:105 finit_module:313:273 io_uring_setup:425:425 open_by_handle_at:304:265
    name_to_handle_at:303:264 shmget:29:194 shmat:30:196 msgget:68:186 semget:64:190 mq_open:240:180
    memfd_create:319:279 memfd_secret:447:447 execve:59:221 execveat:322:281 keyctl:250:219 add_key:248:217
    request_key:249:218 pidfd_open:434:434 pidfd_getfd:438:438 pidfd_send_signal:424:424 kcmp:312:272 socket:41:198
    connect:42:203 bind:49:200 listen:50:201 accept4:288:242 sendmsg:46:211 sendmmsg:307:269 setsockopt:54:208
    setuid:105:146 setresuid:117:147 capset:126:91 personality:135:92 mknodat:259:33 mknod:133 quotactl:179:60
    reboot:169:142 swapon:167:224 syslog:103:116 acct:163:89 settimeofday:164:170 clock_settime:227:112 tkill:200:130
    rt_sigqueueinfo:129:138 rt_tgsigqueueinfo:297:240 setxattr:188:5 fsopen:430:430 move_mount:429:429
    open_tree:428:428 mount_setattr:442:442 landlock_create_ruleset:444:444 process_madvise:440:440 seccomp:317:277
    unknown:999:999
"""
PROBE = """
import ctypes, glob, os, socket, threading
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    ctypes.set_errno(0)
    return ctypes.get_errno() if libc.syscall(number, *args) == -1 else 0
def opens(path, mode="rb"):
    try: open(path, mode).close()
    except OSError: return False
    return True
def lists(path):
    try: return sorted(os.listdir(path))
    except OSError: return None
def fails(kind, *args):
    try: kind(*args)
    except OSError: return True
    return False
def fill():
    count = 0
    try:
        while count < 500:
            with open(f"file-{count}", "wb") as file: file.write(b"0" * 2**20)
            count += 1
    except OSError: pass
    return count
def threads():
    go, started = threading.Event(), 0
    try:
        while started < 500:
            threading.Thread(target=go.wait, daemon=True).start()
            started += 1
    except RuntimeError: pass
    go.set()
    return started
"""


def passed(tests: list[str], code: str = PROBE) -> list[str]:
    """Those of these tests that did not pass."""
    with Sandbox(LIMITS) as sandbox:
        return [test for test in tests if sandbox.run(code, test)[0] != 1.0]


def test_every_deed_is_possible_without_the_fence_so_that_its_failure_means_something(tmp_path: Path) -> None:
    with things_to_reach(str(tmp_path), Limits(megabytes=1)) as code:
        space: dict[str, object] = {}
        exec(code, space)
        order = sorted(DEEDS, key=lambda name: name == "write")  # which removes what is read
        assert [name for name in order if not space[name]()] == []  # type: ignore[operator]


def test_the_fence_keeps_all_its_promises_where_the_kernel_has_what_it_takes() -> None:
    promises = tried(LIMITS)
    if not promises.files_kept:
        pytest.skip(f"neither namespaces nor Landlock here: {promises.told()}")
    assert promises.broken == ()
    assert promises.told().startswith("completions cannot read your files, change your files")


def test_a_broken_promise_is_told_by_name() -> None:
    told = Promises(("read", "start")).told()
    assert told.startswith("completions CAN read your files, start processes; they cannot change your files")


@only_with_a_filter
def test_calls_that_no_computation_needs_are_refused() -> None:
    assert MACHINE is not None
    refused = calls.numbers(REFUSED, MACHINE)
    # One job: a refused call leaves no trace. All arguments are 0, with which an allowed call would say something else.
    code = PROBE + f"said = {{name: call(number, 0, 0, 0, 0, 0) for name, number in {refused}.items()}}"
    new_user, try_again = 0x10000011, 11
    clone, clone3 = (calls.numbers(calls._LOOKED_INTO, MACHINE)[name] for name in ("clone", "clone3"))
    tests = [
        "assert {name for name, error in said.items() if error != 1} == set()",
        f"assert call({clone}, {new_user}, 0, 0, 0, 0) == 1 and call({clone}, 17, 0, 0, 0, 0) == {try_again}",
        f"assert call({clone3}, 0, 0) == 38",
    ]
    assert passed(tests, code) == []


@only_with_a_filter
def test_no_socket_of_any_family_but_a_pair_of_its_own() -> None:
    code = (
        PROBE
        + """
def pair():
    a, b = socket.socketpair()
    a.send(b"x")
    return b.recv(1)
def datagrams(): return socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
def families(): return [f for f in range(47) if not all(fails(socket.socket, f, kind) for kind in (1, 2, 3, 5))]
"""
    )
    assert passed(["assert families() == []", "assert pair() == b'x'", "assert fails(datagrams)"], code) == []


@pytest.mark.skipif(sys.platform != "linux", reason="/proc, /sys and /dev are Linux's")
def test_no_file_outside_is_there(tmp_path: Path) -> None:
    if not tried(LIMITS).files_kept:
        pytest.skip("neither namespaces nor Landlock here")
    answers = tmp_path / "answers.jsonl"
    answers.write_text("4")
    devices = [f"/dev/{name}" for name in os.listdir("/dev")]
    harmless = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"}
    others = [
        str(answers),
        __file__,
        "/etc/passwd",
        "/etc/shadow",
        "/proc/1/mem",
        "/proc/self/environ",
        "/proc/cpuinfo",
    ]
    tests = [
        f"assert not any(opens(path) for path in {others})",
        f"assert not any(opens(path, mode) for path in {sorted({*devices} - harmless)} for mode in ('rb', 'r+b'))",
        "assert all(lists(path) is None for path in ('/', '/proc', '/sys', '/home', '/root', '/tmp', '/dev', '/etc'))",
        "import os\nassert lists('.') == [] == os.listdir()",
        "assert opens('mine', 'wb') and lists('.') == ['mine']",
        f"assert not opens({os.__file__!r}, 'r+b') and opens({os.__file__!r})",
    ]
    assert passed(tests) == []


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_what_a_job_takes_is_limited() -> None:
    with Sandbox(LIMITS) as sandbox:
        if sandbox.run("import os", "assert os.getcwd() == '/job'")[0] != 1.0:
            pytest.skip(
                "no namespaces here: a folder's size and a user's threads are not counted for a job alone"
            )
    assert passed(["assert 32 <= fill() <= 64", "assert 8 <= threads() <= 64"]) == []


def test_two_jobs_of_one_batch_do_not_see_each_other() -> None:
    with Sandbox(LIMITS) as sandbox:
        assert (
            sandbox.run("open('left', 'w').write('x')", "import os\nassert os.listdir() == ['left']")[0]
            == 1.0
        )
        assert sandbox.run(PROBE, "assert lists('.') == [] and lists('..') is None")[0] == 1.0
        assert os.listdir(sandbox.folder) == []


def run(program: list[calls.Step], call: int, *args: int, architecture: int) -> int:
    """What the kernel does with a filter: a verdict for a call."""
    data = {0: call, 4: architecture}
    for place, value in enumerate((*args, *(0,) * (6 - len(args)))):
        data |= {16 + 8 * place: value & 0xFFFFFFFF, 20 + 8 * place: value >> 32}
    at, held = 0, 0
    while True:
        code, yes, no, value = program[at]
        at += 1
        if code == 0x20:
            held = data[value]
        elif code == 0x54:
            held &= value
        elif code == 0x06:
            return value
        else:
            holds = {0x15: held == value, 0x35: held >= value, 0x45: bool(held & value)}[code]
            at += yes if holds else no


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_of_each_machine_says_what_it_should(machine: str) -> None:
    own, other = (0xC000003E, 0xC00000B7) if machine == "x86_64" else (0xC00000B7, 0xC000003E)
    program, allow, refuse = calls.program(machine, pid=7, own_files=True), 0x7FFF0000, 0x00050000
    free = calls.numbers(calls._FREE, machine)
    looked_into = calls.numbers(calls._LOOKED_INTO, machine)
    assert len({*free.values(), *looked_into.values()}) == len(free) + len(looked_into)
    for number in free.values():
        assert run(program, number, architecture=own) == allow
        assert run(program, number, architecture=other) == refuse | 1
        assert run(program, number | 0x40000000, architecture=own) == refuse | 1  # x32
    for name, number in calls.numbers(REFUSED, machine).items():
        assert run(program, number, architecture=own) == refuse | 1, name
    cases = [
        ("kill", (7, 9), allow),
        ("kill", (8, 9), refuse | 1),
        ("kill", (0xFFFFFFFF, 9), refuse | 1),
        ("tgkill", (8, 8, 9), refuse | 1),
        ("clone", (0x003D0F00,), allow),  # as libc starts a thread
        ("clone", (17,), refuse | 11),
        ("clone", (0x00010000 | 0x10000000,), refuse | 1),
        ("clone3", (), refuse | 38),
        ("socketpair", (1, 1 | 0x80800), allow),
        ("socketpair", (1, 2), refuse | 1),
        ("socketpair", (2, 1), refuse | 1),
        ("sendto", (3, 0, 0, 0, 0), allow),
        ("sendto", (3, 0, 0, 0, 1 << 32), refuse | 1),
        ("ioctl", (0, 0x5401), allow),
        ("ioctl", (0, 0x5412), refuse | 25),  # typing into a terminal
        ("fcntl", (3, 8, 1), refuse | 1),
        ("prctl", (4, 1), refuse | 1),
        ("prlimit64", (1, 0), refuse | 1),
    ]
    for name, args, verdict in cases:
        assert run(program, looked_into[name], *args, architecture=own) == verdict, (name, args)
    modes = calls.numbers(calls._DATES_AND_MODES, machine).values()
    without_a_room = calls.program(machine, pid=7, own_files=False)
    assert {run(program, number, architecture=own) for number in modes} == {allow}
    assert {run(without_a_room, number, architecture=own) for number in modes} == {refuse}  # nothing is done


ELSEWHERE = """
import sys
from trimtab.config.grpo import GrpoSettings
from trimtab.rewards.promises import what_it_keeps
from trimtab.rewards.sandbox import share_passed, Limits
for unfenced in (False, True):
    print(*what_it_keeps(GrpoSettings(unfenced=unfenced)))
code = "import shutil, threading\\ndef f():\\n    open('a', 'w').close()\\n    shutil.copy('a', 'b')\\n    return 4"
print(share_passed([(code, "assert f() == 4"), ("def f(): return 5", "assert f() == 4")], Limits(30, 256)))
"""


@only_with_a_filter
@pytest.mark.parametrize("landlock", [True, False])
def test_without_namespaces_landlock_keeps_files_and_without_both_it_takes_your_leave(
    landlock: bool, tmp_path: Path
) -> None:
    if landlock and not tried(LIMITS).files_kept:
        pytest.skip("this kernel has no Landlock")
    unshare = "272" if MACHINE == "x86_64" else "97"
    (tmp_path / "script.py").write_text(ELSEWHERE)
    without = unshare if landlock else f"{unshare},444"
    command = [
        sys.executable,
        str(Path(__file__).with_name("kernel_without.py")),
        without,
        str(tmp_path / "script.py"),
    ]
    first, second, scores = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert scores == "[1.0, 0.0]"
    if landlock:
        assert first == second
        assert first.startswith("True completions cannot read your files, change your files")
    else:
        assert first.startswith("False completions CAN read your files")
        assert "grpo.unfenced=true" in first
        assert second.startswith("None completions CAN read your files")
