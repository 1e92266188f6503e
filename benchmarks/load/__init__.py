"""Load on a real server: rows of the benchmarks in which one server process has a great deal to do.

    rows       what is done to it, and the bars           scene      one server, probes before and during
    servers    the process, its memory, its ticks         measured   what runs in it: `sgpu`, with a watch on its ticks
    probe      somebody who uses it meanwhile             asking     requests that cost their sender little
    nodes      simulated nodes over HTTP, 2,000 runs      gang       one run of 10,000 ranks, played by hand
    flooding   a rank that writes 1 GB/s                  uploading  parts of a large upload
    slow       connections that say little, or too much

Everything that makes load is a process of its own. `SGPU_BENCH_SCALE=0.1` does a tenth of it, `--quick` a twentieth.
"""
