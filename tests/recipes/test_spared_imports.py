"""The process that makes trials leaves out what no step needs, and finds it where somebody does."""

from __future__ import annotations

import subprocess
import sys

import pytest

LEFT_OUT = """
import sys
from trimtab.recipes import trial_server
trial_server.import_what_steps_need()
trial_server.import_what_compiling_needs()
there = {"boto3", "datasets", "pandas", "scipy"} & sys.modules.keys()
assert not there, there
"""
ALL_OF_TRANSFORMERS = """
from trimtab.recipes import spared_imports
spared_imports.import_transformers()
import transformers
from transformers.utils.import_utils import _LazyModule, define_import_structure, is_scipy_available
models = transformers.models
whole = define_import_structure(models.__file__)
anew = _LazyModule(models.__name__, models.__file__, whole, models.__spec__)
assert len(models._class_to_module) > 1000
for name in ("_modules", "_class_to_module", "_object_missing_backend"):
    assert getattr(models, name) == getattr(anew, name), name
assert set(models.__all__) == set(anew.__all__)
from transformers.loss import loss_for_object_detection as loss
assert loss.is_scipy_available is is_scipy_available and is_scipy_available()
assert [list(places) for places in loss.linear_sum_assignment([[4, 1], [2, 3]])] == [[0, 1], [1, 0]]
"""
ROWS_OF_DATASETS = """
import tempfile
from trimtab.recipes import spared_imports
spared_imports.import_accelerate()
spared_imports.import_transformers()
from transformers import Trainer, TrainingArguments, trainer, utils
assert not trainer.is_datasets_available() and utils.is_datasets_available()
import datasets, torch
assert trainer.is_datasets_available() and trainer.datasets.Dataset is datasets.Dataset
class Model(torch.nn.Module):
    def forward(self, seen):
        return seen
rows = datasets.Dataset.from_dict({"seen": [1, 2], "unseen": [3, 4]})
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(folder, use_cpu=True, report_to=[])
    loader = Trainer(Model(), arguments, train_dataset=rows).get_train_dataloader()
assert loader.dataset.column_names == ["seen"]
"""
TEMPLATES = """
from trimtab.recipes import spared_imports
spared_imports.import_inductor()
from torch._inductor.codegen.common import KernelTemplate
from torch._inductor.kernel.mm import mm_template
assert isinstance(mm_template.template, spared_imports._Template) and mm_template.template
assert "_whole" not in vars(mm_template.template)
text = KernelTemplate._template_from_string("{{ rows }} rows")
assert text.render(rows=2) == "2 rows" and not isinstance(text, spared_imports._Template)
assert spared_imports._Template(KernelTemplate._template_from_string, "{{ rows }} rows").render(rows=2) == "2 rows"
"""
PLACES = """
import copy, inspect, sys
from torch._library import utils
from trimtab.recipes import spared_imports
real = inspect.getmodule, inspect.getframeinfo
class Asks:
    def __deepcopy__(self, memo):
        frame = sys._getframe(1)
        told.append((utils.get_source(1), utils.get_source(2), inspect.getframeinfo(frame)))
        told.append([inspect.getmodule(thing) for thing in (frame, utils.get_source, utils, Asks)])
told = []
for turn in range(2):
    copy.deepcopy(Asks()) if turn == 0 else None
    with spared_imports.places_only():
        assert inspect.getmodule is not real[0] and inspect.getframeinfo is not real[1]
        copy.deepcopy(Asks()) if turn == 1 else None
    assert (inspect.getmodule, inspect.getframeinfo) == real
assert told[0] == told[2] and told[0][2].code_context, told
assert told[1] == told[3] and told[1][0] is copy, told
"""
METHODS = """
import dataclasses
from trimtab.recipes import spared_imports
def made():
    @dataclasses.dataclass(frozen=True, order=True)
    class Point:
        x: int
        y: int = 2
    @dataclasses.dataclass(unsafe_hash=True)
    class Named(Point.__base__):
        name: str
    class Below(Point):
        pass
    return Point, Named, Below
real = dataclasses._create_fn
plain = made()
with spared_imports.methods_later():
    later = made()
assert dataclasses._create_fn is real
def tried(classes):
    Point, Named, Below = classes
    one, other, below, named = Point(1), Point(1, 3), Below(1), Named("a")
    try:
        one.x = 3
    except dataclasses.FrozenInstanceError as error:
        said = [str(error)]
    try:
        del one.y
    except dataclasses.FrozenInstanceError as error:
        said.append(str(error))
    below.more = 1
    same = (one == Point(1), one == other, one != other, one == below, one < other, one >= other, hash(one), one == 1)
    shown = (repr(one), repr(below), repr(named), str(Point.__eq__.__qualname__), Point.__doc__)
    return said, same, shown, named == Named("a"), hash(named), below.more, dataclasses.replace(one, y=5).y
assert tried(plain) == tried(later) == tried(later), (tried(plain), tried(later))
for name in ("__eq__", "__hash__", "__setattr__", "__delattr__", "__lt__"):
    assert vars(later[0])[name].__code__.co_code == vars(plain[0])[name].__code__.co_code, name
"""


def ran(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_no_step_needs_is_not_imported() -> None:
    ran(LEFT_OUT)


def test_transformers_knows_the_same_names_and_finds_scipy() -> None:
    ran(ALL_OF_TRANSFORMERS)


def test_rows_of_datasets_are_known_once_there_are_any() -> None:
    ran(ROWS_OF_DATASETS)


def test_templates_of_kernels_are_read_when_they_are_used() -> None:
    ran(TEMPLATES)


def test_an_operator_is_told_from_the_same_place() -> None:
    ran(PLACES)


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="dataclasses compiles all methods at once")
def test_methods_of_dataclasses_are_compiled_when_they_are_called() -> None:
    ran(METHODS)
