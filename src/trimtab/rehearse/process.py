"""The rehearsal inside one process: virtual GPUs, observer and checks put in, and the ways in which a process can end.

Every process of the user's program that imports torch passes here once: the script itself, spawned and forked ranks,
the ranks of a launcher, DataLoader workers. It never decides on a verdict; it records.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import importlib
import multiprocessing.process
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trimtab import hub
from trimtab.diagnose.finding import Finding, Place
from trimtab.rehearse import collecting, instead, renames, shield, tracebacks, written
from trimtab.rehearse.session import VARIABLE, Recorder, Settings, read_lines, stands_file

if TYPE_CHECKING:
    from trimtab.rehearse.checks.base import BaseCheck
    from trimtab.rehearse.full import FullGpus
    from trimtab.rehearse.idle_models import IdleModels
    from trimtab.rehearse.past_optimizers import PastOptimizers
    from trimtab.rehearse.read_states import ReadStates
    from trimtab.virtual.state import Machine


_SELDOM = 30
"""Memory is written down after so many times the time that it takes."""


class StopRehearsal(BaseException):
    """Ends the script after the steps that were asked for. Not an Exception: scripts catch those."""


class Process:
    """What the rehearsal holds in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = Settings.load(folder)
        self.recorder = Recorder(folder)
        self.checks: list[BaseCheck] = []
        self.finished_in = -1
        self.explained: set[int] = set()
        """Ids of parameters whose missing gradient one check has already explained."""
        self.made_up = False
        """Whether the program goes on with values that nobody computed (a kernel that could not be run)."""
        self.cut_off = False
        """Whether the program was ended after the steps that were asked for."""
        self.not_simulated: dict[str, Place | None] = {}
        """What virtual GPUs refused to do here, and the program's line that asked for it."""
        self.ran_a_module = self.loaded_rows = self.differentiated = self.trained = False
        """Whether a module was called here, rows were read, a backward pass ran and an optimizer stepped."""
        self.full: FullGpus | None = None
        """Who follows what the program makes of a full GPU."""
        self.fillers: list[ReadStates | PastOptimizers | IdleModels] = []
        """Who knows what may lie on a full GPU to no purpose; the surest first."""
        self.executed: set[str] | None = None
        """The files whose code has run here, where all of them are known."""
        self.hard_exit: Callable[[int], NoReturn] = os._exit
        self._memory_due = 0.0

    @property
    def reads_rows_alone(self) -> bool:
        """Whether all that was done with torch was to read rows."""
        return self.loaded_rows and not self.ran_a_module

    def report(self, finding: Finding) -> None:
        """Record a finding."""
        self.recorder.finding(finding)

    def others_records(self) -> Iterator[dict[str, Any]]:
        """What the other processes of this rehearsal have written so far."""
        for path in self.folder.glob("records-*.jsonl"):
            if path != self.recorder.write_path():
                yield from read_lines(path)

    def failed(self, error: BaseException) -> None:
        """Record the error that ends the script (or one of its processes), once."""
        from trimtab.rehearse.errors import finding_of

        if getattr(error, "_trimtab_recorded", False):
            return
        error._trimtab_recorded = True  # type: ignore[attr-defined]
        finding = shield.call("judgement of errors", finding_of, error, self)
        if finding is not None:
            self.report(self.enriched(finding, error))

    def enriched(self, finding: Finding, error: BaseException | None) -> Finding:
        """The finding with what the checks know of its cause."""
        for check in self.checks:
            finding = shield.call(type(check).__name__, check.enrich, finding, error, otherwise=finding)
        return finding

    def finish(self, how: str, status: int = 0) -> None:
        """Let the checks speak and write the last records; once per process."""
        if self.finished_in == os.getpid():
            return
        self.finished_in = os.getpid()
        for check in self.checks:
            shield.call(type(check).__name__, check.finish)
        self._refusals()
        self.memory(now=True)
        if not status:
            self._nothing_on_a_gpu()
        self.recorder.flush()
        self.recorder.write(t="end", pid=os.getpid(), how=how, status=status)

    def _refusals(self) -> None:
        """Say what was refused and caught: on a GPU the program would have gone another way."""
        if not self.not_simulated:
            return
        self.recorder.begin()
        told = [r["text"] for r in read_lines(self.recorder.write_path()) if r["t"] == "unproven"]
        for text, place in self.not_simulated.items():
            if not any(text in one for one in told):
                at = f" ({os.path.basename(place.file)}:{place.line})" if place is not None else ""
                said = f"{text}{at}; this was caught, and on a GPU the program goes another way from there"
                self.recorder.write(t="unproven", text=said)

    def give_up(self) -> NoReturn:
        """End at once, without an end record: nothing is proven."""
        sys.stderr.flush()
        self.hard_exit(70)

    def memory(self, *, now: bool = False) -> None:
        """Write the memory figures as they stand; in between, so seldom that it takes no time to speak of."""
        if "torch" not in sys.modules:
            return
        from trimtab.rehearse import memory_told
        from trimtab.virtual.state import machine

        here = machine()
        began = time.monotonic()
        if here is None or (not now and began < self._memory_due):
            return
        devices = shield.call("memory", memory_told.of, here, otherwise={})
        used = any(device.peak or device.used for device in here.devices)
        self.recorder.write(t="memory", devices=devices, used=used)
        ended = time.monotonic()
        self._memory_due = ended + max(1.0, _SELDOM * (ended - began))

    def _nothing_on_a_gpu(self) -> None:
        """Say why no tensor of this process was ever on a GPU; whether one of another was, the parent knows."""
        from trimtab.rehearse import untouched

        if "torch" in sys.modules:
            from trimtab.virtual.state import machine

            if (here := machine()) is None or any(device.peak or device.used for device in here.devices):
                return
        if multiprocessing.parent_process() is None:
            asked = shield.call("untouched", untouched.wanted, otherwise="")
            if asked or (not self.trained and (self.differentiated or self.reads_rows_alone)):
                self.recorder.write(t="on-cpu", text=f", as it asks at {asked}" if asked else "")
            else:
                reason = shield.call("untouched", untouched.reason, otherwise="")
                self.recorder.write(t="untouched", text=reason)


