"""`batchwright plan`."""

from __future__ import annotations

import click

from batchwright.cli.options import Command, Count, shared, typed_options
from batchwright.planning.split import POLICIES
from batchwright.report.display import print_json, print_result

_MOVED = {
    "--drop-last": "in Python: bw.plan(256, micro_batch=8, samples=10_000, drop_last=True)",
    "--eval-micro-batch": "in Python: bw.plan(256, micro_batch=8, eval_micro_batch=16)",
    "--times": "in Python: bw.plan(256, micro_batch=8, times={4: 0.11, 8: 0.19, (4, 8): 0.95})",
    "--workers": "in Python: bw.plan(256, micro_batch=8, workers=4)",
    **dict.fromkeys(("--model", "--seq-len"), "in Python: bw.plan(256, micro_batch=8, estimate=...)"),
}


@click.command("plan", cls=Command, moved=_MOVED)
@click.argument("effective", type=Count(), required=False)
@shared("--micro-batch", help="Samples in one forward and backward on one device: the most that fit.")
@shared("--devices", default=1)
@shared("--samples", help="Samples to train on in an epoch: gives its forwards and updates.")
@click.option(
    "--policy",
    metavar=f"[{'|'.join(POLICIES)}]",
    default="nearest",
    show_default=True,
    help="How to round a target that does not divide; 'exact' uses uneven micro-batches.",
)
@shared("--for")
@click.option(
    "--check", "config", metavar="FILE", help="Check the numbers of a DeepSpeed or TrainingArguments file instead."
)
@shared("--json")
@click.pass_context
def command(
    ctx: click.Context,
    effective: int | None,
    micro_batch: int | None,
    devices: int,
    samples: int | None,
    policy: str,
    framework: str | None,
    config: str | None,
    as_json: bool,
) -> int:
    """Split an effective batch into micro-batch x accumulation x devices.

    \b
    batchwright plan 1024 --micro-batch 48 --devices 4
    batchwright plan 32 --micro-batch 8 --samples 10000 --for transformers
    batchwright plan --check ds_config.json --devices 8

    In Python, bw.plan also takes times (measured seconds), drop_last, eval_micro_batch, workers and estimate (a peak
    for each row).
    """
    if config is not None:
        return _check_file(ctx, config, devices, as_json)
    if effective is None or micro_batch is None:
        missing = "EFFECTIVE, the batch you want," if effective is None else "--micro-batch, the largest that fits,"
        raise click.UsageError(f"{missing} is needed. Example: batchwright plan 256 --micro-batch 8 --devices 4", ctx)
    from batchwright.planning.plan import plan

    answer = plan(
        effective,
        micro_batch=micro_batch,
        devices=devices,
        samples=samples,
        policy=policy,
    )
    if framework is None:
        print_result(answer, as_json=as_json)
        return 0
    settings, snippet = answer.to(framework), answer.snippet(framework)
    if as_json:
        # What a config cannot say, workers say, is not asked for on the command line: `not_in_config` is always empty.
        pasted = {"framework": framework.lower(), "config": settings, "snippet": snippet, "not_in_config": []}
        print_json({**answer.to_dict(), **pasted})
        return 0
    from batchwright.report.text.plan_text import summarize_plan

    # Only what is to be pasted goes to stdout, so that `> config.json` is a config.
    click.echo(summarize_plan(answer), err=True)
    click.echo(snippet)
    return 0


def _check_file(ctx: click.Context, config: str, devices: int, as_json: bool) -> int:
    """Check a config file; the numbers of a plan have no place beside it."""
    refused = ", ".join(sorted(typed_options(ctx) - {"--check", "--devices", "--json"}))
    if refused:
        raise click.UsageError(
            f"--check reads all numbers from the file and takes only --devices; received {refused}.", ctx
        )
    from batchwright.planning.config_check import check_config

    result = check_config(config, devices=devices)
    print_result(result, as_json=as_json)
    return 0 if result.agrees else 1
