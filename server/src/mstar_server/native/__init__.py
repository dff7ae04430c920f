"""The native request: `/generate` over HTTP and over a socket."""
