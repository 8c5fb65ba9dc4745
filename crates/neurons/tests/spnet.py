"""A plain reading of Izhikevich's spnet (2006), for comparison spike by spike.

Reads `SPNET` parameters and the synapses of every neuron from the file given, runs the published loop with weights,
derivatives and currents in units of 2^-20 mV, and prints each spike as `STEP NEURON`, then `weight SUM` over all synapses.

File: first line `neurons synapses delays column_neurons column_excitatory steps`, then a line for each step with its input
neurons, then a line for each neuron: weight and pairs of target and delay index.
"""

import sys

import numpy as np

UNIT = 1 << 20


def main():
    lines = open(sys.argv[1]).read().split("\n")
    N, M, D, n, ne, T = map(int, lines[0].split())
    inputs = [list(map(int, line.split())) for line in lines[1 : 1 + T]]
    post = np.zeros((N, M), int)
    delay = np.zeros((N, M), int)
    s = np.zeros((N, M), object)
    for i, line in enumerate(lines[1 + T : 1 + T + N]):
        words = list(map(int, line.split()))
        s[i, :] = words[0]
        post[i] = words[1::2]
        delay[i] = words[2::2]
    s = s.astype(np.int64)
    sd = np.zeros((N, M), np.int64)
    excitatory = np.arange(N) % n < ne
    a = np.where(excitatory, 0.02, 0.1)
    d = np.where(excitatory, 8.0, 2.0)
    v = np.full(N, -65.0)
    u = 0.2 * v
    # Incoming excitatory synapses of each neuron.
    pre = [[] for _ in range(N)]
    for i in range(N):
        if excitatory[i]:
            for j in range(M):
                pre[post[i, j]].append((i, j))
    pre = [(np.array([p[0] for p in q], int), np.array([p[1] for p in q], int)) for q in pre]

    # Traces as whole numbers of units: LTP[i][step + D], LTD[i], by the steps since the spike.
    def trace(start):
        value, table = start, []
        for _ in range(2000):
            table.append(int(np.floor(value * UNIT + 0.5)))
            value = value * 0.95
        return np.array(table, np.int64)

    ltp_table, ltd_table = trace(0.1), trace(0.12)
    never = -(10**6)
    # Last firing of each neuron as of each step, so that LTP can be read D steps back.
    history = np.full((T + D + 1, N), never)
    last = np.full(N, never)

    def ltp(neurons, steps):
        known = np.where(steps >= 0, history[np.maximum(steps, 0), neurons], never)
        age = np.minimum(steps - known, 1999)
        return np.where(known == never, 0, ltp_table[np.maximum(age, 0)])

    firings = []
    for t in range(T):
        I = np.zeros(N, np.int64)
        for i in inputs[t]:
            I[i] += 20 * UNIT
        fired = np.nonzero(v >= 30)[0]
        for i in fired:
            v[i] = -65.0
            u[i] += d[i]
            last[i] = t
            sources, places = pre[i]
            if len(sources):
                sd[sources, places] += ltp(sources, t - delay[sources, places] - 1)
            firings.append((t, i))
            print(t, i)
        history[t] = last
        for when, i in reversed(firings):
            if t - when >= D:
                break
            chosen = np.nonzero(delay[i] == t - when)[0]
            targets = post[i, chosen]
            I[targets] += s[i, chosen]
            if excitatory[i]:
                age = np.minimum(t - last[targets], 1999)
                sd[i, chosen] -= np.where(last[targets] == never, 0, ltd_table[age])
        current = I.astype(float) / UNIT
        v += 0.5 * ((0.04 * v + 5.0) * v + 140.0 - u + current)
        v += 0.5 * ((0.04 * v + 5.0) * v + 140.0 - u + current)
        u += a * (0.2 * v - u)
        if (t + 1) % 1000 == 0:
            s[excitatory] = np.clip(s[excitatory] + 10486 + sd[excitatory], 0, 10 * UNIT)
            scaled = sd[excitatory] * 9
            sd[excitatory] = np.where(scaled < 0, -((-scaled) // 10), scaled // 10)
    print("weight", int(s.sum()))


main()
