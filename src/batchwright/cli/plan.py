"""`batchwright plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from batchwright.cli.options import Count, NumbersCommand, json_option, print_found, print_json
from batchwright.planning.dialects import FRAMEWORKS, unspoken_settings
from batchwright.planning.split import POLICIES

if TYPE_CHECKING:
    from collections.abc import Callable


@click.command("plan", cls=NumbersCommand)
@click.argument("effective", type=Count(), required=False)
@click.option("--micro-batch", type=Count(), help="Largest micro-batch that fits on one device.")
@click.option("--devices", type=Count(), default=1, show_default=True, help="Data-parallel ranks.")
@click.option("--samples", type=Count(), help="Samples in the dataset; gives forwards and updates per epoch.")
@click.option("--drop-last", is_flag=True, help="Drop the incomplete micro-batch at the end of an epoch.")
@click.option("--eval-micro-batch", type=Count(), help="Micro-batch for evaluation.  [default: that of training]")
@click.option("--workers", type=Count(least=0), default=0, show_default=True, help="Processes that load data.")
@click.option(
    "--policy",
    metavar=f"[{'|'.join(POLICIES)}]",
    default="nearest",
    show_default=True,
    help="How to round a target that does not divide; 'exact' uses uneven micro-batches.",
)
@click.option("--times", metavar="M=S,...", help="Measured seconds: 4=0.11 for one pass, 4x8=0.95 for a whole step.")
@click.option("--model", metavar="NAME", help="Model by name: adds its memory to the table, by formula.")
@click.option("--seq-len", type=Count(), help="Tokens per sample, for --model.  [default: 1024]")
@click.option("--for", "framework", metavar="FRAMEWORK", help=f"Print what to paste into: {', '.join(FRAMEWORKS)}.")
@click.option(
    "--check",
    "config",
    metavar="FILE",
    help="Check the numbers of a DeepSpeed or TrainingArguments file instead.",
)
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    effective: int | None,
    micro_batch: int | None,
    devices: int,
    samples: int | None,
    drop_last: bool,
    eval_micro_batch: int | None,
    workers: int,
    policy: str,
    times: str | None,
    model: str | None,
    seq_len: int | None,
    framework: str | None,
    config: str | None,
    as_json: bool,
) -> int:
    """Split an effective batch into micro-batch x accumulation x devices.

    \b
    batchwright plan 1024 --micro-batch 48 --devices 4
    batchwright plan 32 --micro-batch 8 --samples 10000 --for transformers
    batchwright plan --check ds_config.json --devices 8
    """
    if config is not None:
        return _check(ctx, config, devices, as_json)
    if effective is None or micro_batch is None:
        missing = "EFFECTIVE, the batch you want," if effective is None else "--micro-batch, the largest that fits,"
        raise click.UsageError(f"{missing} is needed. Example: batchwright plan 256 --micro-batch 8 --devices 4", ctx)
    from batchwright.planning.plan import plan
    from batchwright.planning.times import parse_times

    answer = plan(
        effective,
        micro_batch=micro_batch,
        devices=devices,
        samples=samples,
        drop_last=drop_last,
        eval_micro_batch=eval_micro_batch,
        workers=workers,
        policy=policy,
        times=None if times is None else parse_times(times),
        estimate=_peak_of_named(ctx, model, seq_len),
    )
    if framework is None:
        print_found(answer, as_json=as_json)
        return 0
    settings, snippet = answer.to(framework), answer.snippet(framework)
    unspoken = unspoken_settings(answer, framework)
    if as_json:
        said = {"framework": framework.lower(), "config": settings, "snippet": snippet, "not_in_config": unspoken}
        print_json({**answer.to_dict(), **said})
        return 0
    from batchwright.report.text.plan_text import summarize_plan

    # Only what is to be pasted goes to stdout, so that `> config.json` is a config.
    click.echo(summarize_plan(answer), err=True)
    if unspoken:
        click.echo(f"{framework} has no setting for {', '.join(unspoken)}: set it where you make the loaders", err=True)
    click.echo(snippet)
    return 0


def _peak_of_named(ctx: click.Context, model: str | None, seq_len: int | None) -> Callable[[int], int] | None:
    if model is None:
        if seq_len is not None:
            raise click.UsageError("--seq-len belongs to --model.", ctx)
        return None
    from batchwright.memory.formulas import estimate_named

    return lambda micro_batch: estimate_named(model, micro_batch=micro_batch, seq_len=seq_len or 1024).peak


def _check(ctx: click.Context, config: str, devices: int, as_json: bool) -> int:
    """Check a config file; the numbers of a plan have no place beside it."""
    planning = {
        "effective",
        "micro_batch",
        "samples",
        "drop_last",
        "eval_micro_batch",
        "workers",
        "policy",
        "times",
        "model",
        "seq_len",
        "framework",
    }
    given = [p for p in planning if ctx.get_parameter_source(p) is click.core.ParameterSource.COMMANDLINE]
    if given:
        names = ", ".join(
            sorted(
                "EFFECTIVE" if p == "effective" else f"--{'for' if p == 'framework' else p.replace('_', '-')}"
                for p in given
            )
        )
        raise click.UsageError(
            f"--check reads all numbers from the file and takes only --devices; received {names}.", ctx
        )
    from batchwright.planning.config_check import check_config

    result = check_config(config, devices=devices)
    print_found(result, as_json=as_json)
    return 0 if result.agrees else 1
