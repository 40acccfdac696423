"""`batchwright calibrate`."""

from __future__ import annotations

import click


@click.command("calibrate")
def command() -> int:
    """Profile this machine in a minute, so that estimates know its speed.

    Times layers of many sizes on the accelerator of this machine, else on its CPU, and keeps the profile in the cache
    folder ($BATCHWRIGHT_CACHE). `estimate` uses it for steps on this machine, with this torch and as many threads. The
    file may be shared. Under torchrun, collectives of these ranks are timed as well.

    \b
    batchwright calibrate
    batchwright estimate train.py:workload --micro-batch 8 --on cpu
    torchrun --nproc-per-node 4 -m batchwright calibrate
    """
    from contextlib import suppress
    from dataclasses import replace

    from batchwright.device.device import default_device
    from batchwright.errors import InvalidInputError
    from batchwright.ranks.meeting import is_first_rank
    from batchwright.ranks.session import process_group, together
    from batchwright.timing.calibrate import calibrate
    from batchwright.timing.calibrate_ranks import time_collectives
    from batchwright.timing.profile import default_file, read_profile, write_profile

    device = default_device()
    prints = is_first_rank()
    with together("calibrate") as ranks:
        with process_group(device) as own:
            curves = {} if ranks.is_alone else time_collectives(own)
        say = ranks.ticking(lambda text: click.echo(text, err=True))
        # The others wait: what they ran beside it would be timed.
        profile = calibrate(device, progress=say) if prints else None
        ranks.share("calibrated", True)
    if profile is None:
        return 0
    file = default_file(profile.machine)
    profile = replace(profile, ranks=ranks.world_size, collectives=curves)
    if ranks.is_alone:  # collectives that were timed before are still this machine's
        with suppress(InvalidInputError, OSError):
            before = read_profile(file)
            profile = replace(profile, ranks=before.ranks, collectives=before.collectives)
    write_profile(profile, file)
    low, high = profile.spread
    click.echo(
        f"{profile.machine.device}: {len(profile.curves) + len(profile.products)} operators and kinds were timed"
    )
    if profile.collectives:
        click.echo(f"{' and '.join(profile.collectives)} of {profile.ranks} ranks were timed")
    click.echo(f"single layers take {low:.2f} to {high:.2f} of what the profile says of them (the middle 90 %)")
    click.echo(f"kept in {file}")
    for note in profile.notes:
        click.echo(f"note: {note}")
    return 0
