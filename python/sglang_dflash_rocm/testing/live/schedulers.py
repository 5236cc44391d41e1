"""SGLang's real schedulers, one per rank, stepped by hand: no launcher, no HTTP, one turn of the event loop at a time.

Functions here run inside the processes of :class:`~sglang_dflash_rocm.testing.ranks.Ranks`. ``open_scheduler`` builds
the process's :class:`Scheduler` with target, draft worker, pools and process groups as a server would; ``turn`` is the
body of ``Scheduler.event_loop_normal``. All ranks must take the same number of turns.
"""

from __future__ import annotations

from array import array
from typing import Any

from ..server import ServerConfig

#: The scheduler of this process.
SCHEDULER: Any = None


def open_scheduler(rank: int, config: ServerConfig, ports: list[int]) -> dict[str, int]:
    """Build this rank's scheduler. ``ports``: one for the server, one for torch, one per DP rank."""
    global SCHEDULER
    server_args, port_args = _publish(rank, config, ports)
    from sglang.srt.managers.scheduler import Scheduler, configure_scheduler_process

    configure_scheduler_process(server_args, rank)
    SCHEDULER = Scheduler(server_args, port_args)
    return placement()


def open_groups(rank: int, config: ServerConfig, ports: list[int]) -> dict[str, int]:
    """Build this rank's process groups as a scheduler would, without a model."""
    _, port_args = _publish(rank, config, ports)
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel

    address = f"tcp://127.0.0.1:{port_args.nccl_port}"
    init_distributed_environment(config.tp, rank, address, local_rank=rank, backend="gloo")
    initialize_model_parallel()
    return placement()


def placement() -> dict[str, int]:
    """Where this rank is."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return {name: getattr(parallel, name) for name in ("tp_rank", "attn_dp_rank", "attn_tp_rank", "attn_tp_size")}


def draft_worker() -> Any:
    """The scheduler's ``DFlashWorkerV2``."""
    return SCHEDULER.draft_worker


def _publish(rank: int, config: ServerConfig, ports: list[int]) -> tuple[Any, Any]:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.layers.dp_attention import compute_dp_attention_world_info
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, prepare_server_args

    port, torch_port, *worker_ports = ports
    arguments = [*config.arguments(port), "--random-seed", "1", "--disable-overlap-schedule", "--log-level", "warning"]
    server_args = prepare_server_args(arguments)
    server_args.resolve_once()
    server_args.check_server_args()
    dp_rank = compute_dp_attention_world_info(rank, config.tp, config.dp, 1)[2] if config.dp > 1 else None
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=dp_rank, gpu_id=rank))
    port_args = PortArgs.init_new(server_args, dp_rank, worker_ports if config.dp > 1 else None)
    port_args.nccl_port = torch_port
    port_args.instance_id = f"dflash{torch_port}"
    return server_args, port_args


def submit(rid: str, prompt: list[int], new_tokens: int) -> None:
    """Give this rank a request; every rank of its attention TP group must get the same."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    params.normalize(None)
    params.verify(1 << 20)
    SCHEDULER.process_input_requests(
        [
            TokenizedGenerateReqInput(
                rid=rid,
                input_text=None,
                input_ids=array("q", prompt),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=params,
                return_logprob=False,
                logprob_start_len=-1,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=False,
            )
        ]
    )


def turn() -> Any:
    """One turn of ``Scheduler.event_loop_normal`` (scheduler.py:2026); the batch that ran, or ``None``."""
    s = SCHEDULER
    s.ingest_requests()
    plan = s.get_next_batch_to_run(running_batch=s.running_batch, last_batch=s.last_batch)
    s.running_batch = plan.running_batch
    batch = plan.batch_to_run
    if batch:
        s.process_batch_result(batch, s.run_batch(batch))
    else:
        s.on_idle()
    s.last_batch = batch
    return batch
