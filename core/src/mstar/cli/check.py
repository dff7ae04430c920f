"""``mstar check KEY|FILE``: every fault of a deployment at once, without weights or a device."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mstar.cli.commands import Commands, Context, Parser
from mstar.cli.options import with_json, with_layout
from mstar.cli.output import bytes_in_words, fault, note, print_json, table
from mstar.plugin_code import quiet
from mstar.spec.errors import SetupError, counted
from mstar.spec.placement import ranks_of

if TYPE_CHECKING:
    from mstar.runtime.checked import Checked

__all__ = ["register"]


def register(commands: Commands) -> None:
    """Add the command."""
    text = "Check a model and its deployment, without weights or a device."
    commands.add("check", _run, help=text, arguments=_arguments)


def _arguments(parser: Parser) -> None:
    parser.add_argument("target", nargs="?", metavar="KEY|FILE", help="a model, or a deployment file that names one")
    parser.add_argument("--config", type=Path, metavar="FILE", help="deployment file (YAML) to check KEY with")
    with_layout(parser)
    parser.add_argument(
        "--weights", metavar="DIR|HUB_ID[@REVISION]", help="where the model's configuration is; nothing is fetched"
    )
    with_json(parser)


def _run(arguments: argparse.Namespace, context: Context) -> int:
    from mstar.runtime.checking import check_model, find_target, model_of_file  # imports torch

    if arguments.target is not None:
        spec, file = find_target(arguments.target, context.registry)
    elif arguments.config is not None:
        spec, file = model_of_file(arguments.config, context.registry), None
    else:
        raise SetupError("mstar check: which model? Name its key, or a deployment file that does")
    if file is not None and arguments.config is not None:
        raise SetupError("mstar check: give a deployment file once, as FILE or with --config")
    with quiet():
        checked = check_model(
            spec,
            context.settings,
            context.registry,
            config=file or arguments.config,
            layout=arguments.layout,
            weights=arguments.weights,
        )
    if arguments.json:
        print_json(_facts(checked))
    else:
        _print(checked)
    return 1 if checked.faults else 0


def _facts(checked: Checked) -> dict[str, Any]:
    deployment = checked.deployment
    return {
        "key": checked.spec.key,
        "ok": not checked.faults,
        "complete": checked.complete,
        "faults": [asdict(found) for found in checked.faults],
        "remarks": checked.remarks,
        "weights_folder": None if checked.weights is None else str(checked.weights),
        "device": None if checked.device is None else str(checked.device),
        "dtype": None if checked.dtype is None else str(checked.dtype).removeprefix("torch."),
        "between_ranks": _between_ranks(checked),
        "max_concurrent_requests": None if deployment is None else deployment.max_concurrent_requests,
        "nodes": [asdict(node) for node in checked.nodes],
        "pools": [asdict(pool) for pool in checked.pools],
    }


def _between_ranks(checked: Checked) -> dict[str, str] | None:
    """How large tensors pass between ranks, and why so; ``None`` with one rank."""
    deployment, device = checked.deployment, checked.device
    if deployment is None or device is None or ranks_of(deployment.placement) == 1:
        return None
    from mstar.worker.tensor_channel import way_between  # imports torch

    shared = {deployment.gpu_of(rank) for rank in range(ranks_of(deployment.placement))} == {deployment.gpu_of(0)}
    way, why = way_between(deployment.engine.values, device.type, device.type, shared)
    return {"way": way, "why": why}


def _print(checked: Checked) -> None:
    facts = _facts(checked)
    print(f"{facts['key']} on {facts['device']} in {facts['dtype']}" if checked.dtype is not None else facts["key"])
    if checked.nodes:
        rows = [(n.name, n.module, f"{n.parameters:,}", bytes_in_words(n.bytes)) for n in checked.nodes]
        print("\n" + table(("NODE", "MODULE", "PARAMETERS", "SIZE"), rows))
    if checked.pools:
        lines = [(p.name, p.kind, str(p.units), bytes_in_words(p.bytes), str(p.owners)) for p in checked.pools]
        print("\n" + table(("POOL", "KIND", "UNITS", "SIZE", "CONTEXTS"), lines))
    _print_limits(checked)
    for remark in checked.remarks:
        note(f"\n{remark}")
    if checked.faults:
        more = "" if checked.complete else "\nFurther checks follow once these are mended."
        fault(
            f"\n{counted(len(checked.faults), 'fault')}:\n" + "\n".join(f"  {found}" for found in checked.faults) + more
        )
    else:
        total = sum(node.bytes for node in checked.nodes) + sum(pool.bytes for pool in checked.pools)
        several = checked.deployment is not None and ranks_of(checked.deployment.placement) > 1
        counted_once = "; of each node and pool, one rank's share is counted" if several else ""
        print(f"\nok: weights and pools take {bytes_in_words(total)}{counted_once}")


def _print_limits(checked: Checked) -> None:
    if checked.deployment is None:
        return
    most = checked.deployment.max_concurrent_requests
    between = _between_ranks(checked)
    if between is not None:
        print(f"\nbetween ranks large tensors pass by {between['way']}: {between['why']}")
    print(f"\nup to {counted(most, 'request')} at once")
    for pool in checked.pools:
        if pool.full_requests is not None and pool.full_requests < most:
            print(f"  {pool.name} holds {pool.full_requests} of the greatest length; with longer ones, others wait")
