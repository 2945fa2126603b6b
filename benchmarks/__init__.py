"""Workloads, a load client, offline and micro-benchmarks, and how their numbers are reported."""
