"""The estimate of a step, by what it launches."""

from __future__ import annotations

from trimtab.gpu_models import MODELS
from trimtab.launches import Launch
from trimtab.recipes.roofline import Load, on_gpu, seconds, step_seconds

H200 = next(model for model in MODELS if model.key == "H200")
SMALL = Launch(0, 1024, "", "eager")
WIDE = Launch(0, 2**30, "", "eager")
ENTRY = Launch(0, 0, "", "entry")


def test_the_slower_of_host_and_gpu_is_what_a_pass_takes() -> None:
    assert seconds(H200, {SMALL: 1000}) > 1000 * on_gpu(H200, SMALL)
    assert seconds(H200, {WIDE: 1000}) == 1000 * on_gpu(H200, WIDE)


def test_the_way_into_compiled_code_is_the_hosts_alone() -> None:
    """Where the GPU has enough to do it costs nothing; where the GPU waits, small graphs are what a step takes."""
    assert on_gpu(H200, ENTRY) == 0.0
    few, many = ({SMALL._replace(by="compiled"): 100.0, ENTRY: entries} for entries in (1.0, 50.0))
    assert seconds(H200, many) > 2 * seconds(H200, few)
    assert seconds(H200, {WIDE: 1000, ENTRY: 50}) == seconds(H200, {WIDE: 1000})


def test_fused_kernels_read_faster_than_eager_ones() -> None:
    assert on_gpu(H200, WIDE._replace(by="compiled")) < on_gpu(H200, WIDE)


def test_a_step_has_its_passes_and_what_comes_once() -> None:
    load = Load(a_pass={WIDE: 10}, a_step={SMALL: 10}, passes=3)
    each, once = seconds(H200, load.a_pass), seconds(H200, load.a_step)
    assert abs(step_seconds(H200, 1, "single", load) - 3 * each - once) < 1e-12
