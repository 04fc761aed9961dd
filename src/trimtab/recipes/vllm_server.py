"""Asks a vLLM server, before training, whether it is there and runs as TRL needs it. Never starts or changes one."""

from __future__ import annotations

from typing import Any

SECONDS = 5.0
"""How long an answer may take."""
FLAGS = (
    'VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config \'{"backend": "nccl"}\' '
    "--logprobs-mode processed_logprobs --max-logprobs -1"
)
LOGPROBS = "processed_logprobs"


def server_fault(address: str) -> str | None:
    """What is wrong with the server, and what to change; None where it can generate for a run."""
    # The library by which TRL asks, so that proxies and ~/.netrc count here as they will there.
    import requests

    address = address.rstrip("/")
    told = f"grpo.vllm_server_base_url={address}"
    try:
        health = requests.get(f"{address}/health", timeout=SECONDS)
        if health.status_code != 200:
            return f"{told} answers {health.status_code} at /health; start a server there: {FLAGS}"
        info = requests.get(f"{address}/server_info", params={"config_format": "json"}, timeout=SECONDS)
    except requests.RequestException as error:
        why = f"no server answered within {SECONDS:g} s ({type(error).__name__})"
        return f"{told}: {why}; start one there ({FLAGS}), or correct the address"
    if info.status_code != 200:
        why = "without which TRL cannot give it the trained weights"
        return f"{told} has no development routes, {why}; start it as: {FLAGS}"
    mode = _logprobs_mode(info)
    if mode is None:
        why = f"so it cannot be told whether it is {LOGPROBS}, which TRL needs"
        return f"{told} does not tell its --logprobs-mode at /server_info, {why}; start it as: {FLAGS}"
    if mode != LOGPROBS:
        why = "so TRL's correction for the difference between vLLM and the model would be biased"
        return f"{told} runs with --logprobs-mode {mode}, {why}; start it as: {FLAGS}"
    return None


def _logprobs_mode(info: Any) -> str | None:
    """As the server tells its settings; None where it tells them in another form."""
    try:
        return str(info.json()["vllm_config"]["model_config"]["logprobs_mode"])
    except (ValueError, KeyError, TypeError):
        return None
