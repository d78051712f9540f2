"""`stillroom fetch`: bring a small real model to this machine, once."""

from __future__ import annotations

from pathlib import Path

from stillroom.commands.display import make_console
from stillroom.config import FetchConfig, Options
from stillroom.models.fetch import cached_smollm2, fetch_smollm2


def fetch(config: FetchConfig, options: Options) -> Path | None:
    """Fetch, verify, convert and keep the model; a second call only says where it is."""
    console = make_console(quiet=options.quiet)
    cache_dir = Path(config.cache_dir).expanduser() if config.cache_dir else None
    if options.dry_run:
        console.print(f"would fetch {config.name} (93 MB) into {cached_smollm2(cache_dir)}")
        return None
    path = fetch_smollm2(cache_dir)
    console.print(f"{config.name}: {path}")
    return path
