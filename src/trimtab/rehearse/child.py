"""Runs the user's script as `python` would, inside a rehearsal: `python -m trimtab.rehearse.child script.py ARGS…`.

The script sees its own argv, sys.path[0] and working directory. Whatever ends it (its end, an error, sys.exit, the
steps asked for) is recorded; the exit status is the one the script would have had.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import traceback
import types
from pathlib import Path

from trimtab.rehearse import agreement, command, instead, process
from trimtab.rehearse.errors import only_aborted, stopped_as_asked
from trimtab.start_up import roomy


@roomy
def main(arguments: list[str]) -> int:
    """Run `SCRIPT ARGS…`, `-m MODULE ARGS…` or `--command WORDS…` (a shell script); answers with the exit status."""
    here = process.prepare(first=True)
    how, status = "done", 0
    try:
        if arguments[0] == "--command":
            how, status = "exit", command.run(arguments[1:], here)
        elif arguments[0] == "-m":
            _run_module(arguments[1:])
        else:
            _run_script(arguments)
    except SystemExit as error:
        here.failed(error)
        how, status = "exit", error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        how, status = "interrupt", 130
    except BaseException as error:
        if stopped_as_asked(error, here):
            how = "max-steps"
        else:
            if not agreement.said_shortly(error, here):
                _print(error)
            if not only_aborted(error, here):
                here.failed(error)
                how, status = "error", 1
    here.finish(how, status)
    return status


def _run_script(arguments: list[str]) -> None:
    path = arguments[0]
    # As python does: the script's own folder first, not this package's caller.
    sys.path[0] = str(Path(path).resolve().parent)
    sys.argv = list(arguments)
    # Without dont_inherit this module's own `from __future__` would hold for the script.
    code = compile(instead.source_of(path), path, "exec", dont_inherit=True)
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=os.path.abspath(path), __cached__=None, __loader__=None)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _run_module(arguments: list[str]) -> None:
    sys.path[0] = os.getcwd()
    sys.argv = list(arguments)
    if arguments[0] == "trimtab":
        # Our own probe asks a CPU build for no GPUs before torch is there; the virtual ones come with torch.
        importlib.import_module("torch")
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def _print(error: BaseException) -> None:
    """The traceback as python prints it, without the frames of the rehearsal."""
    trace = error.__traceback__
    while trace is not None and not _is_outside(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def _is_outside(file: str) -> bool:
    return file != __file__ and file != "<frozen runpy>" and os.path.basename(file) != "runpy.py"


if __name__ == "__main__":
    # Imported under its real name, so that there is one copy of the module's state.
    from trimtab.rehearse import child

    _status = child.main(sys.argv[1:])
    sys.stdout.flush()
    sys.exit(_status)
