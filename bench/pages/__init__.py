"""What stands between the marks of docs/benchmarks: one module a kind of table, and the plots."""
