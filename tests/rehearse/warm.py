"""Rehearses program after program in forks of one process that has imported torch.

Each is a whole rehearsal, with a process for each rank, records and a verdict: only the imports of torch, of our own
rooms and of the modules in the arguments are not waited for every time. Run as text (`python -c`), so that no frame of
this file is taken for the program's. Reads requests as lines of JSON, and answers with a line when a report is written.
"""

import atexit
import gc
import importlib
import importlib.util
import json
import os
import pkgutil
import sys
import tempfile
import traceback
import weakref
from pathlib import Path

import torch._dynamo  # every optimizer imports it

import trimtab.diagnose
import trimtab.rehearse.checks
from trimtab.rehearse import child, process, savings, shield
from trimtab.rehearse.observer import RehearsalObserver
from trimtab.rehearse.report import render
from trimtab.rehearse.run import Rank, rehearse
from trimtab.rehearse.session import Settings, gather
from trimtab.virtual import amp, context, deeds
from trimtab.virtual.context import install


class Forked:
    """A fork of this process that runs a program, waited for as a Popen is."""

    def __init__(self, rank: Rank) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            if rank.enter is not None:
                rank.enter()
            os.environ.clear()
            os.environ.update(rank.environment)
            process.prepare()
            context.install_from_environment()
            status = child.main(list(rank.arguments))
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def poll(self) -> int | None:
        return self._look(os.WNOHANG)

    def wait(self) -> int | None:
        return self._look(0)

    def _look(self, how: int) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode


def check(request: dict) -> None:
    """Put a single check into this fork, with virtual GPUs, run a program and write down what the check finds."""
    script, out = Path(request["words"][0]), Path(request["out"])
    folder = Path(tempfile.mkdtemp(dir=out.parent))
    Settings(**request["settings"]).save(folder)
    os.setsid()
    here = process.Process(folder)
    machine = install(2, on_fault="repair")
    machine.observer = RehearsalObserver(here)
    torch.nn.modules.module.register_module_forward_pre_hook(lambda module, _: machine.modules.add(module))
    deeds.listen()
    module, name = request["check"].split(":")
    here.checks = [getattr(importlib.import_module(module), name)(here)]
    shield.watch_over(here)
    shield.install(here.checks[0])
    code = compile(script.read_text(), str(script), "exec")
    try:
        exec(code, {"__name__": "__main__"})
    except Exception as error:
        here.failed(error)
    here.finish("done")
    found = gather(folder)
    out.write_text(
        json.dumps(
            {"findings": [f.to_dict() for f in found.findings], "steps": found.steps, "notes": found.notes}
        )
    )


def answer(request: dict) -> None:
    """Rehearse in this fork; what the program prints goes into the files beside the report."""
    out = Path(request["out"])
    os.chdir(out.parent)
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(out.with_name(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), stream)
    if "check" in request:
        check(request)
        return
    settings = Settings(**request["settings"])
    result = rehearse(
        request["words"],
        settings,
        ranks=request["ranks"],
        timeout=request["timeout"],
        start=Forked,
        keep=Path(request["keep"]) if request.get("keep") else None,
        in_place=request.get("in_place", False),
    )
    if request.get("savings"):
        again = savings.again_with(request["words"], settings, ranks=request["ranks"], start=Forked)
        changes = savings.changes_for(request["words"], settings.gpus, result)
        savings.try_savings(result, changes, again, request["timeout"])
    out.write_text(json.dumps({**result.to_dict(), "text": render(result), "exit": result.exit_code}))


def ours() -> list[str]:
    """What every rehearsal imports of ours sooner or later."""
    rooms = (trimtab.rehearse, trimtab.rehearse.checks, trimtab.diagnose)
    return [
        found.name for room in rooms for found in pkgutil.iter_modules(room.__path__, f"{room.__name__}.")
    ]


triton = ["triton.runtime.interpreter"] if importlib.util.find_spec("triton") else []
for module in (*ours(), *triton, *sys.argv[1:]):
    importlib.import_module(module)
amp.rules()
# What stood before a fork is not the fork's to take down at its end: torch's own libraries, one by one.
for finalizer in list(weakref.finalize._registry):
    finalizer.atexit = False
gc.collect()
gc.freeze()  # or the first collection in a fork would write to all of these pages
for line in sys.stdin:
    fork = os.fork()
    if fork == 0:
        try:
            answer(json.loads(line))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)
