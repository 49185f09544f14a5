"""The only place that starts threads and processes."""