SETUP = "trimtab.rehearse.process:attach"
"""What a process of the rehearsal calls when its virtual GPUs stand."""

_process: Process | None = None


def is_rehearsed() -> bool:
    """Whether this process belongs to a rehearsal."""
    return _process is not None


def rehearsal_notes(text: str) -> None:
    """Let the report of the rehearsal that this process belongs to, if it does, say something."""
    if _process is not None:
        _process.recorder.write(t="note", text=text)


def rehearsal_proves_not(text: str) -> None:
    """Let it say what it did not prove, which its verdict then tells too."""
    if _process is not None:
        _process.recorder.write(t="unproven", text=text)


def rehearsal_ends_by(error: BaseException) -> None:
    """Let it know of an error that ends this process by an exit status, of which its launcher alone is told why."""
    if _process is not None:
        end = SystemExit(1)
        end.__context__ = error
        _process.failed(end)


def rehearsal_holds(name: str, nbytes: int) -> None:
    """Where it computes with values, hold weights against this machine's memory before anything is fetched or read for
    them: without room for them it begins again by shapes."""
    if _process is not None and not _process.settings.shapes_only:
        from trimtab.rehearse import room_here

        room_here.check(_process, name, nbytes)


def rehearsed_steps() -> int | None:
    """How many optimizer steps the rehearsal that this process belongs to makes at most, where that was asked for."""
    return None if _process is None else _process.settings.max_steps


def prepare(*, first: bool = False) -> Process:
    """The records of this process, before torch is there; `first`: before any of the program's own code, too."""
    global _process
    if _process is None:
        _process = Process(Path(os.environ[VARIABLE]))
        _process.recorder.begin()
        collecting.put_off()
        executed = written.watch(_process.recorder, without=_process.settings.apart)
        _process.executed = executed if first else None
        renames.across(_process.settings.apart)
        instead.install_from_environment()
        _catch_ends(_process)
    return _process


def attach(machine: Machine) -> None:
    """Put observer and checks into this process. Called when torch was imported and the virtual GPUs stand."""
    process = prepare()
    try:
        _attach(process, machine)
    except Exception:
        # Ours, not the script's: it must not be taken for a fault of the program.
        traceback.print_exc()
        process.recorder.write(t="note", text="the rehearsal itself failed: see the traceback above")
        process.give_up()


