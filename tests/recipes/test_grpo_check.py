"""The report before training: each check by itself, on plans that are made by hand."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig

from trimtab.config import config_warnings, load_config
from trimtab.config.defaults import with_recipe_defaults
from trimtab.errors import RequestError
from trimtab.placement import MemoryShare, PlacementPlan
from trimtab.recipes.grpo import grpo_arguments
from trimtab.recipes.grpo_check import Preflight, preflight
from trimtab.recipes.run_folder import RunFolder

PLAN = PlacementPlan(device="cpu", precision="fp32", scaler=False, weight_precision="fp32", strategy="single")


def report(model: Path, *settings: str, plan: PlacementPlan = PLAN) -> Preflight:
    words = ["recipe=grpo", f"model={model}", "data=sums", "data.max_rows=8", "data.max_length=128"]
    more = ["reward=answer", "num_generations=4", "max_completion_length=8", *settings]
    return preflight(load_config(None, [*words, *more]), plan)


def told(made: Preflight, name: str) -> str:
    """The failed check of a name."""
    (check,) = [c for c in made.failed if c.name == name]
    return check.detail


def test_all_clear(tiny_model: Path) -> None:
    made = report(tiny_model)
    assert not made.failed
    assert made.lines()[0] == "before training: all clear"
    assert "answer 1, 0" in "\n".join(made.lines())
    made.stop_on_failure()


@pytest.mark.parametrize(
    ("batch", "steps", "processes", "fits"),
    [(4, 1, 1, True), (2, 2, 1, True), (2, 1, 2, True), (1, 2, 2, True), (2, 1, 1, False), (3, 1, 2, False)],
)
def test_batch_times_accumulation_times_processes_is_divided_by_generations(
    tiny_model: Path, batch: int, steps: int, processes: int, fits: bool
) -> None:
    plan = dataclasses.replace(PLAN, processes=processes)
    words = [f"training.batch_size={batch}", f"training.gradient_accumulation_steps={steps}"]
    made = report(tiny_model, *words, plan=plan)
    assert bool(made.failed) is not fits
    if not fits:
        assert "grpo.num_generations 4 does not divide" in told(made, "batch")


def test_more_prompts_a_step_than_there_are(tiny_model: Path) -> None:
    assert "not one step would be made" in told(report(tiny_model, "training.batch_size=64"), "batch")


def test_an_evaluation_batch_that_does_not_divide(tiny_model: Path) -> None:
    made = report(tiny_model, "data.eval_fraction=0.25", "training.eval_batch_size=3")
    assert "set training.eval_batch_size to a multiple of 4" in told(made, "batch")


def test_lengths_over_the_context(tiny_model: Path) -> None:
    made = report(tiny_model, "max_completion_length=500", "data.max_length=600")
    assert "the model's context is 512" in told(made, "lengths")


def test_memory_that_a_device_lacks(tiny_model: Path) -> None:
    share = MemoryShare(weights=2**31, activations=2**30, capacity=2**30, executed=True)
    plan = dataclasses.replace(PLAN, device="cuda:0", memory={"cuda:1": share})
    assert "cuda:1: 3.00 GiB of 1.0 GiB (executed)" in told(report(tiny_model, plan=plan), "memory")
    # An estimate refuses nothing here: the plan would have, where nothing can be executed.
    guess = dataclasses.replace(share, executed=False)
    checks = report(tiny_model, plan=dataclasses.replace(plan, memory={"cuda:1": guess})).checks
    (check,) = [check for check in checks if check.name == "memory"]
    assert check.ok is None
    assert "about 3.00 GiB of 1.0 GiB (estimate)" in check.detail


def test_columns_that_rewards_lack_and_data_that_cannot_be_read(tiny_model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"question": f"q {n}"}) for n in range(4)))
    made = report(tiny_model, f"data={rows}", "reward=[answer, code]")
    details = [check.detail for check in made.failed]
    assert any("answer reads answer; the rows have question" in text for text in details)
    assert any("code reads tests" in text for text in details)
    with pytest.raises(RequestError, match="cannot begin as configured"):
        made.stop_on_failure()
    made = report(tiny_model, f"data={tmp_path / 'nothing.jsonl'}", "use_vllm=true")
    assert "nothing of that name" in told(made, "data")
    assert "vLLM generates on CUDA" in told(made, "vllm")


def test_rows_that_a_reward_could_not_judge_are_counted_before_training(
    tiny_model: Path, tmp_path: Path
) -> None:
    rows, held = tmp_path / "rows.jsonl", tmp_path / "held.jsonl"
    sums = [{"question": f"{n} + 1?", "answer": None if n == 3 else str(n + 1)} for n in range(6)]
    rows.write_text("\n".join(map(json.dumps, sums)))
    assert "answer reads answer, in which 1 of 6 prompts to train on" in told(
        report(tiny_model, f"data={rows}"), "rewards"
    )
    held.write_text(json.dumps({"question": "9 + 1?", "gold": "10"}))
    made = report(tiny_model, f"data.eval_source={held}", "training.eval_batch_size=4")
    assert "1 of 1 held-out prompts have nothing" in told(made, "rewards")


def test_vllm_that_is_not_installed(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.recipes.grpo_check.find_spec", lambda name: None)
    plan = dataclasses.replace(PLAN, device="cuda:0")
    made = report(tiny_model, "use_vllm=true", plan=plan)
    assert "pip install 'trimtab[vllm]'" in told(made, "vllm")
    with pytest.raises(RequestError, match="vllm: not installed"):
        made.stop_on_failure()


@pytest.mark.parametrize(
    ("settings", "strategy", "told_of"),
    [
        ([], "single", None),
        ([], "split", "set grpo.vllm_mode=server"),
        (["loss_type=vespo"], "single", "set another grpo.loss_type"),
    ],
)
def test_what_vllm_needs(
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: list[str],
    strategy: Any,
    told_of: str | None,
) -> None:
    """As if it were installed: whether it can generate beside such a plan."""
    monkeypatch.setattr("trimtab.recipes.grpo_check.find_spec", lambda name: object())
    memory = {"cuda:0": MemoryShare(weights=5 * 2**30, reserved=3 * 2**30, capacity=10 * 2**30)}
    plan = dataclasses.replace(PLAN, device="cuda:0", strategy=strategy, memory=memory)
    made = report(tiny_model, "use_vllm=true", *settings, plan=plan)
    if told_of is None:
        assert not made.failed
        assert "3.00 GiB of it for vLLM (grpo.vllm_memory)" in "\n".join(made.lines())
    else:
        assert told_of in told(made, "vllm")


Serve = Callable[[dict[str, tuple[int, Any]]], str]
SOUND = {
    "/health": (200, {}),
    "/server_info": (200, {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}}),
}


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """A server on this machine that answers by route; the routes that it was not given are not found."""
    monkeypatch.setattr("trimtab.recipes.grpo_check.find_spec", lambda name: object())
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    servers: list[ThreadingHTTPServer] = []

    def start(routes: dict[str, tuple[int, Any]]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, content = routes.get(self.path.partition("?")[0], (404, {}))
                if "login" in routes and self.headers.get("Authorization") is None:
                    status = 401
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(content).encode())

            def log_message(self, *_: Any) -> None:
                return None

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def on_a_server(model: Path, address: str) -> Preflight:
    plan = dataclasses.replace(PLAN, device="cuda:0")
    return report(model, "use_vllm=true", "vllm_mode=server", f"vllm_server_base_url={address}", plan=plan)


def test_a_vllm_server_that_runs_as_trl_needs_it(tiny_model: Path, serve: Serve) -> None:
    address = serve(SOUND)
    for written in (address, f"{address}/"):
        made = on_a_server(tiny_model, written)
        assert not made.failed
        assert f"generates on {written}, which answers" in "\n".join(made.lines())


def test_a_login_for_a_vllm_server_comes_from_netrc(
    tiny_model: Path, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = serve({**SOUND, "login": (200, {})})
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert "answers 401 at /health" in told(on_a_server(tiny_model, address), "vllm")
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password hunter2\n")
    (tmp_path / "netrc").chmod(0o600)
    made = on_a_server(tiny_model, address)
    assert not made.failed
    assert "hunter2" not in "\n".join(made.lines())


@pytest.mark.parametrize(
    ("routes", "told_of"),
    [
        ({}, "answers 404 at /health"),
        ({**SOUND, "/health": (503, {})}, "answers 503 at /health"),
        ({"/health": (200, {})}, "no development routes"),
        (
            {
                **SOUND,
                "/server_info": (200, {"vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs"}}}),
            },
            "runs with --logprobs-mode raw_logprobs",
        ),
        ({**SOUND, "/server_info": (200, ["other"])}, "does not tell its --logprobs-mode"),
    ],
)
def test_a_vllm_server_that_does_not(
    tiny_model: Path, serve: Serve, routes: dict[str, tuple[int, Any]], told_of: str
) -> None:
    made = on_a_server(tiny_model, serve(routes))
    assert told_of in told(made, "vllm")
    assert "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL" in told(made, "vllm")
    assert "--logprobs-mode processed_logprobs" in told(made, "vllm")
    with pytest.raises(RequestError, match="cannot begin as configured"):
        made.stop_on_failure()


def test_no_vllm_server_at_all(tiny_model: Path, serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    made = on_a_server(tiny_model, f"http://127.0.0.1:{port}")
    assert "no server answered within" in told(made, "vllm")
    assert f"grpo.vllm_server_base_url=http://127.0.0.1:{port}" in told(made, "vllm")


def test_a_vllm_server_that_never_answers(
    tiny_model: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trimtab.recipes.vllm_server.SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        made = on_a_server(tiny_model, f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert "no server answered within 0.2 s (ReadTimeout)" in told(made, "vllm")


def test_the_address_of_a_vllm_server_is_checked_as_a_setting() -> None:
    server = ["recipe=grpo", "reward=answer", "use_vllm=true", "vllm_mode=server"]
    for wrong in ("localhost:8001", "http://", "http://host/a?b=c", "ftp://host"):
        with pytest.raises(RequestError, match="not the address of a server"):
            load_config(None, [*server, f"vllm_server_base_url={wrong}"])
    for name, value in (("vllm_server_port", "8001"), ("vllm_server_host", "gpu-2")):
        with pytest.raises(RequestError, match=r"grpo\.vllm_server_base_url: http://HOST:PORT"):
            load_config(None, [*server, f"{name}={value}"])
    (warning,) = config_warnings(load_config(None, [*server[:2], "vllm_server_base_url=http://gpu-2:8000"]))
    assert "no vLLM server generates" in warning


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_settings_of_vllm_are_trls(tiny_model: Path, tmp_path: Path, mode: str) -> None:
    """What reaches TRL; the settings of the model's own generation are no settings of vLLM's."""
    words = ["recipe=grpo", f"model={tiny_model}", "reward=answer", f"output_dir={tmp_path / 'run'}"]
    words += ["max_completion_length=40", "data.max_length=100"]

    def arguments(*more: str) -> GRPOConfig:
        config, _ = with_recipe_defaults(load_config(None, [*words, *more]))
        return grpo_arguments(config, PLAN, RunFolder(tmp_path / "run"), evaluates=False, weights=[1.0])

    made = arguments("use_vllm=true", f"vllm_mode={mode}", "grpo.vllm_memory=0.4")
    assert (made.use_vllm, made.vllm_mode, made.vllm_gpu_memory_utilization) == (True, mode, 0.4)
    assert made.vllm_max_model_length == 100
    # vLLM refuses more than the model's context, also where no prompt is so long.
    assert (
        arguments("use_vllm=true", f"vllm_mode={mode}", "data.max_length=2000").vllm_max_model_length == 512
    )
    assert made.vllm_server_base_url == ("http://localhost:8000" if mode == "server" else None)
    there = arguments("use_vllm=true", f"vllm_mode={mode}", "vllm_server_base_url=http://gpu-2:8001/")
    assert there.vllm_server_base_url == ("http://gpu-2:8001" if mode == "server" else None)
    assert not made.generation_kwargs
    plain = arguments()
    assert not plain.use_vllm
    assert plain.generation_kwargs == {"use_cache": True}
