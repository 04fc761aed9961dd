"""Which calls to the kernel a completion may make: those of a program that computes, and no others.

A list of what is allowed, so that a call that nobody has heard of yet is refused too. Without a socket, a process of
its own, a key, shared memory, a mount, a debugger's call or another table of numbers (x32, i386), what is left is
files, which are `room`'s and `landlock`'s part, memory, time and threads, which are `fence`'s.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

from .kernel import linux, prctl

Step = tuple[int, int, int, int]

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# name:number on x86-64:number on arm64, which has no calls where a newer one does the same
_FREE = """
    read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 preadv:295:69 pwritev:296:70
    preadv2:327:286 pwritev2:328:287 open:2 openat:257:56 openat2:437:437 creat:85 close:3:57
    close_range:436:436 lseek:8:62 stat:4 lstat:6 fstat:5:80 newfstatat:262:79 statx:332:291 access:21
    faccessat:269:48 faccessat2:439:439 readlink:89 readlinkat:267:78 getdents:78 getdents64:217:61
    getcwd:79:17 chdir:80:49 fchdir:81:50 mkdir:83 mkdirat:258:34 rmdir:84 unlink:87 unlinkat:263:35
    rename:82 renameat:264:38 renameat2:316:276 link:86 linkat:265:37 symlink:88 symlinkat:266:36
    truncate:76:45 ftruncate:77:46 fallocate:285:47 fsync:74:82 fdatasync:75:83 flock:73:32 dup:32:23
    dup2:33 dup3:292:24 pipe:22 pipe2:293:59 sendfile:40:71 copy_file_range:326:285 splice:275:76
    umask:95:166 statfs:137:43 fstatfs:138:44 fadvise64:221:223 mmap:9:222 munmap:11:215 mremap:25:216
    mprotect:10:226 madvise:28:233 brk:12:214 msync:26:227 membarrier:324:283 futex:202:98
    set_robust_list:273:99 get_robust_list:274:100 rseq:334:293 set_tid_address:218:96 exit:60:93
    exit_group:231:94 sched_yield:24:124 sched_getaffinity:204:123 sched_getparam:143:121
    sched_getscheduler:145:120 sched_get_priority_max:146:125 sched_get_priority_min:147:126 getcpu:309:168
    gettid:186:178 getpid:39:172 getppid:110:173 getuid:102:174 geteuid:107:175 getgid:104:176
    getegid:108:177 getresuid:118:148 getresgid:120:150 getgroups:115:158 getpgid:121:155 getpgrp:111
    getsid:124:156 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136
    rt_sigsuspend:130:133 rt_sigtimedwait:128:137 sigaltstack:131:132 pause:34 alarm:37 setitimer:38:103
    getitimer:36:102 signalfd:282 signalfd4:289:74 restart_syscall:219:128 timer_create:222:107
    timer_settime:223:110 timer_gettime:224:108 timer_getoverrun:225:109 timer_delete:226:111
    timerfd_create:283:85 timerfd_settime:286:86 timerfd_gettime:287:87 nanosleep:35:101
    clock_nanosleep:230:115 clock_gettime:228:113 clock_getres:229:114 gettimeofday:96:169 time:201
    times:100:153 getrusage:98:165 uname:63:160 sysinfo:99:179 getrandom:318:278 getrlimit:97:163
    capget:125:90 poll:7 ppoll:271:73 select:23 pselect6:270:72 epoll_create:213 epoll_create1:291:20
    epoll_ctl:233:21 epoll_wait:232 epoll_pwait:281:22 epoll_pwait2:441:441 eventfd:284 eventfd2:290:19
    recvfrom:45:207 recvmsg:47:212 getsockopt:55:209 getsockname:51:204 getpeername:52:205 shutdown:48:210
    setrlimit:160:164
"""
_DATES_AND_MODES = """
    chmod:90 fchmod:91:52 fchmodat:268:53 fchmodat2:452:452 utime:132 utimes:235 utimensat:280:88 futimesat:261
"""
_LOOKED_INTO = """
    kill:62:129 tgkill:234:131 prlimit64:302:261 ioctl:16:29 fcntl:72:25 prctl:157:167
    clone:56:220 clone3:435:435 fork:57 vfork:58 socketpair:53:199 sendto:44:206
"""
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Is it a terminal, how wide, how much is there to read, blocking or not, kept over exec or not."""
_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)
"""Copies, flags and locks. Not: who is signalled, with which signal (8, 10, 15)."""
_PRCTLS = (15, 16, 0x53564D41)
"""A thread's name, and that of a piece of memory."""
_A_THREAD, _NAMESPACES = 0x00010000, 0x7E020000

_LOAD, _EQUAL, _AT_LEAST, _HAS_BIT, _AND, _GIVE = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_NOTHING_DONE = _REFUSE  # with error 0: Landlock does not look at these, and copying a file wants them
_NOT_PERMITTED, _TRY_AGAIN, _NO_TERMINAL, _UNKNOWN = (_REFUSE | number for number in (1, 11, 25, 38))


