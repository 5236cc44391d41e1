"""Batch lines as SGLang 0.5.23 formats them, every variant of its source, and the figures made of them."""

from __future__ import annotations

import dataclasses
from datetime import datetime, timedelta

import pytest

from sglang_dflash_rocm.evaluation import analysis, server_logs
from sglang_dflash_rocm.evaluation.server_logs import LogError

PREFILL = (
    "Prefill batch, #new-seq: 2, #new-token: 512, #cached-token: 64, {usage}, #running-req: 3, #queue-req: 5, "
    "#pending-token: 7, {more}cuda graph: False, input throughput (token/s): 1024.00{end}"
)
DECODE = (
    "Decode batch, #running-req: 4, {usage}, {spec}{more}cuda graph: True, gen throughput (token/s): 200.50, "
    "#queue-req: 6{end}"
)
PD = "pre-allocated usage: 0.10, #prealloc-req: 1, #transfer-req: 2, {host}#retracted-req: 0, "
USAGE = {
    "one pool": ("token usage: 0.25", "#token: 100, token usage: 0.25", (0.25, None)),
    "hybrid SWA": (
        "full token usage: 0.25, swa token usage: 0.50",
        "#full token: 100, full token usage: 0.25, #swa token: 50, swa token usage: 0.50",
        (0.25, 0.5),
    ),
    "hybrid SSM": (
        "full token usage: 0.25, mamba usage: 0.10",
        "#full token: 100, full token usage: 0.25, mamba num: 3, mamba usage: 0.10",
        (0.25, None),
    ),
    "hisparse": (
        "token usage: 0.25",
        "#gpu token: 10, gpu token usage: 0.10, #cpu token: 1, cpu token usage: 0.01",
        (None, None),
    ),
}


def line(text: str, prefix: str = "", time: str = "2026-12-02 10:00:00") -> str:
    return f"[{time}{prefix}] {text}\n"


def prefill(usage="token usage: 0.25", more="", end="") -> str:
    return PREFILL.format(usage=usage, more=more, end=end)


def decode(usage="#token: 100, token usage: 0.25", spec="", more="", end="") -> str:
    return DECODE.format(usage=usage, spec=spec, more=more, end=end)


@pytest.fixture
def read(tmp_path):
    def reader(*lines: str) -> server_logs.Log:
        file = tmp_path / "server.log"
        file.write_text("".join(lines))
        return server_logs.read([file])

    return reader


@pytest.mark.parametrize("kind", USAGE)
def test_every_form_of_pool_usage(read, kind):
    in_prefill, in_decode, (full, swa) = USAGE[kind]
    log = read(line(prefill(usage=in_prefill)), line(decode(usage=in_decode)))
    assert (log.batches[1].full_usage, log.batches[1].swa_usage) == (full, swa)
    if kind != "hisparse":
        assert (log.batches[0].full_usage, log.batches[0].swa_usage) == (full, swa)
    assert log.unread == 0


@pytest.mark.parametrize(
    "text",
    [
        prefill(),
        prefill(more="#replay-token: 9, "),
        prefill(more="#bootstrap-req: 1, #inflight-req: 2, #optimistic-req: 0, "),
        prefill(more="waiting-image-req: 3, "),
        prefill(end=", est. prefill TFLOPS/s (per GPU): 12.30"),
        prefill(end=", fwd occupancy: 90.00%, fwd+idle occupancy: 95.00%"),
        prefill().replace("Prefill batch,", "Prefill batch [123],"),
        prefill().replace("cuda graph", "cpu graph"),
    ],
)
def test_every_form_of_prefill_line(read, text):
    (batch,) = read(line(text)).batches
    assert (batch.kind, batch.new_tokens, batch.cached_tokens, batch.running, batch.queue) == ("prefill", 512, 64, 3, 5)
    assert batch.throughput == 1024 and batch.graph is False
    assert batch.replay_tokens == (9 if "replay" in text else 0)


