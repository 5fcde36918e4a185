"""The command line: reads options, calls `autoplan.api`, prints what `autoplan.display` makes of the answer.

Heavy imports stand inside the commands, so that ``--help`` and ``show`` start without torch. Tables and JSON go to
stdout, progress and errors to stderr. Exit codes: 0 done, 1 a bug in autoplan or a demo that disagrees, 2 bad input,
3 nothing fits, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from autoplan.errors import AutoplanError, OptionError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from autoplan.ir.plan import Plan, PlanOptions

PIPED_WIDTH = 160
PRECISIONS = ("fp32", "bf16")  # those of autoplan.ir.plan, which tests compare
OPTIMIZERS = ("adamw", "sgd", "sgd-momentum", "none")
MODEL_HELP = """\b
MODEL is one of
  file.py:function            a callable that returns (model, example inputs)
  package.module:function     likewise
  config.json                 a Hugging Face configuration; needs --batch and --seq
"""


class Settings:
    """What the global options say."""

    debug = False


def _examples(*lines: str) -> str:
    """The end of a help text; the backspace keeps click from joining the lines."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def _size(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    """Reads a size such as 40GB or 512MiB."""
    from autoplan.ir.units import parse_bytes

    try:
        return None if text is None else parse_bytes(text)
    except OptionError as e:
        raise click.BadParameter(str(e), ctx, param) from e


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        import autoplan

        click.echo(f"autoplan {autoplan.__version__}")
        ctx.exit()


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=_examples(
        "autoplan plan config.json --batch 64 --seq 1024 --cluster a100-8x --nodes 2 -o plan.json",
        "autoplan show plan.json",
    ),
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
@click.pass_obj
def autoplan_command(settings: Settings, debug: bool) -> None:
    """Plan how a PyTorch model is trained: sharding and recomputation, chosen together, for given hardware."""
    settings.debug = debug


def _model_options(command: Any) -> Any:
    """Options of every command that loads a model."""
    options = (
        click.option("--batch", type=click.IntRange(1), help="Sequences in a global batch, for a config.json."),
        click.option("--seq", type=click.IntRange(1), help="Tokens in a sequence, for a config.json."),
        click.option("--cluster", metavar="NAME|FILE.toml", help="Hardware; see autoplan clusters. Default cpu-gloo."),
        click.option("--precision", type=click.Choice(PRECISIONS), default="fp32", show_default=True,
                     help="bf16 computes in bfloat16 and keeps fp32 parameters."),
        click.option("--optimizer", type=click.Choice(OPTIMIZERS), default="adamw", show_default=True,
                     help="Decides the bytes of optimizer state."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@autoplan_command.command(
    "plan",
    epilog=MODEL_HELP
    + "\n"
    + _examples(
        "autoplan plan train.py:build --devices 4 --memory 2GB",
        "autoplan plan config.json --batch 64 --seq 1024 --cluster a100-8x --nodes 2 -o plan.json",
    ),
)
@click.argument("model")
@_model_options
@click.option("--nodes", type=click.IntRange(1), help="Number of nodes.")
@click.option("--devices", type=click.IntRange(1), help="Number of devices; excludes --nodes.")
@click.option(
    "--memory", metavar="SIZE", callback=_size, help="Cap per device: 40GB, 512MiB. Default: the device's memory."
)
@click.option("--mesh", metavar="2x4", help="Fix the mesh, as in 2x4 or dp=2,tp=4.")
@click.option(
    "--pin",
    "pins",
    multiple=True,
    metavar="GLOB=PLACEMENT",
    help='Fix placements of parameters and inputs: "*.c_fc.weight=R,S(1)". May be repeated.',
)
@click.option("--no-remat", is_flag=True, help="Keep every activation that backward needs.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the plan to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON and nothing else.")
def plan_command(
    model: str,
    batch: int | None,
    seq: int | None,
    cluster: str | None,
    precision: str,
    optimizer: str,
    nodes: int | None,
    devices: int | None,
    memory: int | None,
    mesh: str | None,
    pins: Sequence[str],
    no_remat: bool,
    output: Path | None,
    as_json: bool,
) -> None:
    """Find the fastest plan for MODEL that fits in memory. Nothing is run and no weight is allocated."""
    from autoplan.hardware import load_cluster
    from autoplan.ir import Mesh
    from autoplan.ir.plan import PlanOptions

    options = PlanOptions(
        cluster=cluster,
        nodes=nodes,
        devices=devices,
        memory_bytes=memory,
        mesh=None if mesh is None else Mesh.parse(mesh),
        pins=_pins(pins),
        precision=precision,
        optimizer=optimizer,
        remat=not no_remat,
    )
    load_cluster(cluster or "cpu-gloo", nodes=nodes, devices=devices)  # fails here rather than after tracing
    _check_writable(output)
    made = _plan(model, batch, seq, options)
    if output is not None:
        made.save(output)
    if as_json:
        click.echo(json.dumps(made.to_json(), indent=1))
        return
    from autoplan.display import plan_tables

    _print(plan_tables(made, ops=False))
    where = f"autoplan show {output}" if output else "write the plan with -o plan.json, then autoplan show plan.json"
    click.echo(f"{'written to ' + str(output) + '; ' if output else ''}every op: {where}")


def _plan(model: str, batch: int | None, seq: int | None, options: PlanOptions) -> Plan:
    from autoplan.display import progress

    with progress("loading the model") as spinner:
        from autoplan import api

        module, inputs = api.load_model(model, batch=batch, seq=seq)
        source = {k: v for k, v in (("model", model), ("batch", batch), ("seq", seq)) if v is not None}
        return api.plan(
            module,
            inputs,
            cluster=options.cluster,
            nodes=options.nodes,
            devices=options.devices,
            memory=options.memory_bytes,
            mesh=options.mesh,
            pins=dict(options.pins) or None,
            precision=options.precision,
            optimizer=options.optimizer,
            remat=options.remat,
            source=source,
            progress=spinner.phase,
        )


@autoplan_command.command(
    "show",
    epilog=_examples(
        "autoplan show plan.json",
        "autoplan show plan.json --code > stage.py",
    ),
)
@click.argument("plan_file", metavar="PLAN.json", type=click.Path(path_type=Path))
@click.option("--code", is_flag=True, help="Print the emitted program of one rank instead; loads the model again.")
@click.option("--model", metavar="MODEL", help="Where --code finds the model, if not where the plan says.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON and nothing else.")
def show_command(plan_file: Path, code: bool, model: str | None, as_json: bool) -> None:
    """Print a plan as tables, or the code that it leads to."""
    from autoplan.ir.plan import Plan

    if code and as_json:
        raise click.UsageError("give --code or --json, not both")
    if model and not code:
        raise click.UsageError("--model is only used together with --code")
    found = Plan.load(plan_file)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=1))
    elif code:
        _show_code(found, model)
    else:
        from autoplan.display import plan_tables

        _print(plan_tables(found))


def _show_code(plan: Plan, model: str | None) -> None:
    from autoplan.display import progress

    with progress("emitting code"):
        from autoplan import api

        text = api.emit_code(plan, model)
    console = _console()
    if console.is_terminal:
        from rich.syntax import Syntax

        console.print(Syntax(text, "python", theme="ansi_dark", background_color="default", word_wrap=True))
    else:
        click.echo(text.rstrip("\n"))


@autoplan_command.command(
    "profile",
    epilog=MODEL_HELP
    + "\n"
    + _examples(
        "autoplan profile config.json --batch 8 --seq 1024 --cluster h100-8x --precision bf16",
        "autoplan profile train.py:build --depth 3 --top 20 --csv ops.csv --chrome-trace step.json",
    ),
)
@click.argument("model")
@_model_options
@click.option("--depth", type=click.IntRange(1), help="Levels of the module tree to show.")
@click.option("--top", type=click.IntRange(0), default=10, show_default=True, help="Slowest ops to list.")
@click.option(
    "--causal-flops",
    type=click.Choice(("full", "half")),
    default="full",
    show_default=True,
    help="Count causal attention in full, or the half that kernels execute.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON and nothing else.")
@click.option("--csv", "csv_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all ops to this file.")
@click.option(
    "--chrome-trace",
    "trace_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the step as trace events, for ui.perfetto.dev.",
)
def profile_command(
    model: str,
    batch: int | None,
    seq: int | None,
    cluster: str | None,
    precision: str,
    optimizer: str,
    depth: int | None,
    top: int,
    causal_flops: Literal["full", "half"],
    as_json: bool,
    csv_file: Path | None,
    trace_file: Path | None,
) -> None:
    """Estimate flops, seconds and memory of one step of MODEL on one device, before any plan."""
    from autoplan.display import profile_tables, progress
    from autoplan.hardware import load_cluster
    from autoplan.ir.files import write_whole

    name = cluster or "cpu-gloo"
    load_cluster(name)
    _check_writable(csv_file)
    _check_writable(trace_file)
    with progress("loading the model") as spinner:
        from autoplan import api

        module, inputs = api.load_model(model, batch=batch, seq=seq)
        found = api.profile(
            module,
            inputs,
            cluster=name,
            precision=precision,
            optimizer=optimizer,
            causal_flops=causal_flops,
            progress=spinner.phase,
        )
    if csv_file is not None:
        write_whole(csv_file, found.to_csv(), "the table")
    if trace_file is not None:
        write_whole(trace_file, json.dumps(found.to_chrome_trace()), "the trace")
    if as_json:
        click.echo(json.dumps(found.to_json()))
    else:
        _print(profile_tables(found, depth=depth, top=top))


@autoplan_command.command(
    "clusters",
    epilog=_examples(
        "autoplan clusters",
        "autoplan clusters a100-8x",
    ),
)
@click.argument("name", required=False)
def clusters_command(name: str | None) -> None:
    """List the clusters that autoplan knows, or all numbers of one with their sources."""
    from autoplan.display import cluster_tables, clusters_table
    from autoplan.hardware import known_clusters, load_cluster

    if name is None:
        _print([clusters_table(map(load_cluster, known_clusters()))])
    else:
        _print(cluster_tables(load_cluster(name)))


@autoplan_command.command(
    "calibrate",
    epilog=_examples(
        "autoplan calibrate -o my.toml",
        "autoplan profile config.json --batch 8 --seq 1024 --cluster my.toml",
    ),
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="Write the profile here: FILE.toml.",
)
@click.option("--ranks", type=click.IntRange(2), default=2, show_default=True, help="Processes for collectives.")
@click.option(
    "--threads", type=click.IntRange(1), default=1, show_default=True, help="Threads of one process on a CPU."
)
@click.option("--quick", is_flag=True, help="Fewer sizes and repeats.")
def calibrate_command(output: Path, ranks: int, threads: int, quick: bool) -> None:
    """Measure this machine and write a hardware profile that --cluster takes. Takes one or two minutes."""
    from autoplan.display import progress
    from autoplan.hardware import load_cluster
    from autoplan.ir.files import write_whole

    if output.suffix != ".toml":
        raise OptionError(f"{output}: the name of a profile file has to end in .toml")
    _check_writable(output)
    with progress("loading torch") as spinner:
        from autoplan.profiler.calibrate import calibrate

        text = calibrate(name=output.stem, ranks=ranks, threads=threads, quick=quick, progress=spinner.phase)
    write_whole(output, text, "the profile file")
    click.echo(f"{load_cluster(output)}\nwritten to {output}; all numbers: autoplan clusters {output}")


@autoplan_command.command(
    "demo",
    epilog=_examples(
        "autoplan demo",
    ),
)
@click.option("--steps", type=click.IntRange(3), default=20, show_default=True, help="Training steps.")
def demo_command(steps: int) -> int:
    """Plan a small GPT-2 under a memory cap, train it on four local processes, compare with one process."""
    from autoplan.display import demo_tables, progress

    with progress("starting") as spinner:
        from autoplan import api

        result = api.run_demo(steps=steps, progress=spinner.phase)
    _print(demo_tables(result))
    return 1 if result.failures else 0


def _pins(given: Sequence[str]) -> Mapping[str, str]:
    """``GLOB=PLACEMENT`` each; what the placement says is checked against the mesh later."""
    out: dict[str, str] = {}
    for text in given:
        glob, sign, placement = (part.strip() for part in text.rpartition("="))
        if not (glob and sign and placement):
            raise OptionError(f"pin {text!r} is not of the form GLOB=PLACEMENT, as in '*.c_fc.weight=R,S(1)'")
        if glob in out:
            raise OptionError(f"{glob!r} is pinned twice, to {out[glob]} and to {placement}")
        out[glob] = placement
    return out


def _check_writable(path: Path | None) -> None:
    """Refuses an output file that cannot be written before the time is spent."""
    if path is not None and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise OptionError(f"cannot write to {path}: {path.parent} is no folder that can be written to")


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)


def _print(tables: Sequence[RenderableType]) -> None:
    console = _console()
    for table in tables:
        console.print(table)


def main(args: Sequence[str] | None = None) -> None:
    """Entry point: runs a command and exits; errors become one message and an exit code."""
    settings = Settings()
    try:
        code = autoplan_command.main(args, prog_name="autoplan", standalone_mode=False, obj=settings)
        sys.stdout.flush()
    except click.exceptions.Abort:  # also how click passes on Ctrl-C
        click.echo("interrupted", err=True)
        code = 130
    except click.ClickException as e:
        _usage_error(e)
        code = e.exit_code
    except AutoplanError as e:
        _report(settings, e, f"error: {e}")
        code = e.exit_code
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except Exception as e:
        where = traceback.extract_tb(e.__traceback__)[-1]
        what = f"{type(e).__name__}: {' '.join(str(e).split())[:300]} ({Path(where.filename).name}:{where.lineno})"
        _report(settings, e, f"error: this is a bug in autoplan: {what}; rerun as autoplan --debug ... for details")
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


def _usage_error(error: click.ClickException) -> None:
    """As every other error: one line, and where to read on."""
    click.echo(f"error: {error.format_message()}", err=True)
    ctx = getattr(error, "ctx", None)
    if ctx is not None:
        click.echo(f"see {ctx.command_path} --help", err=True)


def _report(settings: Settings, error: Exception, message: str) -> None:
    if settings.debug:
        traceback.print_exception(error)
    click.echo(message, err=True)


if __name__ == "__main__":
    main()
