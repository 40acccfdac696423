"""`batchwright tune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchwright.catalogue.cards import names_a_card
from batchwright.cli.options import (
    PLACES,
    RANKS_ON_CARD,
    Command,
    Count,
    Price,
    own_command,
    parse_shape,
    settle_target,
    shared,
    target_or_script,
)
from batchwright.errors import InvalidInputError
from batchwright.planning.dialects import FRAMEWORKS, find_dialect
from batchwright.ranks.meeting import is_first_rank, read_place
from batchwright.report.display import print_result, render_plain, report_progress
from batchwright.targets import find_target
from batchwright.timing.collectives import read_network
from batchwright.units import parse_whole_number
from batchwright.user_files import check_place

if TYPE_CHECKING:
    from batchwright.scripts.script import Script


_FOR_SCRIPTS = (
    *("--on", "--memory", "--effective-batch", "--limit", "--steps", "--shape", "--noise-batch", "--skip"),
    *("--samples", "--hours", "--run-file", "--resume", "--for", "--devices", "--network", "--price-per-hour"),
)


@click.command("tune", cls=Command, moved={"--seed": "in Python: bw.tune(target, seed=1)"})
@target_or_script
@shared("--on", help=f"{PLACES}  [default: the accelerator, else cpu]")
@shared("--memory", help="[default: what is free]")
@shared("--devices", help=f"{RANKS_ON_CARD}  [default: 1, under torchrun its ranks]")
@shared("--network")
@shared(
    "--effective-batch",
    help="Samples per optimizer step, over all devices, if they are to stay.  [default: the one that pays]",
)
@shared("--limit")
@shared("--steps")
@shared("--shape")
@click.option("--noise-batch", type=Count(), help="The effective batch to train those steps at.  [default: 64]")
@click.option(
    "--branches",
    "branch_batches",
    metavar="LIST",
    help="Also train short branches at these batches, such as 16,32,128; 16,32,128@0,500: begun there and at step 500.",
)
@click.option("--race", is_flag=True, help="Train the recommended batch against half and double.")
@shared(
    "--samples",
    help="Samples to train on in the run to come.  [default: the data once, or 10 times what was trained]",
)
@click.option("--hours", type=float, help="How long the run is to take, instead of --samples.")
@click.option("--until-loss", type=float, metavar="LOSS", help="The loss at which it is to end, instead of --samples.")
@click.option("--price-per-hour", type=Price(), metavar="PRICE", help="Of one device: also say what the run costs.")
@click.option(
    "--skip", metavar="STAGES", help="Leave out fit, estimate, throughput, audit, noise, branches, race or rate."
)
@click.option(
    "--run-file", "file", metavar="FILE", default="run.json", show_default=True, help="Where the run is written."
)
@click.option("--resume", is_flag=True, help="Resume the run in that file.")
@shared("--for")
@own_command("--batch-flag", "--accumulation-flag")
@shared("--json")
@click.pass_context
def command(ctx: click.Context, /, target: str | Script, framework: str | None, as_json: bool, **options: Any) -> int:
    """Tune a workload: what fits, how fast, is accumulation right, how large pays, and what to type.

    TARGET is a workload: path.py:function or module:function. Behind -- stands your own command instead, which is run
    unmodified; the answer is then also the command line to type. Each stage can be skipped; if one fails, the others go
    on. What was measured is in the run's file after every stage.

    \b
    batchwright tune train.py:workload --memory 16GiB
    batchwright tune train.py:workload --on a100-40gb --devices 8
    batchwright tune --memory 16GiB -- python train.py --batch-size {micro_batch} --grad-accum {accumulation}
    batchwright tune train.py:workload --memory 16GiB --resume --for transformers
    torchrun --nproc-per-node 2 -m batchwright tune train.py:workload
    """
    target = settle_target(ctx, target, options, for_scripts=_FOR_SCRIPTS)
    options["shape"] = parse_shape(options.pop("shapes"))
    options["skip"] = tuple(name.strip() for name in (options["skip"] or "").split(",") if name.strip())
    if options["branch_batches"] is not None:
        batches, at, places = options["branch_batches"].partition("@")
        options["branch_batches"] = tuple(parse_whole_number(part, "--branches") for part in batches.split(","))
        steps = places.split(",") if at else ["0"]
        options["branch_steps"] = tuple(
            parse_whole_number(part, "the steps behind @ of --branches", least=0) for part in steps
        )
    else:
        options["branch_batches"] = ()
    ranks = read_place().world_size
    if options["devices"] is None:
        options["devices"] = ranks
    elif ranks > 1 and options["devices"] != ranks:
        raise InvalidInputError(
            f"--devices {options['devices']} under torchrun with {ranks} ranks.", remedy=f"--devices {ranks}"
        )
    read_network(options["network"])
    if framework is not None:
        find_dialect(framework)
    if options["devices"] > ranks and not isinstance(target, str) and not names_a_card(options["on"] or ""):
        raise InvalidInputError(
            "--devices of a command of your own are those of a simulated card; on this machine one of them runs.",
            remedy=f"--on a100-40gb --devices {options['devices']}",
        )
    if isinstance(target, str):
        find_target(target)
    file = Path(options["file"]).absolute()
    check_place(file, what="the run", option="file=FILE")
    # Here: what can be known to be wrong before torch is imported, which takes seconds, was refused by now.
    from batchwright.tuning.tune import tune

    prints = is_first_rank()
    with report_progress(target, prints=prints) as say:
        tuned = tune(target, **options, progress=say)
    if not prints:
        return 0
    recommendation = tuned.run["recommendation"]
    if framework is not None and "skipped" not in recommendation and not as_json:
        # Only what is to be pasted goes to stdout, so that `> config.json` is a config.
        click.echo(render_plain(tuned), err=True)
        click.echo(recommendation["configs"][framework.lower()])
        return 0
    print_result(tuned, as_json=as_json)
    if tuned.file is None:
        click.echo(f"Error: the run is not in {options['file']}, which could not be written.", err=True)
        return 1
    click.echo(f"the run is in {options['file']}; the page: batchwright report {options['file']}", err=True)
    if "skipped" not in recommendation:
        command, *arguments = tuned.run["workload"]["command"].partition(" -- ")
        options_to_add = f"--run-file {options['file']} --resume --for {FRAMEWORKS[0]}"
        click.echo(f"what to type: {command} {options_to_add}{''.join(arguments)}", err=True)
        return 0
    return 3 if any(isinstance(section, dict) and section.get("raised") for section in tuned.run.values()) else 1