@pytest.mark.parametrize(
    "text",
    [
        decode(),
        decode(spec="accept len: 3.50, accept rate: 0.36, "),
        decode(spec="accept len: 3.50, accept rate: 0.36, cap len: 4.00, block accept len: 3.00, "),
        decode(more=PD.format(host="")),
        decode(more=PD.format(host="#host-receive-req: 4, ")),
        decode(more="waiting-image-req: 3, "),
        decode(
            end=", est. decode TFLOPS/s (per GPU): 1.00, est. read BW (GB/s per GPU): 2.00, "
            "est. write BW (GB/s per GPU): 3.00, fwd occupancy: 90.00%, fwd+idle occupancy: 95.00%"
        ),
        decode().replace("Decode batch,", "Decode batch [77],"),
    ],
)
def test_every_form_of_decode_line(read, text):
    (batch,) = read(line(text)).batches
    assert (batch.kind, batch.running, batch.queue, batch.throughput, batch.graph) == ("decode", 4, 6, 200.5, True)
    assert (batch.accept_length, batch.accept_rate) == ((3.5, 0.36) if "accept" in text else (None, None))


@pytest.mark.parametrize(
    "prefix, rank",
    [
        ("", 0),
        (" TP0", 0),
        (" DP1", 1),
        (" DP1 TP4", 1),
        (" DP1 PP0 ATTN_CP0 MOE_DP0 TP4 EP4", 1),
        (" DP12 TP3 EP0", 12),
    ],
)
def test_every_rank_prefix(read, prefix, rank):
    assert [batch.dp_rank for batch in read(line(decode(), prefix)).batches] == [rank]


def test_milliseconds_colours_and_container_prefixes(read):
    log = read("pod-1 | \x1b[32m" + line(decode(), " DP0", "2026-12-02 10:00:00.250"))
    assert log.batches[0].time == datetime(2026, 12, 2, 10, 0, 0, 250_000)
    assert log.milliseconds and analysis.log_figures(log).time_resolution_s == 0.001


def test_a_batch_that_peers_of_one_dp_rank_logged_counts_once(read):
    log = read(
        *(line(prefill(), f" DP{dp} PP{pp} TP{tp}") for dp in (0, 1) for pp in (0, 1) for tp in (4 * dp, 4 * dp + 1))
    )
    assert [batch.dp_rank for batch in log.batches] == [0, 1]
    assert log.peers == 6
    assert sum(rank.new_tokens for rank in analysis.log_figures(log).ranks) == 2 * 512


def test_cut_and_mixed_lines_are_counted_not_guessed(read):
    whole = line(decode())
    mixed = whole.rstrip("\n") + line(decode(), " DP1")
    log = read(whole, mixed, line(decode())[:90] + "\n", line(decode().replace("#queue-req: 6", "#queue-req: many")))
    assert len(log.batches) == 1 and log.unread == 4
    assert "4 batch lines are cut" in " ".join(analysis.analyse("x", log).notes)


def test_a_log_without_batches_is_an_error_that_says_what_to_look_at(read, tmp_path):
    with pytest.raises(LogError, match=r"no prefill or decode lines in .*server.log.*--decode-log-interval"):
        read(line("The server is fired up and ready to roll!"))
    with pytest.raises(LogError, match="No such file"):
        server_logs.read([tmp_path / "missing.log"])


def test_one_file_of_several_may_be_empty_and_is_named_and_none_may_come_twice(tmp_path):
    busy, empty = tmp_path / "node0.log", tmp_path / "node1.log"
    busy.write_text(line(decode()))
    empty.write_text(line("nothing"))
    log = server_logs.read([busy, empty])
    assert log.without == [str(empty)] and "node1.log" in " ".join(analysis.analyse("x", log).notes)
    with pytest.raises(LogError, match="given twice"):
        server_logs.read([busy, tmp_path / "." / "node0.log"])


def test_what_is_not_real_is_read_from_the_server_arguments(read):
    arguments = "server_args={'load_format': 'auto', 'speculative_draft_load_format': 'dummy', "
    real = arguments + "'disaggregation_mode': 'null', 'disaggregation_transfer_backend': 'mooncake'}"
    assert read(line(real), line(decode())).simulated == ()
    fake = real.replace("'mooncake'", "'fake'").replace("'auto'", "'dummy'")
    assert read(line(fake), line(fake), line(decode())).simulated == ("fake prefill", "dummy weights")


