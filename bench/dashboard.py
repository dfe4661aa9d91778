"""Saves a dashboard of all runs in W&B: ``python -m bench.dashboard entity=me
project=attention-windtunnel``.

The dashboard is a workspace with the panels of ``conf/dashboard.yaml``. The command needs an API
key, W&B's server and ``pip install -e '.[dashboard]'``. ``python -m bench.report`` makes a page
of all runs without these."""

import os
import re

from omegaconf import DictConfig, OmegaConf

from harness.compose.cli import run_command, with_config

COLUMNS = 3  # panels in a row


@with_config("dashboard")
def main(cfg: DictConfig) -> None:
    import wandb  # slow imports come after the command line has been parsed

    from harness.plan.settings import parse_setting

    project, name = (parse_setting(cfg[key], str, key=key) for key in ("project", "name"))
    entity = parse_setting(cfg.entity, str | None, key="entity")
    mode = os.environ.get("WANDB_MODE")
    offline = mode in ("offline", "disabled", "dryrun")
    if offline or not wandb.login(prompt=False, verify=False):
        reason = "no API key is configured"
        if offline:
            reason = f"WANDB_MODE={mode}"
        raise ValueError(
            f"{reason}; the dashboard needs a login (wandb login), python -m bench.report does not"
        )
    try:
        owner = entity or wandb.Api().default_entity
        dashboard = workspace(
            OmegaConf.to_container(cfg.sections), entity=owner, project=project, name=name
        )
        dashboard.save()
    except ImportError as error:
        raise ValueError(
            f"{error.name} is not installed; pip install 'attention-windtunnel[dashboard]'"
        ) from error
    # W&B, the network and proxies raise many types, and none is a bug of this code
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(f"entity={entity} project={project}: W&B refused ({reason})") from error
    print(f"workspace: {dashboard.url}")


def workspace(sections: list[dict], *, entity: str, project: str, name: str):
    """Return a W&B ``Workspace``; its method ``save`` sends it to the server. A panel's ``type``
    names a class of W&B, and its other keys are keyword arguments of the class. Metrics ``y`` of a
    ``LinePlot`` may have a ``*`` (``pattern_of``)."""
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    def panel(*, type: str, y: tuple[str, ...] = (), **options):
        if type == "LinePlot":  # unsmoothed, so that a curve shows measured numbers only
            patterns = "|".join(pattern_of(metric) for metric in y if "*" in metric) or None
            options |= {
                "y": [metric for metric in y if "*" not in metric],
                "metric_regex": patterns,
                "smoothing_type": "none",
            }
        elif type == "ScatterPlot":
            options |= {"x": wr.SummaryMetric(options["x"]), "y": wr.SummaryMetric(*y)}
        elif y:
            options["media_keys" if type == "MediaBrowser" else "metrics"] = y
        return getattr(wr, type)(**options)

    layout = ws.SectionLayoutSettings(columns=COLUMNS, rows=2)
    ws_sections = [
        ws.Section(
            name=section["title"],
            panels=[panel(**options) for options in section["panels"]],
            is_open=True,
            layout_settings=layout,
        )
        for section in sections
    ]
    settings = ws.WorkspaceSettings(x_axis="bytes_seen", remove_legends_from_panels=False)
    return ws.Workspace(
        entity=entity, project=project, name=name, sections=ws_sections, settings=settings
    )


def pattern_of(metric: str) -> str:
    """Return the regular expression of a metric. ``*`` matches names with a dot
    (``layers.0.attention``), but not ``mean``."""
    return "^" + re.escape(metric).replace(r"\*", r".*\..*") + "$"


if __name__ == "__main__":
    run_command(main)
