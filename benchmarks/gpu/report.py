"""The result file, what follows from its parts together, and the table at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["derive", "print_report", "write"]


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Replace *path* at once: a run that is killed leaves the parts before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def derive(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Figures that need several parts of a shape: decode over its floor, prefill over the GEMM rate, ours over the
    peer's, HTTP over offline. What a failed or missing part would give is left out."""
    good = {name: part for name, part in parts.items() if "failed" not in part}
    floors, found = good.get("floors"), {}
    if floors and "decode" in good:
        traced = {(row["batch"], row["mode"]): row for row in good.get("timeline", {}).get("rows", ())}
        found["decode"] = [
            {**_over_floor(row, floors), **_device_share(row, traced.get((row["batch"], row["mode"])))}
            for row in good["decode"]["rows"]
        ]
    if floors and "prefill" in good:
        rate = floors["gemm_flops_per_s"]
        found["prefill"] = [{**row, "of_gemm": row["flops_per_s"] / rate} for row in good["prefill"]["rows"]]
    found.update(_against_peer(good))
    found.update(_against_offline(good))
    return found


def _over_floor(row: Mapping[str, Any], floors: Mapping[str, Any]) -> dict[str, Any]:
    """The linear graph at this batch, and the time to read the contexts at copy bandwidth."""
    found = {key: row[key] for key in ("batch", "mode", "step_s", "tokens_per_s")}
    kv = row["kv_read_bytes"] / floors["copy_bytes_per_s"]
    linear = floors["linear_graph_s"].get(str(row["batch"]))
    if linear is not None:
        found["floor_s"] = linear + kv
        found["over_floor"] = row["step_s"] / (linear + kv)
    found["over_copy"] = row["step_s"] / (floors["read_s_at_copy"] + kv)
    return found


def _device_share(row: Mapping[str, Any], traced: Mapping[str, Any] | None) -> dict[str, Any]:
    """The device's work as the profiler saw it, over a step without a profiler, whose gaps are shorter."""
    if traced is None or "busy_us_per_step" not in traced:
        return {}
    return {
        "idle_share": max(0.0, 1 - traced["busy_us_per_step"] / 1e6 / row["step_s"]),
        "idle_share_profiled": traced["idle_share"],
        "kernels_per_step": traced["kernels_per_step"],
    }