def machine() -> str | None:
    """The table of numbers that this interpreter's calls go by, where there is a filter for it."""
    name = os.uname().machine if linux() and sys.maxsize > 2**32 else ""
    return name if name in _ARCHITECTURES else None


def numbers(calls: str, on: str) -> dict[str, int]:
    """The numbers of the calls that a machine has."""
    found = {}
    for name, *known in (call.split(":") for call in calls.split()):
        if on == "x86_64" or len(known) > 1:
            found[name] = int(known[on != "x86_64"])
    return found


def program(on: str, pid: int, own_files: bool) -> list[Step]:
    """The filter. `own_files`: whether all files that can be found are the completion's own or cannot be written to."""
    free, touching = numbers(_FREE, on), numbers(_DATES_AND_MODES, on)
    steps: list[Step] = [
        (_LOAD, 0, 0, 4),  # the architecture: a call by another table of numbers is refused
        (_EQUAL, 1, 0, _ARCHITECTURES[on]),
        (_GIVE, 0, 0, _NOT_PERMITTED),
        (_LOAD, 0, 0, 0),  # the call
        (_AT_LEAST, 0, 1, 0x40000000),
        (_GIVE, 0, 0, _NOT_PERMITTED),
    ]
    for number in free.values():
        steps += [(_EQUAL, 0, 1, number), (_GIVE, 0, 0, _ALLOW)]
    for number in touching.values():
        steps += [(_EQUAL, 0, 1, number), (_GIVE, 0, 0, _ALLOW if own_files else _NOTHING_DONE)]
    looks: dict[str, list[Step]] = {
        "kill": _one_of(0, [pid], _NOT_PERMITTED),
        "tgkill": _one_of(0, [pid], _NOT_PERMITTED),
        "prlimit64": _one_of(0, [0, pid], _NOT_PERMITTED),
        "ioctl": _one_of(1, _IOCTLS, _NO_TERMINAL),
        "fcntl": _one_of(1, _FCNTLS, _NOT_PERMITTED),
        "prctl": _one_of(0, _PRCTLS, _NOT_PERMITTED),
        "clone": [
            _argument(0),
            (_HAS_BIT, 0, 1, _NAMESPACES),
            (_GIVE, 0, 0, _NOT_PERMITTED),
            (_HAS_BIT, 1, 0, _A_THREAD),
            (_GIVE, 0, 0, _TRY_AGAIN),
            (_GIVE, 0, 0, _ALLOW),
        ],
        "clone3": [(_GIVE, 0, 0, _UNKNOWN)],  # its flags cannot be seen from here; libc takes clone instead
        "fork": [(_GIVE, 0, 0, _TRY_AGAIN)],
        "vfork": [(_GIVE, 0, 0, _TRY_AGAIN)],
        # A pair of streams that reaches nobody else: asyncio wakes itself by one.
        "socketpair": [
            _argument(0),
            (_EQUAL, 1, 0, 1),
            (_GIVE, 0, 0, _NOT_PERMITTED),
            _argument(1),
            (_AND, 0, 0, 0xF),
            (_EQUAL, 1, 0, 1),
            (_GIVE, 0, 0, _NOT_PERMITTED),
            (_GIVE, 0, 0, _ALLOW),
        ],
        # Along a connection, not to an address.
        "sendto": [
            _argument(4),
            (_EQUAL, 1, 0, 0),
            (_GIVE, 0, 0, _NOT_PERMITTED),
            _argument(4, high=True),
            (_EQUAL, 1, 0, 0),
            (_GIVE, 0, 0, _NOT_PERMITTED),
            (_GIVE, 0, 0, _ALLOW),
        ],
    }
    for name, number in numbers(_LOOKED_INTO, on).items():
        steps += [(_EQUAL, 0, len(looks[name]), number), *looks[name]]
    return [*steps, (_GIVE, 0, 0, _NOT_PERMITTED)]


def install(own_files: bool) -> bool:
    """Hold this process and its threads to it for good. False where there is no filter for this machine or kernel."""
    name = machine()
    if name is None:
        return False
    steps = program(name, os.getpid(), own_files)
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    whole = struct.pack("HP", len(steps), ctypes.addressof(packed))
    return prctl(22, 2, ctypes.c_char_p(whole))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def _argument(place: int, high: bool = False) -> Step:
    return _LOAD, 0, 0, 16 + 8 * place + 4 * high


def _one_of(place: int, values: tuple[int, ...] | list[int], otherwise: int) -> list[Step]:
    tries: list[Step] = [step for v in values for step in ((_EQUAL, 0, 1, v), (_GIVE, 0, 0, _ALLOW))]
    return [_argument(place), *tries, (_GIVE, 0, 0, otherwise)]
