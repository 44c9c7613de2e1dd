"""What a process says about its start."""

import re
import subprocess
import sys
import time

from outrider.process.startup import Startup


def test_phases_add_up_to_the_time_since_the_start():
    began = time.monotonic() - 2.0
    startup = Startup(began)
    for phase in ("libraries", "weights", "libraries"):
        startup.done(phase)
    text = startup.describe()
    total, processor = (float(number) for number in re.findall(r"([\d.]+) s", text))
    phases = [float(number) for number in re.findall(r"(?:libraries|weights) ([\d.]+)", text)]
    assert len(phases) == 2
    assert abs(sum(phases) - total) < 0.03
    assert total >= 2.0
    assert processor > 0.0


def test_progress_is_in_per_cent():
    startup, reported = Startup(0.0), []
    startup.report("packing weights", 0, 3)  # to no listener
    startup.on_progress = reported.append
    for part in range(3):
        startup.report("packing weights", part, 3)
    assert reported == ["packing weights 0 %", "packing weights 33 %", "packing weights 66 %"]


def test_a_process_began_before_its_first_line():
    code = (
        "import time; time.sleep(0.3); from outrider.process.startup import STARTUP; "
        "STARTUP.done('x'); print(STARTUP.describe())"
    )
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 0.3 < float(re.findall(r"took ([\d.]+) s", text)[0]) < 60.0