START = datetime(2026, 12, 2, 10)


def batch(kind, seconds, throughput, **changes) -> server_logs.Batch:
    base = server_logs.Batch(kind, START + timedelta(seconds=seconds), 0, running=1, queue=0, throughput=throughput)
    return dataclasses.replace(base, **changes)


def test_idle_gaps_count_in_the_rate_and_not_in_the_busy_one():
    """100 tokens/s for 4 s, then 96 s without a line and 1 token/s on the line that ends them."""
    lines = [batch("decode", t, 100.0) for t in (0, 2, 4)] + [batch("decode", 100, 1.0)]
    rate = analysis.decode_rate(lines)
    assert rate.window_s == 100 and rate.tokens == 400 + 96
    assert rate.per_s == pytest.approx(4.96) and rate.busy == pytest.approx(100)


def test_lines_of_one_second_share_it():
    lines = [batch("decode", 0, 5.0), batch("decode", 1, 100.0), batch("decode", 1, 300.0)]
    assert analysis.decode_rate(lines).per_s == 200
    assert analysis.decode_rate(lines[1:]) is None, "no time passed between these"


def test_prefill_intervals_come_from_tokens_and_throughput_not_from_whole_seconds():
    lines = [batch("prefill", 0, 10.0, new_tokens=9)] + [batch("prefill", 0, 1000.0, new_tokens=250)] * 2
    rate = analysis.prefill_rate(lines)
    assert (rate.per_s, rate.window_s, rate.tokens) == (1000, 0.5, 500)
    replayed = [lines[0], batch("prefill", 1, 1000.0, new_tokens=250, replay_tokens=250)]
    assert analysis.prefill_rate(replayed).window_s == 0.5


def test_totals_are_over_the_time_of_all_ranks(read):
    """Rank 0 decodes from 0 to 10 s, rank 1 from 10 to 20: together half of what each did while it ran."""
    rows = [line(decode(), " DP0", f"2026-12-02 10:00:{t:02}") for t in (0, 5, 10)]
    rows += [line(decode(), " DP1", f"2026-12-02 10:00:{t:02}") for t in (10, 15, 20)]
    figures = analysis.log_figures(read(*rows))
    assert [rank.decode.per_s for rank in figures.ranks] == [200.5, 200.5]
    assert figures.decode_per_s == pytest.approx(200.5)


def test_accept_length_weighs_by_requests_and_the_worst_rank_shows(read):
    def spec(length, running, rank):
        return line(
            decode(spec=f"accept len: {length:.2f}, accept rate: 0.30, ").replace(
                "#running-req: 4", f"#running-req: {running}"
            ),
            f" DP{rank}",
        )

    figures = analysis.log_figures(read(spec(5.0, 9, 0), spec(1.0, 1, 0), spec(2.0, 0, 1)))
    assert [rank.accept_length for rank in figures.ranks] == [4.6, 2.0]
    assert figures.accept_length_mean == pytest.approx(3.3) and figures.accept_length_min == 2.0
    assert figures.accept_length_all == pytest.approx((45 + 1 + 2) / 11)


def test_acceptance_per_position_comes_from_finished_requests_and_is_never_made_up(read):
    bare = read(line(decode(spec="accept len: 3.00, accept rate: 0.30, ")))
    assert analysis.log_figures(bare).positions == ()
    assert any("not recorded" in note for note in analysis.analyse("x", bare).notes)
    plain = "Finish: obj=GenerateReqInput(), out={'meta_info': {'spec_correct_drafts_histogram': [1, 1, 2], 'e2e': 1}}"
    json_line = '{"event": "request.finished", "out": {"meta_info": {"spec_correct_drafts_histogram": [0, 4]}}}'
    log = read(line(decode()), line(plain), json_line + "\n")
    assert log.histograms == [(1, 1, 2), (0, 4)]
    assert analysis.log_figures(log).positions == (7 / 8, 2 / 8)