def _against_peer(good: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    static, continuous = (good.get(name, {}) for name in ("static", "continuous"))
    ours = _rate(good, 1)
    if ours and "tokens_per_s" in static:
        found["static_peer"] = {"ours": ours, "peer": static["tokens_per_s"], "ratio": ours / static["tokens_per_s"]}
    if "tokens_per_s" not in continuous:
        return found
    requests, rate = continuous["requests"], continuous["decode_tokens_per_s"]
    whole = _load(good, requests)
    if whole:
        found["continuous_peer"] = {
            "ours": whole, "peer": continuous["tokens_per_s"], "ratio": whole / continuous["tokens_per_s"]
        }  # fmt: skip
    if rate and (ours := _rate(good, requests)):
        found["continuous_peer_decode"] = {"ours": ours, "peer": rate, "ratio": ours / rate}
    return found


def _against_offline(good: Mapping[str, Any]) -> dict[str, Any]:
    if "http" not in good:
        return {}
    level = good["http"]["throughput"]
    found = {"http": {"tokens_per_s": level["tokens_per_s"], "decode_tokens_per_s": level["decode_tokens_per_s"]}}
    facts = found["http"]
    facts["ttft_ms_p50"] = good["http"]["first_token"]["ttft_ms_p50"]
    if whole := _load(good, level["streams"]):
        facts["offline_tokens_per_s"] = whole
        facts["of_offline"] = level["tokens_per_s"] / whole
    if (decode := _rate(good, level["streams"])) and level["decode_tokens_per_s"]:
        facts["offline_decode_tokens_per_s"] = decode
        facts["decode_of_offline"] = level["decode_tokens_per_s"] / decode
    return found


def _rate(good: Mapping[str, Any], batch: int) -> float | None:
    rows = good.get("decode", {}).get("rows", ())
    return next((row["tokens_per_s"] for row in rows if (row["batch"], row["mode"]) == (batch, "greedy")), None)


def _load(good: Mapping[str, Any], streams: int) -> float | None:
    rows = good.get("load", {}).get("rows", ())
    return next((row["tokens_per_s"] for row in rows if row["streams"] == streams), None)


def print_report(result: Mapping[str, Any]) -> None:
    """A short table for each shape, then what failed."""
    console = Console(width=130)
    if verdict := result.get("check", {}).get("verdict"):
        console.print(f"parity: {verdict}")
    for shape, parts in result["shapes"].items():
        for title, rows in _tables(parts):
            drawn = Table(title=f"{shape}: {title}")
            for column in rows[0]:
                drawn.add_column(column, justify="right")
            for row in rows:
                drawn.add_row(*row.values())
            console.print(drawn)
    for name, part in {"check": result.get("check", {}), **_by_name(result)}.items():
        if "failed" in part:
            console.print(f"{name} failed: {part['failed']}", markup=False)


def _by_name(result: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{shape}, {name}": part for shape, parts in result["shapes"].items() for name, part in parts.items()
        if name != "summary"
    }  # fmt: skip


def _tables(parts: Mapping[str, Any]) -> list[tuple[str, list[dict[str, str]]]]:
    summary, found = parts.get("summary", {}), []
    if rows := summary.get("decode") or _plain_decode(parts):
        found.append(("decode", [_decode_cells(row) for row in rows]))
    single = {name: text for name, text in _single_figures(parts, summary).items() if text}
    if single:
        found.append(("other figures", [{"figure": name, "value": text} for name, text in single.items()]))
    return found


def _plain_decode(parts: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(parts.get("decode", {}).get("rows", ()))


def _decode_cells(row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "batch": str(row["batch"]),
        "mode": row["mode"],
        "step ms": f"{1e3 * row['step_s']:.3f}",
        "tokens/s": f"{row['tokens_per_s']:.0f}",
        "floor ms": f"{1e3 * row['floor_s']:.3f}" if "floor_s" in row else "–",
        "over floor": f"{row['over_floor']:.2f}" if "over_floor" in row else "–",
        "over copy": f"{row['over_copy']:.2f}" if "over_copy" in row else "–",
        "idle": f"{100 * row['idle_share']:.1f} %" if "idle_share" in row else "–",
        "kernels": f"{row['kernels_per_step']:.0f}" if "kernels_per_step" in row else "–",
    }


def _single_figures(parts: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, str]:
    floors, host, startup = (_good(parts, name) for name in ("floors", "host", "startup"))
    found: dict[str, str] = {}
    if floors:
        found["copy"] = f"{floors['copy_bytes_per_s'] / 1e12:.3f} TB/s"
        found["gemm"] = f"{floors['gemm_flops_per_s'] / 1e12:.1f} TFLOP/s"
    for row in summary.get("prefill", ()):
        found[f"prefill {row['tokens']}"] = (
            f"{1e3 * row['seconds']:.2f} ms, {100 * row['of_gemm']:.0f} % of gemm, {row['steps']} step(s)"
        )
    if host:
        slowest = ", ".join(f"{name} {spent:.0f}" for name, spent in list(host["parts_us"].items())[:6])
        found[f"host at {host['batch']}"] = (
            f"{host['host_us']:.0f} µs a step + {host['wait_us']:.0f} waiting: {slowest}"
        )
    for row in (_good(parts, "timeline") or {"rows": ()})["rows"]:
        slowest = ", ".join(f"{top['name'][:40]} {top['us_per_step']:.0f}" for top in row.get("top", ())[:4])
        found[f"kernels at {row['batch']}, {row['mode']}"] = f"µs a step: {slowest}"
    for name in ("static_peer", "continuous_peer", "continuous_peer_decode"):
        if row := summary.get(name):
            found[name.replace("_", " ")] = f"{row['ours']:.0f} / {row['peer']:.0f} tokens/s = {row['ratio']:.2f}"
    if row := summary.get("http"):
        share = f" = {100 * row['of_offline']:.0f} % of offline" if "of_offline" in row else ""
        found["http"] = f"{row['tokens_per_s']:.0f} tokens/s{share}; first token p50 {row['ttft_ms_p50']:.0f} ms"
        if "decode_of_offline" in row:
            found["http decode"] = (
                f"{row['decode_tokens_per_s']:.0f} tokens/s = {100 * row['decode_of_offline']:.0f} % of offline"
            )
    for which in ("first", "second"):
        if startup and which in startup:
            parts_s = ", ".join(f"{name} {spent:.1f}" for name, spent in startup[which]["reached_s"].items())
            found[f"{which} start"] = f"ready after {startup[which]['ready_s']:.1f} s ({parts_s})"
    return found


def _good(parts: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    part = parts.get(name)
    return part if part and "failed" not in part else None
