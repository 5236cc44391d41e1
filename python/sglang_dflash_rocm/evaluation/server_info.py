"""What SGLang's `/server_info` says of a server: flags that matter, and what of it is not real."""

from __future__ import annotations

from collections.abc import Mapping

Fact = str | int | float | bool | None

#: Fields that change an answer, its acceptance or its speed.
_FACTS = (
    "version",
    "model_path",
    "served_model_name",
    "tokenizer_path",
    "revision",
    "dtype",
    "quantization",
    "load_format",
    "device",
    "tp_size",
    "dp_size",
    "attn_dp_size",
    "ep_size",
    "enable_dp_attention",
    "enable_dp_lm_head",
    "attention_backend",
    "kv_cache_dtype",
    "page_size",
    "context_length",
    "chunked_prefill_size",
    "max_running_requests",
    "mem_fraction_static",
    "swa_full_tokens_ratio",
    "disable_radix_cache",
    "enable_two_batch_overlap",
    "reasoning_parser",
    "chat_template",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_num_draft_tokens",
    "speculative_draft_attention_backend",
    "disaggregation_mode",
    "disaggregation_transfer_backend",
    "decode_log_interval",
)
#: Environment variables that make a server's answers or acceptance something else than the model's, by what they do.
SIMULATING = {
    "SGLANG_SIMULATE_ACC_LEN": "simulated acceptance",
    "SGLANG_SIMULATE_UNIFORM_EXPERTS": "experts picked evenly in place of the router's",
    "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS": "experts picked in turn in place of the router's",
}
_OFF = ("", "0", "false", "no", "off", "n", "f")


class ServerRefused(Exception):
    """Not a server that this tool measures; the message says why and what to do."""


def flags(info: Mapping) -> dict[str, Fact]:
    """The flags of `_FACTS` that the server tells."""
    return {name: value for name in _FACTS if isinstance(value := info.get(name), str | int | float)}


def dp_ranks(info: Mapping) -> int:
    """Number of DP ranks: each gives one state. `dp_size` is 1 under DP attention (`attn_dp_size` holds it then)."""
    return len(info["internal_states"])


def environment(info: Mapping) -> dict[str, str] | None:
    """SGLang variables of the ranks, which a server tells if it was started with `SGLANG_EXPOSE_OWN_ENV_VARS=1`; else
    None."""
    told = [state["env_vars"] for state in info.get("internal_states") or [] if "env_vars" in state]
    return {name: value for rank in told for name, value in rank.items()} if told else None


def simulations(info: Mapping) -> dict[str, str]:
    """Those variables of SIMULATING that are on, as far as the server tells its environment."""
    variables = environment(info) or {}
    return {name: variables[name] for name in SIMULATING if _is_on(variables.get(name))}


def dummy_weights(info: Mapping) -> tuple[str, ...]:
    """The flags by which weights are random numbers."""
    states = [info, *(info.get("internal_states") or [])]
    fields = ("load_format", "speculative_draft_load_format")
    dummy = [field for field in fields if any(state.get(field) == "dummy" for state in states)]
    return tuple(f"--{field.replace('_', '-')} dummy" for field in dummy)


def is_fake_prefill(info: Mapping) -> bool:
    """A decode server whose KV cache holds no prompt."""
    return (info.get("disaggregation_mode"), info.get("disaggregation_transfer_backend")) == ("decode", "fake")


def _is_on(value: str | None) -> bool:
    """-1 is how SGLang says that SGLANG_SIMULATE_ACC_LEN is off."""
    return value is not None and value.lower() not in _OFF and not value.startswith("-")
