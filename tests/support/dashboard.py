"""The dashboard's panels, and the metrics that they read."""

import json
import re
from pathlib import Path

OBSERVE = Path(__file__).parents[2] / "docker" / "observe"
DASHBOARD = json.loads((OBSERVE / "dashboards" / "outrider.json").read_text())
METRIC = re.compile(r"\b(?:outrider|vllm|sglang)[a-z_:]*[a-z]\b")


def expressions(panels=DASHBOARD["panels"]):
    for panel in panels:
        yield from (target["expr"] for target in panel.get("targets", ()))
        yield from expressions(panel.get("panels", ()))
