"""What operators see of a running server: metrics, traces, one line of statistics a request."""
