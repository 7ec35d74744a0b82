"""Offline benchmarks: `bench.cpu` beside transformers on this CPU, `bench.gpu` with named geometries on a GPU."""
