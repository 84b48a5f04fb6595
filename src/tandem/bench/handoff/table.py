"""The hand-off report as tables and a plot for a person."""

from __future__ import annotations

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from tandem.bench.handoff.plan import BOUNDS
from tandem.bench.handoff.report import FirstToken, HandoffReport, PeakMemory, Throughput, TokenGaps
from tandem.bench.report import Series
from tandem.bench.table import detail_table, machine_notes, verdict

LABELS = {
    "socket_ratio": "throughput: KV plane / plain socket",
    "socket_ratio_tls": "throughput: KV plane / plain socket, both over TLS 1.3",
    "peer_protocol_ratio": "throughput: exo's protocol / plain socket",
    "ttft_over_bound": "first token / max(prefill, transfer)",
    "itl_ratio": "gap between tokens, receiving / not receiving",
    "peak_over_kv": "decode node's peak memory / KV bytes",
    "link_ttft_over_bound": "over a cable: first token / max(prefill, transfer)",
}
FORMULA = (
    "first token: bound = max(prefill, transfer); transfer = KV bytes / link rate; "
    "overlap = (prefill + transfer - first token) / (prefill + transfer - bound)"
)
SENDERS = {
    "plane": "KV plane",
    "socket": "plain socket",
    "peer": "exo's protocol",
    "plane_tls": "KV plane, TLS",
    "socket_tls": "plain socket, TLS",
}
BAR_CELLS = 48


def show(report: HandoffReport, console: Console) -> None:
    """Print the figures with their bounds, what they come from, a plot, and where they were measured."""
    parts: list[Table | Text] = [_headline(report)]
    if report.throughput is not None:
        parts.append(_throughput(report.throughput))
    if report.ttft is not None:
        parts += [_links(report.ttft, ""), bars(report.ttft)]
    if report.itl is not None:
        parts.append(_gaps(report.itl, report.plan.itl_rate, report.plan.itl_streams))
    if report.memory is not None:
        parts.append(_memory(report.memory))
    if report.link is not None:
        cable = f", over a cable of {report.plan.link_megabits:g} Mbit/s: computed, replayed"
        parts.append(_links(report.link, cable))
    console.print(Group(*parts))
    if report.ttft is not None or report.link is not None:
        console.print(FORMULA, highlight=False)
    for line in machine_notes(report.environment):
        console.print(line, highlight=False)


def _headline(report: HandoffReport) -> Table:
    plan = report.plan
    table = Table(title=f"tandem bench handoff: {plan.model}, {plan.rounds} rounds", title_justify="left")
    table.add_column("figure")
    table.add_column("median", justify="right")
    table.add_column("lowest to highest", justify="right")
    table.add_column("bound", justify="right")
    table.add_column("")
    for name, values in report.series.items():
        bound = BOUNDS.get(name)
        spread = f"{values.low:.3f} to {values.high:.3f}"
        table.add_row(LABELS[name], f"{values.median:.3f}", spread, str(bound or ""), verdict(bound, values.median))
    return table


def _throughput(result: Throughput) -> Table:
    table = detail_table(f"{result.payload_bytes / 1e6:.0f} MB over loopback", "median (lowest to highest)", "MB/s")
    for name, values in result.bytes_per_second.items():
        table.add_row(SENDERS[name], _value(values, 1e-6, 0))
    return table


def _links(result: FirstToken, where: str) -> Table:
    table = detail_table(
        f"First token, {result.payload_bytes / 1e6:.0f} MB of KV (medians){where}",
        "transfer / prefill",
        "link MB/s",
        "prefill s",
        "transfer s",
        "first token s",
        "/ bound",
        "overlap",
        "link used",
    )
    for link in result.links:
        table.add_row(
            f"{link.relative:.3g}",
            f"{link.link_bytes_per_second.median / 1e6:.1f}",
            f"{link.prefill.median:.3f}",
            f"{link.transfer.median:.3f}",
            f"{link.ttft.median:.3f}",
            f"{link.ttft_over_bound.median:.3f}",
            f"{link.overlap_efficiency.median:.0%}",
            f"{link.link_efficiency.median:.0%}",
        )
    return table


def bars(result: FirstToken) -> Text:
    """Seconds to the first token for each link: `█` up to the bound, `▒` what comes on top."""
    longest = max(link.ttft.median for link in result.links)
    text = Text("\nfirst token by link (█ max(prefill, transfer), ▒ on top of it)\n")
    for link in result.links:
        bound = max(link.prefill.median, link.transfer.median)
        solid = round(min(bound, link.ttft.median) / longest * BAR_CELLS)
        whole = round(link.ttft.median / longest * BAR_CELLS)
        label = f"{link.link_bytes_per_second.median / 1e6:9.1f} MB/s "
        text.append(f"{label}{'█' * solid}{'▒' * (whole - solid)} {link.ttft.median:.2f} s\n")
    return text


def _gaps(result: TokenGaps, rate: float, streams: int) -> Table:
    title = f"{streams} running answers while {result.payload_bytes / 1e6:.0f} MB arrive at {rate / 1e6:.0f} MB/s"
    table = detail_table(title, "ms between tokens, median (lowest to highest)", "receiving", "otherwise")
    table.add_row("mean", _value(result.mean_receiving, 1e3), _value(result.mean_otherwise, 1e3))
    table.add_row("95th percentile", _value(result.p95_receiving, 1e3), _value(result.p95_otherwise, 1e3))
    table.add_row("longest", _value(result.longest_receiving, 1e3), "")
    table.add_row("mean while the new answer joins", _value(result.mean_joining, 1e3), "")
    table.add_row("seconds of receiving", _value(result.receiving_seconds, 1, 2), "")
    table.add_row("MB/s from request to commit", _value(result.receiving_rate, 1e-6), "")
    return table


def _memory(result: PeakMemory) -> Table:
    title = f"Decode process, {result.kv_bytes / 1e6:.0f} MB of KV ({result.method})"
    table = detail_table(title, "median (lowest to highest)", "")
    table.add_row("MB before", _value(result.baseline_bytes, 1e-6, 0))
    table.add_row("MB at the peak, until the commit", _value(result.peak_bytes, 1e-6, 0))
    table.add_row("MB of these that MLX keeps for reuse", _value(result.allocator_cache_bytes, 1e-6, 0))
    table.add_row("peak / KV bytes, until the first token", _value(result.first_token_over_kv, 1, 3))
    return table


def _value(series: Series, factor: float, digits: int = 1) -> str:
    low, median, high = (f"{one * factor:.{digits}f}" for one in (series.low, series.median, series.high))
    return f"{median} ({low} to {high})"
