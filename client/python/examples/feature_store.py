"""A feature store: one row of numbers for each user, as numpy sees it.

    python feature_store.py shm:///run/farside/kv.sock

Rows are written by a job and read by a service, which needs many of them at once.
"""

import sys

import farside
import numpy

ROW = numpy.dtype([("visits", "<u4"), ("age", "<u2"), ("scores", "<f4", 8)])


def main():
    with farside.Client(sys.argv[1]) as client:
        rows = numpy.zeros(1000, ROW)
        rows["visits"] = numpy.arange(1000)
        # A slice of one row, because a row by itself is a copy.
        client.put_many((f"user:{n}", rows[n : n + 1]) for n in range(1000))

        wanted = [7, 77, 777]
        found = numpy.zeros(len(wanted), ROW)
        targets = [found[n : n + 1] for n in range(len(wanted))]
        client.get_many_into([f"user:{n}" for n in wanted], targets)
        print("visits:", found["visits"])

        # Another job may change the row between the two calls: then this one starts again.
        while True:
            row = client.get_versioned("user:7")
            changed = numpy.frombuffer(row.data, ROW).copy()
            changed["visits"] += 1
            if client.compare_exchange_version("user:7", row.version, changed):
                break
        print("now:", changed["visits"][0])


if __name__ == "__main__":
    main()
