"""What the benchmarks share: statistics, the machine's limits, prompts, tables, pictures, where results are kept."""
