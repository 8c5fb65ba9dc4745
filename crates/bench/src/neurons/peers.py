"""Delivery of spikes in NEST and Brian2, beside `millstream bench neurons`.

`peers.py NEURONS SYNAPSES PERIOD STEPS THREADS MODE` prints a line `NAME EVENTS SECONDS` for each simulator that is installed.
Each neuron fires once in PERIOD steps of 1 ms, whatever it gets, so all simulators deliver the same number of spikes. MODE is
`fixed` or `plastic` (pairs of spikes). Delays are 1 to 20 ms.
"""

import sys
import time


def nest(neurons, synapses, period, steps, threads, mode):
    import nest as n

    n.set_verbosity("M_ERROR")
    n.resolution = 1.0
    n.local_num_threads = threads
    population = n.Create(
        "ignore_and_fire",
        neurons,
        params={"rate": 1000.0 / period, "phase": n.random.uniform(0.0001, 1.0)},
    )
    model = "static_synapse" if mode == "fixed" else "stdp_synapse"
    delay = n.CreateParameter("uniform_int", {"max": 20}) + 1.0
    n.Connect(
        population,
        population,
        {"rule": "fixed_outdegree", "outdegree": synapses, "allow_autapses": False},
        {"synapse_model": model, "weight": 1.0, "delay": delay},
    )
    n.Simulate(20.0)
    start = time.perf_counter()
    n.Simulate(float(steps))
    return neurons * synapses * steps / period, time.perf_counter() - start


def brian(neurons, synapses, period, steps, threads, mode):
    import tempfile

    import brian2 as b
    import numpy as np

    b.prefs.logging.console_log_level = "ERROR"
    folder = tempfile.mkdtemp()
    b.set_device("cpp_standalone", directory=folder, build_on_run=False)
    b.prefs.devices.cpp_standalone.openmp_threads = threads
    b.defaultclock.dt = 1 * b.ms
    group = b.NeuronGroup(
        neurons,
        "count : integer\ncurrent : 1",
        threshold="count >= %d" % period,
        reset="count = 0",
    )
    group.run_regularly("count += 1", dt=1 * b.ms)
    rng = np.random.default_rng(1)
    group.count = rng.integers(0, period, neurons)
    source = np.repeat(np.arange(neurons), synapses)
    target = rng.integers(0, neurons, neurons * synapses)
    if mode == "fixed":
        wires = b.Synapses(group, group, "w : 1", on_pre="current_post += w")
    else:
        wires = b.Synapses(
            group,
            group,
            """w : 1
            dapre/dt = -apre / (20*ms) : 1 (event-driven)
            dapost/dt = -apost / (20*ms) : 1 (event-driven)""",
            on_pre="current_post += w\napre = 0.1\nw = clip(w - apost, 0, 10)",
            on_post="apost = 0.12\nw = clip(w + apre, 0, 10)",
        )
    wires.connect(i=source, j=target)
    wires.w = 1.0
    wires.delay = rng.integers(1, 21, neurons * synapses) * b.ms
    b.run(20 * b.ms)
    b.run(steps * b.ms)
    b.device.build(directory=folder, compile=True, run=True)
    import shutil

    # The time of the loop of the last run alone, as Brian's program measures it.
    seconds = b.device._last_run_time
    shutil.rmtree(folder, ignore_errors=True)
    return neurons * synapses * steps / period, seconds


def main():
    neurons, synapses, period, steps, threads = map(int, sys.argv[1:6])
    mode = sys.argv[6]
    for name, run in [("NEST", nest), ("Brian2", brian)]:
        if len(sys.argv) > 7 and name not in sys.argv[7:]:
            continue
        try:
            events, seconds = run(neurons, synapses, period, steps, threads, mode)
        except ImportError as error:
            print(f"missing {name} {error}", flush=True)
            continue
        except Exception as error:
            print(f"failed {name} {str(error).splitlines()[-1] if str(error) else type(error)}", flush=True)
            continue
        print(f"{name} {events} {seconds}", flush=True)


main()
