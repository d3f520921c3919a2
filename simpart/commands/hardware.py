"""`simpart hardware`: the devices and clusters that simpart knows, and this machine."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simpart.commands._console import print_document
from simpart.errors import UnknownNameError, UserError
from simpart.hardware import (
    Cluster,
    Device,
    Host,
    device_to_dict,
    list_clusters,
    list_devices,
    load_cluster,
    load_device,
)
from simpart.hardware.quantity import format_quantity

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["hardware"]

_as_json = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")


@click.group()
def hardware() -> None:
    """Devices and clusters: list them, look at one, check a file, detect this machine.

    \b
    Example: simpart hardware show dgx-a100:2
    """


@hardware.command("list")
@_as_json
def list_command(as_json: bool) -> None:
    """What simpart knows; this machine is `local`.

    \b
    Example: simpart hardware list
    """
    devices = [load_device(name) for name in list_devices()]
    clusters = [load_cluster(name) for name in list_clusters()]
    if as_json:
        print_document({"devices": [*map(device_to_dict, devices)], "clusters": [item.to_dict() for item in clusters]})
        return
    table = _table("device", "kind", "memory", "bandwidth", "float32", "bfloat16", "launch")
    for device in devices:
        table.add_row(
            device.name,
            device.kind,
            _rounded(device.memory_bytes, "B"),
            _rounded(device.memory_bytes_per_s, "B/s"),
            _rounded(device.peak("float32"), "FLOP/s"),
            _rounded(device.peak("bfloat16"), "FLOP/s"),
            _rounded(device.kernel_launch_s, "s"),
        )
    _show(table)
    table = _table("cluster", "devices", "links, innermost first")
    for cluster in clusters:
        links = ", ".join(f"{level.name} {_rounded(level.bytes_per_s, 'B/s')}" for level in cluster.levels)
        table.add_row(cluster.name, _devices(cluster), links)
    _show(table)
    click.echo("NAME:N is N times the nodes of a cluster, as in dgx-a100:48. Bandwidths are per device and direction.")


@hardware.command()
@click.argument("name")
@_as_json
def show(name: str, as_json: bool) -> None:
    """Every number of a device, cluster or YAML file, and where it is from.

    \b
    Example: simpart hardware show a100
    """
    _print(_either(name), as_json)


@hardware.command()
@click.argument("file", type=click.Path())
@_as_json
def check(file: str, as_json: bool) -> None:
    """Check a device or cluster file; names the first fault with its key and rule.

    \b
    Example: simpart hardware check my-cluster.yaml
    """
    from simpart.hardware.files import read_hardware

    found = read_hardware(file)
    kind = "device" if isinstance(found, Device) else "cluster"
    if as_json:
        print_document({"file": file, "valid": True, "kind": kind, "name": found.name})
    else:
        click.echo(f"{file}: a valid {kind}, {found.name}")


@hardware.command()
@_as_json
def detect(as_json: bool) -> None:
    """This machine as a cluster, one device per core; rates are estimates.

    \b
    Example: simpart hardware detect --json
    """
    _print(load_cluster("local"), as_json)


def _either(name: str) -> Device | Cluster:
    """A file's content, or what has this name among clusters and devices."""
    if name.endswith((".yaml", ".yml")):
        from simpart.hardware.files import read_hardware

        return read_hardware(name)
    try:
        return load_device(name)
    except UserError:
        pass
    try:
        return load_cluster(name)
    except UnknownNameError:
        raise UnknownNameError("device or cluster", name, [*list_devices(), *list_clusters()]) from None


def _print(found: Device | Cluster, as_json: bool) -> None:
    if isinstance(found, Device):
        if as_json:
            rows = _validated_rows(found.name)
            document = {"device": device_to_dict(found), "validated": {"kernels": rows}, "assumed": _assumed(found)}
            print_document({**document, "host": _host(found)})
        else:
            _show(_device_table(found))
        return
    module = importlib.import_module("simpart.costmodels.learned_comm._validated")
    learned = any(device.kind == "gpu" for device in found.kinds)
    validated = {level.name: module.validated_rows(found, level) if learned else 0 for level in found.levels}
    if as_json:
        kernels = {device.name: _validated_rows(device.name) for device in found.kinds}
        print_document(
            {"cluster": found.to_dict(), "size": found.size, "validated": {"kernels": kernels, "links": validated}}
        )
        return
    click.echo(f"{found.name}: {_devices(found)}")
    table = _table("link", "joins", "type", "bandwidth", "latency", "shared by", "link model", "source")
    for level in found.levels:
        where = f"{level.name} (in a host)" if level.inside_host else level.name
        sources = "; ".join(f"{key}: {text}" for key, text in level.sources)
        rate, latency = _rounded(level.bytes_per_s, "B/s"), _rounded(level.latency_s, "s")
        count = validated[level.name]
        model = f"validated on {count} rows" if count else "never validated"
        table.add_row(where, str(level.size), level.kind, rate, latency, str(level.shared_by), model, sources)
    _show(table)
    if found.host is not None:
        _show(_host_table(found.host))
    for device in found.kinds:
        _show(_device_table(device))