def _attach(process: Process, machine: Machine) -> None:
    import torch

    from trimtab.rehearse import (
        checks,
        hollow_weights,
        loading,
        observer,
        one_rank,
        quiet,
        ran_modules,
        room_here,
        what_if,
        workers,
    )
    from trimtab.rehearse.full import FullGpus
    from trimtab.rehearse.idle_models import IdleModels
    from trimtab.rehearse.layers import Layers
    from trimtab.rehearse.past_optimizers import PastOptimizers
    from trimtab.rehearse.phases import Phases
    from trimtab.rehearse.read_states import ReadStates
    from trimtab.virtual import bootstrap, deeds, imports, kinds, origin, places

    if process.executed is not None:
        origin.tell_by(process.executed)
    machine.observer = observer.RehearsalObserver(process)
    machine.hidden = (observer.OWN,)
    machine.at_first_use.append(lambda: collecting.resume(models=deeds.any_module()))
    places.hide(observer.OWN)
    if machine.shapes:
        machine.hollow_to = hollow_weights.keep_apart(process.recorder, process.settings.apart)
        loading.build_from_configs(machine)
    if machine.stands_for_all:
        one_rank.start_only_the_first()
        one_rank.save_its_own_part(machine)
    else:
        room_here.look_before_loading(process, machine)
    imports.when_imported(machine, machine.undo, {hub.ASKING: _ask_the_hub_once})
    # The processes that this one starts belong to the rehearsal too.
    os.environ.update(bootstrap.environment(machine, SETUP))
    torch.nn.modules.module.register_module_forward_pre_hook(
        functools.partial(_called, process, ran_modules.called)
    )
    deeds.listen()
    kinds.listen(machine)
    _catch_spawned(process)
    shield.watch_over(process)
    workers.install()
    quiet.silence()
    what_if.put_in(process.settings.what_if)
    phases = Phases(process)
    process.full = FullGpus(process, phases)
    process.fillers = [ReadStates(process), PastOptimizers(process), IdleModels(process, phases)]
    process.checks = [
        phases,
        process.full,
        *process.fillers,
        Layers(process),
        *checks.all_checks(process),
    ]
    for check in process.checks:
        shield.install(check)


def _ask_the_hub_once(undo: ExitStack) -> None:
    undo.callback(hub.ask_once())


def _called(process: Process, also: Callable[[Any], None], module: Any, _: Any) -> None:
    process.ran_a_module = True
    also(module)


def _catch_ends(process: Process) -> None:
    """Uncaught errors, normal ends, os._exit and the ends of multiprocessing children all leave a record."""
    from trimtab.rehearse.errors import only_aborted, stopped_as_asked

    real_exit = os._exit
    real_hook = sys.excepthook

    def exit_now(status: int) -> NoReturn:
        process.finish("os._exit", status)
        real_exit(status)

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        from trimtab.rehearse import agreement

        stopped = stopped_as_asked(error, process)
        if stopped or only_aborted(error, process):
            # To end as asked is no failure: a launcher above must not take it for one.
            process.finish("max-steps" if stopped else "done")
            sys.stdout.flush()
            sys.stderr.flush()
            process.hard_exit(0)
        process.failed(error)
        if not agreement.said_shortly(error, process):
            (tracebacks.print_error if real_hook is sys.__excepthook__ else real_hook)(kind, error, traceback)

    def end() -> None:
        process.finish("done")

    stands = stands_file(process.folder, os.getpid()).open("w")
    faulthandler.register(signal.SIGUSR2, file=stands, all_threads=False)
    os._exit = exit_now
    sys.excepthook = hook
    tracebacks.leave_out_our_frames()
    atexit.register(end)

    real_bootstrap = multiprocessing.process.BaseProcess._bootstrap  # type: ignore[attr-defined]

    @functools.wraps(real_bootstrap)
    def bootstrap(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.run = guarded(process, self.run)
        return real_bootstrap(self, *args, **kwargs)

    multiprocessing.process.BaseProcess._bootstrap = bootstrap  # type: ignore[attr-defined]


def guarded(process: Process, run: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose error and end are recorded."""
    from trimtab.rehearse.errors import stopped_as_asked

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except BaseException as error:
            if stopped_as_asked(error, process):
                return None
            if isinstance(error, Exception):
                process.failed(error)
            raise

    return call


def _catch_spawned(process: Process) -> None:
    """torch.multiprocessing.spawn keeps its ranks' errors to itself: look at them on the way."""
    # The function of the same name hides the module.
    spawn = importlib.import_module("torch.multiprocessing.spawn")
    real_wrap = spawn._wrap

    @functools.wraps(real_wrap)
    def wrap(fn: Callable[..., Any], *rest: Any) -> Any:
        return real_wrap(guarded(process, fn), *rest)

    spawn._wrap = wrap  # type: ignore[attr-defined]
