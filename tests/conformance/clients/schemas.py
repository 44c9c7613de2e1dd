"""schemathesis: requests made up from /openapi.json, and whether the answers are what it says."""

import re

from told import URL, check, output_of

# Weights, pauses and aborts are for administrators, and would disturb the rest.
CONTROL = "^/(update_weights|pause|continue|abort|flush)"
CHECKS = "status_code_conformance,content_type_conformance,response_schema_conformance,response_headers_conformance"


@check("answers are as described, none of them a 500")
def _():
    told = output_of(
        "schemathesis", "--config-file", "/dev/null", "run", f"{URL}/openapi.json", "--checks", CHECKS, "-n", "8",
        "--phases", "examples,coverage,fuzzing", "--exclude-path-regex", CONTROL, "--request-timeout", "90",
        "--seed", "1", "--no-color", "--max-time", "240",
    )  # fmt: skip
    return re.search(r"(\d+) generated", told).group(0)