def _host_table(host: Host) -> Table:
    table, sources = _table("host", "value", "source"), dict(host.sources)
    rows = [
        ("eager launch", host.eager_launch_s, "eager_launch"),
        ("compiled launch", host.compiled_launch_s, "compiled_launch"),
        ("per step", host.step_overhead_s, "step_overhead"),
    ]
    for name, value, key in rows:
        if value is not None:
            table.add_row(name, _rounded(value, "s"), sources.get(key, ""))
    return table


def _device_table(device: Device) -> Table:
    table = _table(device.name, "value", "source")
    sources = dict(device.sources)
    rows: list[tuple[str, float | None, str, str]] = [
        ("memory", device.memory_bytes, "B", "memory"),
        ("reserved of it", device.reserved_bytes, "B", "reserved"),
        ("memory bandwidth", device.memory_bytes_per_s, "B/s", "memory_bandwidth"),
        *((f"peak {dtype}", rate, "FLOP/s", "peak") for dtype, rate in device.peak_flops_per_s),
        ("vector float32", device.vector_flops_per_s, "FLOP/s", "vector"),
        ("kernel launch", device.kernel_launch_s, "s", "kernel_launch"),
        ("smallest kernel", device.launch_floor_s, "s", "launch_floor"),
        ("clock", device.clock_hz, "Hz", "clock"),
        ("L2 cache", device.l2_bytes, "B", "l2"),
        ("power", device.power_w, "W", "power"),
        ("price", device.price_usd_per_h, "USD/h", "price"),
    ]
    for name, value, unit, key in rows:
        if value is not None:
            table.add_row(name, _rounded(value, unit), sources.get(key, ""))
    if device.multiprocessors is not None:
        table.add_row("multiprocessors", str(device.multiprocessors), sources.get("multiprocessors", ""))
    trained = _validated_rows(device.name)
    words = ", ".join(f"{count} of {family}" for family, count in trained.items())
    table.add_row(
        "kernel models", f"validated on {sum(trained.values())} rows" if trained else "never validated", words
    )
    if device.kind == "gpu":
        module = importlib.import_module("simpart.costmodels.learned._overheads")
        table.add_row("host launches", "of other hosts", module.host_words(module.shipped_overheads()))
    if assumed := _assumed(device):
        table.add_row("", "", assumed)
    return table


def _assumed(device: Device) -> str:
    """What learned models take for numbers that the file of a device leaves out."""
    if device.kind != "gpu":
        return ""
    words: str = importlib.import_module("simpart.costmodels.learned._sheet").assumptions(device)
    return words


def _host(device: Device) -> dict[str, object] | None:
    """What launching is taken to cost on a host of such a device."""
    if device.kind != "gpu":
        return None
    found: Any = importlib.import_module("simpart.costmodels.learned._overheads").shipped_overheads()
    return dataclasses.asdict(found)


def _validated_rows(device: str) -> dict[str, int]:
    """Rows of each family of kernels that the shipped models learned from on this device."""
    from simpart.files import read_document

    path = Path(__file__).parent.parent / "costmodels" / "artifacts" / "trained_on.json"
    if not path.exists():
        return {}
    found: dict[str, int] = read_document(path, "simpart-trained-on", 1)["rows"].get(device, {})
    return found


def _devices(cluster: Cluster) -> str:
    """Kinds with their numbers, in words: `8 A100-SXM-80GB + 8 V100-SXM2-32GB`."""
    totals = dict.fromkeys(cluster.kinds, 0)
    for device, count in cluster.devices:
        totals[device] += count
    return " + ".join(f"{count} {device.name}" for device, count in totals.items())


def _rounded(value: float, unit: str) -> str:
    return format_quantity(value, unit, digits=4)


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)


def _show(table: Table) -> None:
    from rich.console import Console

    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160, highlight=False, markup=False).print(table)
