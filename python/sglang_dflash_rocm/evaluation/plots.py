"""PNG plots of a run. matplotlib is imported when one is drawn, with the Agg backend, so that no display is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sglang_dflash_rocm.evaluation.analysis import Analysis
from sglang_dflash_rocm.evaluation.bench_records import CellRecord
from sglang_dflash_rocm.evaluation.server_logs import Batch, Log

_SIZE, _DPI = (8, 3.6), 110


class NoPlots(RuntimeError):
    """matplotlib is not installed; the message says how to install it, or do without."""


def check() -> None:
    """Raises:
    NoPlots: no matplotlib.
    """
    try:
        import matplotlib.backends.backend_agg  # noqa: F401
    except ImportError as error:
        raise NoPlots(
            f"plots need matplotlib ({error}): pip install 'sglang-dflash-rocm[eval]', or give --no-plots"
        ) from None


def draw(folder: Path, run: Analysis, log: Log | None) -> list[Path]:
    """Write every plot that there is data for, into an existing folder."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    stamp = f" [simulated: {', '.join(run.simulated)}]" if run.simulated else ""
    written = []

    def plot(name: str, title: str, x: str, y: str, paint: Callable) -> None:
        figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
        axes = figure.add_subplot()
        if not paint(axes):
            return
        axes.set(title=title + stamp, xlabel=x, ylabel=y)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize="small")
        FigureCanvasAgg(figure).print_png(folder / f"{name}.png")
        written.append(folder / f"{name}.png")

    batches = log.batches if log else []
    for name, title, y, kind, field in _OVER_TIME:
        plot(name, title, "time since the first line (s)", y, _timeline(batches, kind, field))
    positions = run.log.positions if run.log else ()
    plot("accept_positions", "Acceptance per draft position", "position", "share of verify steps", _bars(positions))
    cells = [cell for cell in run.cells if cell.outcome == "passed" and cell.figures and cell.concurrency]
    for name, title, y, phase, value in _OVER_CONCURRENCY:
        chosen = [cell for cell in cells if phase in (None, cell.phase)]
        plot(name, title, "concurrency (requests)", y, _lines(chosen, value))
    plot("sweep", "Rate search", "rate (requests/s)", "TTFT (ms)", _sweep(run))
    return written


_OVER_TIME = (
    ("decode_throughput", "Decode throughput per DP rank", "token/s", "decode", "throughput"),
    ("prefill_throughput", "Prefill throughput per DP rank", "token/s", "prefill", "throughput"),
    ("accept_length", "Accept length per DP rank", "tokens per verify step", "decode", "accept_length"),
    ("queue", "Queue per DP rank", "requests", None, "queue"),
    ("running", "Running requests per DP rank", "requests", None, "running"),
    ("kv_full", "Full KV pool per DP rank", "share in use", None, "full_usage"),
    ("kv_swa", "SWA KV pool per DP rank", "share in use", None, "swa_usage"),
)


def _ttft(cell: CellRecord) -> float | None:
    return cell.figures.ttft_ms.p50 if cell.figures.ttft_ms else None


_OVER_CONCURRENCY = (
    ("cells_input", "Input throughput", "token/s", "prefill", lambda cell: cell.figures.input_throughput),
    ("cells_output", "Output throughput", "token/s", "decode", lambda cell: cell.figures.output_throughput),
    ("cells_ttft", "Time to first token, p50", "ms", None, _ttft),
)


def _timeline(batches: Sequence[Batch], kind: str | None, field: str) -> Callable:
    def paint(axes) -> bool:
        start = min((batch.time for batch in batches), default=None)
        chosen = [b for b in batches if kind in (None, b.kind) and getattr(b, field) is not None]
        for rank in sorted({b.dp_rank for b in chosen}):
            mine = [b for b in chosen if b.dp_rank == rank]
            seconds = [(b.time - start).total_seconds() for b in mine]
            axes.plot(seconds, [getattr(b, field) for b in mine], ".-", lw=1, ms=3, label=f"DP{rank}")
        return bool(chosen)

    return paint


def _bars(values: Sequence[float]) -> Callable:
    def paint(axes) -> bool:
        axes.bar(range(1, len(values) + 1), values)
        return bool(values)

    return paint


def _lines(cells: Sequence[CellRecord], value: Callable[[CellRecord], float | None]) -> Callable:
    def paint(axes) -> bool:
        known = [cell for cell in cells if value(cell) is not None]
        groups = sorted({(cell.phase, cell.input_len or 0, cell.output_len) for cell in known})
        for group in groups:
            mine = [cell for cell in known if (cell.phase, cell.input_len or 0, cell.output_len) == group]
            mine.sort(key=lambda cell: cell.concurrency)
            label = f"{group[0]}, {group[1] or 'own'} in, {group[2]} out"
            axes.plot([cell.concurrency for cell in mine], [value(cell) for cell in mine], "o-", label=label)
        return bool(known)

    return paint


def _sweep(run: Analysis) -> Callable:
    def paint(axes) -> bool:
        for number, sweep in enumerate(run.sweeps):
            label = f"TTFT {sweep.percentile} <= {sweep.target_ms:g} ms"
            axes.plot([p.rate for p in sweep.points], [p.ttft_ms for p in sweep.points], "o-", label=label)
            axes.axhline(sweep.target_ms, ls="--", lw=1, color=f"C{number}")
        return bool(run.sweeps)

    return paint
