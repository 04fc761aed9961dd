"""pytest on GPUs that are not there: `pytest --virtual-gpus 2`, and `@pytest.mark.virtual_gpus(2, memory="24GiB")`.

With the option, the GPUs stand before any test module is imported, so that `skipif(not torch.cuda.is_available())`
sees them. The mark gives one test its own machine. Without either nothing happens, and torch is not imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_INSTALLED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("virtual GPUs (trimtab)")
    group.addoption(
        "--virtual-gpus",
        type=int,
        default=0,
        metavar="N",
        help="run the tests on N virtual GPUs that enforce CUDA's placement rules on a machine without any",
    )
    group.addoption(
        "--virtual-gpu-memory",
        default="80GiB",
        metavar="SIZE",
        help="memory of each virtual GPU (default 80GiB)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before the first conftest is imported: it may ask for devices."""
    _install(early_config)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "virtual_gpus(count=2, memory='80GiB', name=..., capability=...): run this test on its own virtual GPUs",
    )
    _install(config)  # a plugin registered late (-p) has missed the hook above


def pytest_unconfigure(config: pytest.Config) -> None:
    if config.stash.get(_INSTALLED, False):
        from trimtab.virtual.context import uninstall

        uninstall()
        config.stash[_INSTALLED] = False


def _install(config: pytest.Config) -> None:
    count = getattr(config.known_args_namespace, "virtual_gpus", 0)
    if not count or config.stash.get(_INSTALLED, False):
        return
    if count < 0:
        raise pytest.UsageError(f"--virtual-gpus {count}: a machine has at least one GPU")
    from trimtab.virtual.context import install

    install(count, memory=config.known_args_namespace.virtual_gpu_memory)
    config.stash[_INSTALLED] = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A marked test, with its fixtures, runs on a machine of its own."""
    mark = item.get_closest_marker("virtual_gpus")
    if mark is None:
        return (yield)
    from trimtab.virtual.context import virtual_gpus

    with virtual_gpus(*mark.args, **mark.kwargs):
        return (yield)
