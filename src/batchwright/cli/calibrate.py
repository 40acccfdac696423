"""`batchwright calibrate`."""

from __future__ import annotations

import click


@click.command("calibrate")
def command() -> int:
    """Profile this machine in a minute, so that estimates know its speed.

    Times layers of many sizes on the accelerator of this machine, else on its CPU, and keeps the profile in the cache
    folder ($BATCHWRIGHT_CACHE). `estimate` uses it for steps on this machine, with this torch and as many threads. The
    file may be shared.

    \b
    batchwright calibrate
    batchwright estimate train.py:workload --micro-batch 8 --on cpu
    """
    from batchwright.device.device import default_device
    from batchwright.timing.calibrate import calibrate
    from batchwright.timing.profile import default_file, write_profile

    device = default_device()
    profile = calibrate(device, progress=lambda text: click.echo(text, err=True))
    file = default_file(profile.machine)
    write_profile(profile, file)
    low, high = profile.spread
    click.echo(
        f"{profile.machine.device}: {len(profile.curves) + len(profile.products)} operators and kinds were timed"
    )
    click.echo(f"single layers take {low:.2f} to {high:.2f} of what the profile says of them (the middle 90 %)")
    click.echo(f"kept in {file}")
    for note in profile.notes:
        click.echo(f"note: {note}")
    return 0
