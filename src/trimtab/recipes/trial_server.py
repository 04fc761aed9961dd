"""The process in which models are looked at and trials made: it imports once what these need, and forks for each.

`python -m trimtab.recipes.trial_server FD`: requests and answers go over the connection that is handed to it. A fork
starts from libraries in which nothing was used yet, changes what it likes, and ends. No GPU is ever opened.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection, Pipe, wait
from typing import TYPE_CHECKING, NamedTuple

from trimtab.recipes import spared_imports
from trimtab.start_up import roomy

if TYPE_CHECKING:
    from trimtab.config.schema import Config
    from trimtab.errors import TrimtabError
    from trimtab.recipes.planning import Known
    from trimtab.recipes.trial_step import Executed, Trial


class Look(NamedTuple):
    """Asks what a plan needs to know of the model that a config names."""

    config: Config
    compiles: bool
    """Whether its layers may be compiled: what that needs is imported meanwhile."""


class Seen(NamedTuple):
    """What is known of a model, or why it cannot be looked at; neither where that is better met by whoever asked."""

    known: Known | None = None
    refused: TrimtabError | None = None


class Answer(NamedTuple):
    """What became of a trial: what it took, or why it could not be made."""

    executed: Executed | None
    failed: str = ""
    trace: str = ""
    since: str = ""
    """When it was executed, where that is kept from another day."""


def serve(asked: Connection) -> None:
    """Answer until nobody is there to ask; what still runs then is ended."""
    running: dict[Connection, tuple[int, int]] = {}
    while True:
        for ready in wait([asked, *running]):
            assert isinstance(ready, Connection)
            if ready is not asked:
                number, child = running.pop(ready)
                asked.send((number, _answer(ready, child)))
                continue
            try:
                number, request = asked.recv()
            except EOFError:
                for _, child in running.values():
                    os.kill(child, signal.SIGKILL)
                return
            looks = isinstance(request, Look)
            if not looks and request.plan.speed.compile:
                _imported(import_what_compiling_needs)
            told, tells = Pipe(duplex=False)
            child = os.fork()
            if not child:
                _in_the_fork(request, tells)
            tells.close()
            running[told] = number, child
            if looks and request.compiles:
                _imported(import_what_compiling_needs)  # while the fork looks


def _answer(told: Connection, child: int) -> Answer | Seen:
    try:
        answer: Answer | Seen | None = told.recv()
    except EOFError:
        answer = None
    told.close()
    _, status = os.waitpid(child, 0)
    if answer is not None:
        return answer
    ended = os.waitstatus_to_exitcode(status)
    by = f"was killed by {signal.Signals(-ended).name}" if ended < 0 else f"ended with status {ended}"
    return Answer(None, f"its process {by}")


def _in_the_fork(request: Look | Trial, tells: Connection) -> None:
    """Answer one request and end, whatever happens."""
    status = 1
    try:
        tells.send(_seen(request.config) if isinstance(request, Look) else _made(request))
        status = 0
    finally:
        os._exit(status)


def _seen(config: Config) -> Seen:
    from trimtab import hub
    from trimtab.errors import TrimtabError
    from trimtab.recipes.planning import know_model

    hub.ask_once()
    try:
        return Seen(know_model(config))
    except TrimtabError as error:
        return Seen(refused=error)
    except Exception:
        return Seen()


def _made(trial: Trial) -> Answer:
    from trimtab.recipes.fullest_rows import NotExecuted
    from trimtab.recipes.trial_step import execute

    try:
        return Answer(execute(trial))
    except NotExecuted as error:
        return Answer(None, str(error))
    except Exception as error:
        said = (str(error).strip().splitlines() or [""])[0]
        return Answer(None, f"{type(error).__name__}: {said}", traceback.format_exc())


@spared_imports.methods_later()
@spared_imports.places_only()
def import_what_steps_need() -> None:
    """All that takes long to import, once for every fork."""
    import torch
    import torch.distributed.tensor
    import torch.testing._internal.distributed.fake_pg

    spared_imports.import_accelerate()
    spared_imports.import_transformers()
    import peft

    from trimtab.fast import head, lora, mlp, rows, siblings
    from trimtab.recipes import run, sft_trainer, trainer_driver
    from trimtab.rehearse import loading
    from trimtab.virtual import context

    del peft, torch, run, sft_trainer, trainer_driver, loading, context
    del head, lora, mlp, rows, siblings


@cache
@spared_imports.methods_later()
@spared_imports.places_only()
def import_what_compiling_needs() -> None:
    """What plans a compiled layer (virtual/compiled.py), once for every fork."""
    import networkx
    import torch._functorch.partitioners
    import torch._inductor.decomposition

    from trimtab.virtual import joint_graph

    spared_imports.import_inductor()
    joint_graph.make_patterns()
    del networkx, torch


def _imported(libraries: Callable[[], None]) -> None:
    """There is no garbage in what is imported, and looking for it takes a tenth of the time: here and in every fork."""
    gc.disable()
    libraries()
    gc.freeze()
    gc.enable()


@roomy
def main(connection: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asks ends it
    _imported(import_what_steps_need)
    asked = Connection(connection)
    if not asked.poll():
        # Nobody has asked yet; on a GPU most runs are compiled.
        _imported(import_what_compiling_needs)
    serve(asked)


if __name__ == "__main__":
    # Imported under its real name, by which answers are unpickled.
    from trimtab.recipes import trial_server

    trial_server.main(int(sys.argv[1]))
